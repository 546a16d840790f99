"""Advantages of a foreign group, and what this node knows of its own success to compare it with.

    own     A_i = clip((r_i - b) / max(s, FLOOR), -M, +M);   b, s = mean and std of own rewards on that kind of task
            then the negative ones are scaled down until they add up to no more than the positive ones do
    group   A_i = clip((r_i - mean_g) / (std_g + 1e-4), -M, +M);   where own answers are too few, or if asked for

The sender composes the group, so neither its mean nor its spread may set our scale: one right answer among seven wrong
ones would earn 2.5 wherever it comes from. Against the receiver's own success, a right answer is worth what it would be
worth had this node found it: much where it always fails, little where it mostly succeeds.

Rewards below b need a bound. Where this node does well, a stranger's wrong answers would each get a large negative
advantage, and there may be 63 of them for one right one. Most are texts that this policy would never write, and pushing
those down moves probability in directions nobody chose. So their sum is bounded; a group's own mean bounds it by itself
(it adds up to 0). A group in which nothing is better than b then has no advantage at all, and is not used (`teaches`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swarm_node.grpo.advantage import group_std, is_judged
from swarm_node.types import Group, Rollout

FLOOR = 0.25  # a quarter of the distance between right and wrong: the spread of a success rate of 7 %
DECAY = 0.95
"""Weight of earlier answers after each group: about the last twenty groups of a kind of task count. That is long enough
for a mean, and short enough to follow a policy that learns."""
MIN_ANSWERS = 16.0  # answers below which a mean is not worth comparing with: two groups of eight


@dataclass
class RewardStatistics:
    """Decayed sums over own answers to one kind of task."""

    n: float = 0.0  # answers
    rewards: float = 0.0
    squares: float = 0.0  # sum of squared rewards

    @property
    def known(self) -> bool:
        """Whether there were enough answers for `reward` and `spread`."""
        return self.n >= MIN_ANSWERS

    @property
    def reward(self) -> float:
        """Mean reward."""
        return self.rewards / self.n

    @property
    def spread(self) -> float:
        """Standard deviation of the reward."""
        return math.sqrt(max(0.0, self.squares / self.n - self.reward**2))


class TaskStatistics:
    """Reward statistics by task label. Only own answers count: a peer's say how well the peer does."""

    def __init__(self) -> None:
        self._by_label: dict[str, RewardStatistics] = {}

    def observe(self, groups: Sequence[Group]) -> None:
        """Take in own scored groups. Answers without a score do not count."""
        for group in groups:
            own = self._by_label.setdefault(group.task.label, RewardStatistics())
            judged = [r for r in group.rollouts if is_judged(r)]
            own.n = DECAY * own.n + len(judged)
            own.rewards = DECAY * own.rewards + sum(r.reward for r in judged)
            own.squares = DECAY * own.squares + sum(r.reward**2 for r in judged)

    def of(self, label: str) -> RewardStatistics:
        """Statistics of one kind of task; of no answers if there were none."""
        return self._by_label.get(label, RewardStatistics())


def foreign_advantages(rollouts: Sequence[Rollout], own: RewardStatistics | None, bound: float) -> list[float]:
    """One advantage for each of `rollouts`, 0 for those without a score; `own` = None: against the group's own mean."""
    rewards = torch.tensor([[r.reward if is_judged(r) else torch.nan for r in rollouts]], dtype=torch.float64)
    raw = group_std(rewards) if own is None else (rewards - own.reward) / max(own.spread, FLOOR)
    clipped = raw.nan_to_num(0.0)[0].clamp(-bound, bound).tolist()
    if own is None:
        return clipped
    up, down = sum(max(0.0, a) for a in clipped), sum(max(0.0, -a) for a in clipped)
    share = min(1.0, up / down) if down else 1.0
    return [a if a > 0 else a * share for a in clipped]


def earning(rollouts: Sequence[Rollout], advantages: Sequence[float]) -> list[bool]:
    """Which of `rollouts` are rewarded, or would be if better ones were left out."""
    least = min((r.reward for r in rollouts if is_judged(r)), default=0.0)
    return [is_judged(r) and (a > 0 or r.reward > least) for r, a in zip(rollouts, advantages, strict=True)]


def teaches(best: float, own: RewardStatistics | None) -> bool:
    """Whether a group whose best reward is `best` has any advantage. The group must hold two different rewards."""
    return own is None or best > own.reward
