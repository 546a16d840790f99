"""Schedules of the learning rate: how it falls from round to round.

    linear   1 - (1 - f) r / R             r   rounds done, at most R
    cosine   f + (1 - f) (1 + cos(pi r / R)) / 2    f   `grpo.final_rate`,   R   `grpo.schedule_rounds`, or all rounds

The result is a factor on `grpo.learning_rate`, and the warm-up, which counts updates, is another. Both are functions of
what a checkpoint has, so a resumed run has the same rates.
"""

from __future__ import annotations

import math

from swarm_node.config import GrpoConfig


def decay(config: GrpoConfig, round: int, total: float) -> float:
    """The factor for the updates of a round, before which `round` rounds were done, in a run of `total` rounds. The
    schedule is linear or cosine."""
    done = min(1.0, round / (config.schedule_rounds or total))
    left = 1.0 - done if config.schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2
    return config.final_rate + (1.0 - config.final_rate) * left
