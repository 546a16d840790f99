"""Whether a newcomer goes on with others' weights: how well they do beside its own.

    rewards   of answers to the questions of its last round, which its own weights have answered there
    loss      on reference answers of held-out questions

What others have learned earns more, in whatever form they write, and makes references less likely. So rewards decide,
as far as so few answers tell. Only where own weights earn so little that weights which earn nothing would not be told
apart, the references decide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from statistics import fmean, stdev

from swarm_node.averaging.costs import allowance
from swarm_node.config import RolloutsConfig
from swarm_node.policy.finite import NotFinite
from swarm_node.policy.policy import Policy
from swarm_node.rollouts.collect import collect
from swarm_node.tasks.taskset import TaskSet
from swarm_node.types import Group, Task

_TRIALS = count(1)  # weights on trial have a version of their own: by it, engines that copy weights tell them apart
MOST_TOKENS = 4  # times the tokens of the own answers that those of a trial take
SURE = 1.64  # standard errors by which what is earned must differ, so that chance explains it in one case of twenty


@dataclass(frozen=True)
class Standing:
    """How well weights do."""

    rewards: list[float]  # of each answer; empty if there are none to compare
    loss: float | None  # nats per token on references; None if there are none

    def worse_than(self, own: Standing) -> bool:
        """Whether a newcomer that stands as `own` stays with its own weights. Where rewards do not tell and there are
        no references, others' weights must clearly earn more."""
        earned, noise, tells = 0.0, 0.0, False
        if self.rewards and own.rewards:
            earned = fmean(self.rewards) - fmean(own.rewards)
            noise = math.hypot(_error(self.rewards), _error(own.rewards))
            tells = fmean(own.rewards) > SURE * _error(own.rewards)
        if earned < -noise:
            return True
        if earned > SURE * noise or tells:
            return False
        if self.loss is None or own.loss is None:
            return True
        return not self.loss <= own.loss + allowance(own.loss)


def _error(values: Sequence[float]) -> float:
    """Standard error of a mean."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def rewards_of(groups: Sequence[Group]) -> list[float]:
    return [rollout.reward for group in groups for rollout in group.rollouts]


def answered_again(
    asked: Sequence[Group], policy: Policy, tasks: TaskSet, rollouts: RolloutsConfig, seed: str
) -> list[Group] | None:
    """The questions of `asked`, answered by `policy` with the weights that it has now, and with the randomness of
    `seed`; None if it cannot compute with them. Answers are cut where all together would take `MOST_TOKENS` times the
    tokens of those in `asked`: strangers' weights may never end one."""
    if not asked:
        return []
    lengths = [rollout.num_tokens for group in asked for rollout in group.rollouts]
    longest = min(rollouts.max_new_tokens, max(1, math.ceil(MOST_TOKENS * fmean(lengths))))
    config = rollouts.model_copy(update={"groups": len(asked)})
    left = [group.task for group in asked]

    def draw(n: int) -> list[Task]:
        drawn = left[:n]
        del left[:n]
        return drawn

    version, policy.version = policy.version, -next(_TRIALS)
    try:
        return collect(policy, draw, tasks, config, seed, longest=longest).groups
    except NotFinite:
        return None
    finally:
        policy.version = version
