"""Down-sampling of rollouts: train on n answers of a group, those that differ most (PODS, arXiv 2504.13818).

    of answers in the order of their rewards: the best ceil(n / 2) and the worst floor(n / 2), ties in random order

For rewards 0 and 1 this is the part of n answers with the greatest variance. Answers without a score teach nothing and
are left out first.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from swarm_node.grpo.advantage import is_judged
from swarm_node.types import Group


def extremes(rewards: Sequence[float], n: int, rng: random.Random) -> list[int]:
    """Positions of the `n` answers to train on, in their order; all of them if there are no more."""
    shuffled = rng.sample(range(len(rewards)), len(rewards))
    order = sorted(shuffled, key=lambda i: rewards[i])
    worst = n // 2
    return sorted(order if len(order) <= n else order[:worst] + order[len(order) - (n - worst) :])


def down_sampled(group: Group, n: int, rng: random.Random, finished: bool = False) -> Group:
    """The group with `n` of its answers, fewer if not so many have a score; the group itself if `n` is 0 or it has no
    more. `finished`: answers that hit the length limit are left out first as well."""
    if not n or len(group.rollouts) <= n:
        return group
    counts = [i for i, r in enumerate(group.rollouts) if is_judged(r) and (r.finished or not finished)]
    kept = [counts[i] for i in extremes([group.rollouts[i].reward for i in counts], n, rng)]
    return msgspec.structs.replace(
        group,
        rollouts=[group.rollouts[i] for i in kept],
        advantages=None if group.advantages is None else [group.advantages[i] for i in kept],
    )
