"""A sampler that did not earn its place in the package: kept so that `benchmarks.sharing` can show that.

    aha       w = exp(max(0, r - b) / T)                    r = best reward in the group, judged here; b = mean of own
                                                            rewards on that kind of task (1/2 if unknown); T = 0.2

It looks for what a node has yet to see done: a right answer to a task at which it always fails is e^5 = 148 times as
likely as one to a task that it has mastered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from swarm_node.sharing.replay_buffer import Offer

TEMPERATURE = 0.2


def aha(offers: Sequence[Offer]) -> list[float]:
    """Rewards are taken to lie within [0, 1]; larger differences count as 1."""
    gaps = [offer.best - (offer.own.reward if offer.own.known else 0.5) for offer in offers]
    return [math.exp(min(1.0, max(0.0, gap)) / TEMPERATURE) for gap in gaps]
