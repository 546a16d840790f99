"""Foreign advantages by hand: against own success, bounded, and not the sender's to set."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm_node.config import GrpoConfig
from swarm_node.grpo.advantage import RewardStatistics, TaskStatistics, advantages, foreign_advantages, pass_k
from swarm_node.sharing.replay_buffer import earning, teaches
from tests.support.foreign_groups import group


def own_success(success: float, n: float = 100.0) -> RewardStatistics:
    """Of 0/1 rewards."""
    return RewardStatistics(n, n * success, n * success)


def of(rewards: list[float | None], own: RewardStatistics | None, bound: float = 2.0) -> list[float]:
    return foreign_advantages(group(rewards).rollouts, own, bound)


def test_worked_values():
    # p = 0: std 0, so the floor: 1 / 0.25 = 4, cut to 2; wrong answers are what this node expects
    assert of([1.0, 0.0, 0.0], own_success(0.0)) == [2.0, 0.0, 0.0]
    # p = 0.5: std 0.5
    assert of([1.0, 0.0], own_success(0.5)) == [1.0, -1.0]
    # p = 0.2, std 0.4: 2 and -0.5 each
    assert of([1.0, 0.0, 0.0, 0.0], own_success(0.2)) == pytest.approx([2.0, -0.5, -0.5, -0.5])
    # p = 0.8, std 0.4: 0.5 and -2 each; seven of these may not outweigh the one
    assert of([1.0] + [0.0] * 7, own_success(0.8)) == pytest.approx([0.5] + [-0.5 / 7] * 7)


def test_worked_values_of_pass_k():
    def found(success: float) -> list[float]:
        return foreign_advantages(group([1.0, 0.0]).rollouts, own_success(success), 9.0, k=4)

    # p = 0.2: four own answers miss with 0.8^4 = 0.4096, std sqrt(0.4096 * 0.5904) = 0.4918
    assert found(0.2) == pytest.approx([0.4096 / 0.4918, -0.2 * 0.8**3 / 0.4918], abs=1e-3)
    # p = 0.7: they miss with 0.0081, std 0.0896, so the floor of 0.25; the wrong one is scaled down to the right one
    assert found(0.7) == pytest.approx([0.0081 / 0.25, -0.0081 / 0.25], abs=1e-3)
    assert found(1.0) == [0.0, 0.0]


@pytest.mark.parametrize("success", [0.1, 0.25, 0.4])
def test_foreign_pass_k_is_that_of_own_groups(success: float):
    """In a large own group of that success, an answer has the same advantage."""
    n = 4000
    rewards = [float(i < success * n) for i in range(n)]
    own = pass_k(torch.tensor([rewards], dtype=torch.float64), 4)[0]
    found = foreign_advantages(group([1.0, 0.0]).rollouts, own_success(success), 9.0, k=4)
    assert found == pytest.approx([float(own[0]), float(own[-1])], abs=2e-3)


@pytest.mark.parametrize("mean", [-0.5, 1.5])
def test_other_rewards_know_no_pass_k(mean: float):
    own = RewardStatistics(100.0, 100.0 * mean, 100.0 * (mean**2 + 1))  # of spread 1
    rollouts = group([mean + 0.75, mean - 0.5]).rollouts
    assert foreign_advantages(rollouts, own, 2.0, k=4) == pytest.approx([0.75, -0.5])
    assert foreign_advantages(rollouts, own, 2.0, k=1) == foreign_advantages(rollouts, own, 2.0, k=4)


def test_groups_no_better_than_own_teach_nothing():
    own = RewardStatistics(100.0, 50.0, 30.0)  # mean reward 0.5
    assert of([0.4, 0.1, 0.0], own) == [0.0, 0.0, 0.0]
    assert not teaches(0.4, own) and not teaches(0.5, own) and teaches(0.6, own) and teaches(0.1, None)


def test_without_own_baseline_the_groups_mean_counts():
    rewards = [1.0] + [0.0] * 7
    usual = advantages([group(rewards)], GrpoConfig(), {}).tolist()
    assert usual[0] > 2.4
    assert of(rewards, None) == pytest.approx([2.0, *usual[1:]], abs=1e-4)
    assert of(rewards, None, bound=9.0) == pytest.approx(usual, abs=1e-4)


def test_an_unjudged_rollout_has_no_advantage():
    for own in (None, own_success(0.5)):
        with_it, without = of([1.0, None, 0.0], own), of([1.0, 0.0], own)
        assert with_it[1] == 0.0 and [with_it[0], with_it[2]] == pytest.approx(without)
    assert of([None, 1.0], None) == [0.0, 0.0]


@given(
    rewards=st.lists(st.sampled_from([0.0, 0.3, 1.0, None]), min_size=2, max_size=64),
    success=st.floats(0, 1),
    bound=st.floats(0.1, 5),
)
def test_the_update_of_a_hostile_group_is_bounded(rewards, success, bound):
    for own in (own_success(success), None):
        found = of(rewards, own, bound)
        assert all(abs(a) <= bound for a in found)
    found = of(rewards, own_success(success), bound)
    assert sum(found) >= -1e-9
    # a right answer is worth the same in any company
    alone = of([1.0], own_success(success), bound)[0]
    assert all(a == pytest.approx(alone) for a, r in zip(found, rewards, strict=True) if r == 1.0)


def test_the_posterior_follows_own_answers_of_each_kind():
    statistics = TaskStatistics()
    assert not statistics.of("gcd").known
    statistics.observe([group([1.0, 0.0, 0.0, 0.0] * 2, peer=None)])
    assert not statistics.of("gcd").known
    statistics.observe([group([1.0, 0.0, 0.0, 0.0] * 2 + [None], peer=None)] * 2)
    own = statistics.of("gcd")
    assert own.known and own.reward == pytest.approx(0.25) and own.spread == pytest.approx(0.4330, abs=1e-4)
    assert own.n == pytest.approx(8 * (1 + 0.95 + 0.95**2))
    assert not statistics.of("lcm").known
    for _ in range(100):
        statistics.observe([group([1.0] * 8, peer=None)])
    assert own.n < 161 and own.reward > 0.99


def test_the_least_answers_earn_above_own_success():
    rewards = [0.5, 0.5]
    assert earning(group(rewards).rollouts, of(rewards, own_success(0.4))) == [True, True]
    assert earning(group(rewards).rollouts, of(rewards, own_success(0.9))) == [False, False]
