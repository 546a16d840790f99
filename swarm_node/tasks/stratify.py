"""Share draws out among sources by weight, with less noise than independent draws.

Each source gets n * w_i / sum(w) on average. With n >= sources, each gets one for certain, and the rest
follows the excess

    e_i = max(0, n * w_i / sum(w) - 1)

Fractions are settled by systematic sampling: the shares laid end to end in random order, cut by a comb with
teeth at u, u + 1, u + 2, …, u uniform in [0, 1).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import ceil


def allot(weights: Sequence[float], n: int, rng: random.Random) -> list[int]:
    """How many of `n` draws each source gets."""
    least = 1 if n >= len(weights) else 0
    total = sum(weights)
    excess = [max(0.0, n * weight / total - least) for weight in weights]
    spare = n - least * len(weights)
    scale = spare / sum(excess) if spare else 0.0
    order = list(range(len(weights)))
    rng.shuffle(order)
    offset, reached, teeth = rng.random(), 0.0, 0
    counts = [least] * len(weights)
    for i in order:
        reached += excess[i] * scale
        upto = spare if i == order[-1] else min(spare, ceil(reached - offset))
        counts[i] += upto - teeth
        teeth = upto
    return counts
