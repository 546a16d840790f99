"""Schedules of the learning rate: how it falls until the run ends.

    linear   1 - (1 - f) d                          d   part of the run that is done, 0 to 1
    cosine   f + (1 - f) (1 + cos(pi d)) / 2        f   `grpo.final_rate`

    d = r / R after r rounds of `grpo.schedule_rounds`, else the larger part of `rounds` and of `minutes`

The result is a factor on `grpo.learning_rate`, and the warm-up, which counts updates, is another. By rounds, both are
functions of what a checkpoint has, so a resumed run has the same rates.
"""

from __future__ import annotations

import math

from swarm_node.config import GrpoConfig


def decay(config: GrpoConfig, round: int, total: float, of_time: float = 0.0) -> float:
    """The factor for the updates of a round, before which `round` rounds of `total` were done, and the part `of_time`
    of the time that the run has. 1 if the schedule is neither linear nor cosine."""
    if config.schedule not in ("linear", "cosine"):
        return 1.0
    part = round / config.schedule_rounds if config.schedule_rounds else max(round / total, of_time)
    done = min(1.0, part)
    left = 1.0 - done if config.schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2
    return config.final_rate + (1.0 - config.final_rate) * left
