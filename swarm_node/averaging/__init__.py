"""Peers that train the same weights from the same start average them, a fragment at a time.

live weights -> fragments -> codecs -> bytes  ~~~ partner ~~~  bytes -> codecs -> robust -> outer step -> live weights

docs/averaging.md says what it does and whom it trusts.
"""

from swarm_node.averaging.averager import Averager, CohortPlace, cohort_id, rhythm
from swarm_node.averaging.cohort import make_averager
from swarm_node.averaging.cohort_weights import LateJoin
from swarm_node.averaging.fragments import Fragments

__all__ = ["Averager", "Fragments", "LateJoin", "CohortPlace", "cohort_id", "make_averager", "rhythm"]
