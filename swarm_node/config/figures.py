"""The held-out figure that says how good the policy of a run is. It is decided here, and everything else asks.

pass_1    share of right answers: wherever the task's own checker counts among the rewards
reward    mean reward: where only reward functions of the user's count, as their questions need no answer to check
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from swarm_node.config.training import RewardsConfig

Figure = Literal["pass_1", "reward"]
WORDS: Mapping[Figure, str] = {"pass_1": "pass@1", "reward": "mean reward"}


def figure_of(rewards: RewardsConfig) -> Figure:
    """The figure that chooses the best checkpoint, and by which runs with these rewards are compared."""
    return "reward" if rewards.functions and not rewards.checker_weight else "pass_1"


def reports_reward(rewards: RewardsConfig) -> bool:
    """Whether the mean reward of held-out answers says more than pass@1, so that it is reported."""
    return bool(rewards.functions) or rewards.partial
