"""How well this node itself does on each kind of task, lately.

    of a group of k own answers:   n <- d n + k;   sums of rewards and of their squares alike;   d = 0.95

So what is remembered is about the last twenty groups of a kind: long enough for a mean, short enough to follow a
policy that learns. Only own answers count: a peer's say how well the peer does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from swarm_node.types import Group, Rollout

DECAY = 0.95
MIN_ANSWERS = 16.0
"""Answers below which a mean is not worth comparing with: two groups of eight."""


@dataclass
class Belief:
    """Decayed sums over own answers of one kind."""

    n: float = 0.0
    """Answers."""
    rewards: float = 0.0
    squares: float = 0.0

    @property
    def known(self) -> bool:
        """Whether there were enough answers."""
        return self.n >= MIN_ANSWERS

    @property
    def reward(self) -> float:
        """Mean reward; `known` beliefs only."""
        return self.rewards / self.n

    @property
    def spread(self) -> float:
        """Standard deviation of the reward; `known` beliefs only."""
        return math.sqrt(max(0.0, self.squares / self.n - self.reward**2))


class Posterior:
    """Beliefs by task label."""

    def __init__(self) -> None:
        self._beliefs: dict[str, Belief] = {}

    def observe(self, groups: Sequence[Group]) -> None:
        """Take in own scored groups; answers that nobody judged say nothing."""
        for group in groups:
            belief = self._beliefs.setdefault(group.task.label, Belief())
            judged = [r for r in group.rollouts if is_judged(r)]
            belief.n = DECAY * belief.n + len(judged)
            belief.rewards = DECAY * belief.rewards + sum(r.reward for r in judged)
            belief.squares = DECAY * belief.squares + sum(r.reward**2 for r in judged)

    def of(self, label: str) -> Belief:
        """What is known of one kind of task."""
        return self._beliefs.get(label, Belief())


def is_judged(rollout: Rollout) -> bool:
    """Whether anyone scored it: `None` from all who were asked is no reward."""
    return not rollout.rewards or any(reward is not None for reward in rollout.rewards.values())
