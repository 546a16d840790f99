"""Room 5: peers that train the same weights from the same start average them, a fragment at a time.

live weights -> fragments -> codecs -> bytes  ~~~ partner ~~~  bytes -> codecs -> robust -> outer -> live weights
                                              pairing

docs/averaging.md says what it does and whom it trusts; formulas and their sources are on top of each module.
"""

from __future__ import annotations

from typing import Any

from swarm_node.averaging.averager import Averager, Place, cohort_id, rhythm
from swarm_node.averaging.cohort_averager import CohortAverager
from swarm_node.averaging.fragments import Fragments
from swarm_node.averaging.late_join import LateJoin
from swarm_node.averaging.pair_averager import PairAverager
from swarm_node.config import AveragingConfig

__all__ = ["Averager", "Fragments", "LateJoin", "Place", "cohort_id", "make_averager", "rhythm"]


def make_averager(config: AveragingConfig, *args: Any, **kwargs: Any) -> Averager:
    """The averager that `config.method` asks for; further arguments as `Averager` takes them."""
    kind = PairAverager if config.method == "noloco" else CohortAverager
    return kind(config, *args, **kwargs)
