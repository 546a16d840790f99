"""Which weights a newcomer goes on with."""

from __future__ import annotations

import math
import random

import pytest
import torch

from swarm_node.config import PolicyConfig, RewardsConfig, RolloutsConfig
from swarm_node.policy.loading import load_policy
from swarm_node.rollouts import collect
from swarm_node.rollouts.trial import MOST_TOKENS, Standing, answered_again
from swarm_node.tasks.taskset import load_tasks


def of(right: int, loss: float | None, answers: int = 32) -> Standing:
    return Standing([1.0] * right + [0.0] * (answers - right), loss)


@pytest.mark.parametrize(
    ("theirs", "own", "worse"),
    [
        (of(20, 4.0), of(7, 1.0), False),  # a cohort that has learned to write another form
        (of(7, 1.05), of(7, 1.0), False),
        (of(6, 1.0), of(7, 1.0), False),  # chance
        (of(7, 1.4), of(7, 1.0), False),  # as much, and references are less likely, as training makes them
        (of(1, 1.2), of(1, 1.0), True),  # rewards do not tell: as little could be chance
        (of(0, 1.0), of(7, 1.0), True),  # no answer of it ends, for example
        (of(0, 11.7), of(7, 4.0), True),  # flattened: a little better than chance in a vocabulary of 151,000
        (of(0, 11.7), of(0, 4.0), True),  # a newcomer without a right answer
        (of(1, 11.7), of(0, 4.0), True),  # one by luck
        (of(3, 11.7), of(0, 4.0), False),
        (of(0, 4.3), of(0, 4.0), False),  # a tenth of a large loss, where nobody earns anything
        (of(0, math.nan), of(0, 4.0), True),
        (of(20, None), of(7, None), False),
        (of(8, None), of(7, None), False),
        (of(2, None), of(1, None), True),  # without references nothing else speaks for it
        (of(0, None), of(0, None), True),
        (Standing([], 1.0), Standing([], 1.0), False),
        (Standing([], None), Standing([], None), True),
    ],
)
def test_what_earns_more_or_no_less_is_taken_over(theirs: Standing, own: Standing, worse: bool) -> None:
    assert theirs.worse_than(own) is worse


def test_weights_that_never_end_an_answer_cost_no_more_than_a_few_rounds() -> None:
    tasks, rng = load_tasks(["small"], RewardsConfig()), random.Random(0)
    config = RolloutsConfig(groups=4, group_size=4, max_new_tokens=96)
    policy = load_policy(PolicyConfig(), config, lambda text: None)
    own = collect(policy, lambda n: tasks.sample(rng, n), tasks, config, "0/1")
    again = answered_again(own.groups, policy, tasks, config, "0/1")
    assert again is not None
    for theirs, ours in zip(again, own.groups, strict=True):
        for a, b in zip(theirs.rollouts, ours.rollouts, strict=True):
            assert a.token_ids == b.token_ids[: len(a.token_ids)] and (a.reward == b.reward or not a.finished)
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter.zero_()  # every token is as likely as the end
    rambling = answered_again(own.groups, policy, tasks, config, "0/1")
    assert rambling is not None and policy.version == 0
    answers = [rollout for group in rambling for rollout in group.rollouts]
    assert len(answers) == 16 and not any(rollout.correct for rollout in answers)
    taken = sum(len(rollout.token_ids) for rollout in answers)
    assert own.num_tokens < taken <= MOST_TOKENS * own.num_tokens + len(answers)
    assert any(not rollout.finished for rollout in answers)
