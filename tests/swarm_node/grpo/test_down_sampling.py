"""Down-sampling: the best and the worst, ties by chance, greatest variance."""

from __future__ import annotations

import random
from itertools import combinations
from statistics import pvariance

from hypothesis import given
from hypothesis import strategies as st

from swarm_node.grpo.down_sampling import down_sampled, extremes
from tests.support.tiny_policy import group


@given(rights=st.lists(st.booleans(), min_size=2, max_size=8), n=st.integers(2, 8), seed=st.integers())
def test_zeros_and_ones_keep_the_greatest_variance(rights, n, seed):
    rewards = [float(right) for right in rights]
    kept = extremes(rewards, n, random.Random(seed))
    assert kept == sorted(set(kept)) and len(kept) == min(n, len(rewards))
    most = max(pvariance([rewards[i] for i in part]) for part in combinations(range(len(rewards)), len(kept)))
    assert abs(pvariance([rewards[i] for i in kept]) - most) < 1e-12


def test_ties_are_broken_by_chance():
    found = {tuple(extremes([0.0, 1.0, 0.0, 1.0], 2, random.Random(seed))) for seed in range(50)}
    assert found == {(0, 1), (0, 3), (1, 2), (2, 3)}


def test_advantages_go_with_their_answers():
    whole = group([0.0, 1.0, 0.5])
    whole.advantages = [-1.0, 1.0, 0.0]
    part = down_sampled(whole, 2, random.Random(0))
    assert [r.reward for r in part.rollouts] == [0.0, 1.0] and part.advantages == [-1.0, 1.0]
    assert down_sampled(whole, 0, random.Random(0)) is whole and down_sampled(whole, 3, random.Random(0)) is whole


def test_unscored_answers_are_left_out_first():
    whole = group([None, 0.0, None, 1.0, None])  # an unscored answer has the reward 0, too
    for seed in range(20):
        part = down_sampled(whole, 2, random.Random(seed))
        assert part.rollouts == [whole.rollouts[1], whole.rollouts[3]]
    assert down_sampled(whole, 4, random.Random(0)).rollouts == part.rollouts, "fewer, if not so many have a score"


def test_answers_cut_off_are_left_out_first_if_asked():
    whole = group([1.0, 0.9, 0.5, 0.4, 0.0], unfinished=[0, 4])
    whole.advantages = [2.0, 1.0, 0.0, -1.0, -2.0]
    part = down_sampled(whole, 2, random.Random(0), finished=True)
    assert [r.reward for r in part.rollouts] == [0.9, 0.4] and part.advantages == [1.0, -1.0]
    assert [r.reward for r in down_sampled(whole, 2, random.Random(0)).rollouts] == [1.0, 0.0]
