"""Advantages of a foreign group.

    own     A_i = clip((r_i - b) / max(s, FLOOR), -M, +M);   b, s = mean and std of own rewards on that kind of task
            then the negative ones are scaled down until they add up to no more than the positive ones do
    group   A_i = clip((r_i - mean_g) / (std_g + 1e-4), -M, +M);   where own answers are too few, or if asked for

The sender composes the group, so neither its mean nor its spread may set our scale: one right answer among seven wrong
ones would earn 2.5 wherever it comes from. Against the receiver's own success a right answer is worth what it would be
worth had this node found it: much where it always fails, little where it mostly succeeds.

What is below b is another matter. Where this node does well, a stranger's wrong answers would each get a large negative
advantage, and there may be 63 of them for one right one; they are mostly texts that this policy would never write, and
pushing those down moves probability in directions nobody chose. Hence the bound on their sum, which a group's own mean
would keep by construction (it adds up to 0). A group in which nothing is better than what this node does anyway has no
advantage at all then: it teaches nothing, and is not used (`teaches`).

FLOOR is a quarter of the distance between right and wrong: the spread of a success rate of 7 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

from swarm_node.sharing.reward_stats import Belief, is_judged
from swarm_node.types import Rollout

FLOOR = 0.25
EPSILON = 1e-4


def foreign_advantages(rollouts: Sequence[Rollout], belief: Belief | None, bound: float) -> list[float]:
    """One advantage for each of `rollouts`, 0 for those that nobody judged; `belief` = `None`: the group's own mean."""
    rewards = [r.reward for r in rollouts if is_judged(r)]
    if belief is not None:
        baseline, scale = belief.reward, max(belief.spread, FLOOR)
    elif len(rewards) > 1:
        baseline, scale = fmean(rewards), stdev(rewards) + EPSILON
    else:
        return [0.0] * len(rollouts)
    raw = [(r.reward - baseline) / scale if is_judged(r) else 0.0 for r in rollouts]
    clipped = [min(bound, max(-bound, a)) for a in raw]
    if belief is None:
        return clipped
    up, down = sum(max(0.0, a) for a in clipped), sum(max(0.0, -a) for a in clipped)
    share = min(1.0, up / down) if down else 1.0
    return [a if a > 0 else a * share for a in clipped]


def earning(rollouts: Sequence[Rollout], advantages: Sequence[float]) -> list[bool]:
    """Which of `rollouts` are rewarded, or would be if better ones were left out."""
    least = min((r.reward for r in rollouts if is_judged(r)), default=0.0)
    return [is_judged(r) and (a > 0 or r.reward > least) for r, a in zip(rollouts, advantages, strict=True)]


def teaches(best: float, belief: Belief | None) -> bool:
    """Whether a group whose best reward is `best` has any advantage (it is known to hold two different rewards)."""
    return belief is None or best > belief.reward
