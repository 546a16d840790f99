"""Advantages by hand: worked values, unscored rollouts, groups of unequal size."""

from __future__ import annotations

from itertools import combinations
from statistics import fmean, pstdev

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, tensor

from swarm_node.config import GrpoConfig
from swarm_node.errors import UserError
from swarm_node.grpo.advantage import advantages
from tests.support.tiny_policy import group


def of(*rewards: list[float | None], **options: object) -> Tensor:
    return advantages([group(r) for r in rewards], GrpoConfig(**options), {})


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("group_std", [1.4997, -0.4999, -0.4999, -0.4999]),  # mean 0.25, unbiased std 0.5: 0.75 / 0.5001
        ("batch_std", [1.4997, -0.4999, -0.4999, -0.4999]),  # the group is the batch
        ("none", [0.75, -0.25, -0.25, -0.25]),
        (
            "leave_one_out",
            [1.0, -1 / 3, -1 / 3, -1 / 3],
        ),  # the others' means: 0 for the first, 1/3 for the rest
        ("median", [4.0, 0.0, 0.0, 0.0]),  # median 0, MAD 0, so the floor: 1 / 0.25
    ],
)
def test_worked_values(method, expected):
    torch.testing.assert_close(of([1.0, 0.0, 0.0, 0.0], advantage=method), tensor(expected), atol=1e-4, rtol=0)


def test_batch_std_is_that_of_all_groups():
    # group means 0.5 and 1.5; all rewards 0 1 1 2: mean 1, unbiased variance 2/3
    expected = tensor([-0.5, 0.5, -0.5, 0.5]) / ((2 / 3) ** 0.5 + 1e-4)
    torch.testing.assert_close(of([0.0, 1.0], [1.0, 2.0], advantage="batch_std"), expected)


def test_an_even_groups_median_is_in_between():
    # median of 0 1 2 5 = 1.5; distances 1.5 0.5 0.5 3.5, their median 1
    expected = tensor([-1.5, -0.5, 0.5, 3.5])
    torch.testing.assert_close(of([0.0, 1.0, 2.0, 5.0], advantage="median"), expected)


def test_median_of_mixed_binary_groups_stays_bounded():
    # without the floor the scale would be 0.001 and the minority's advantage 1000
    assert of([1.0, 1.0, 0.0], advantage="median").tolist() == [0.0, 0.0, -4.0]


@given(
    rewards=st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=3, max_size=8),
    k=st.integers(1, 7),
)
def test_pass_k_is_the_mean_over_all_subsets(rewards, k):
    n, found = len(rewards), of(rewards, advantage="pass_k", k=k)
    if n <= k:
        assert found.tolist() == [0.0] * n
        return
    best = {chosen: max(rewards[i] for i in chosen) for chosen in combinations(range(n), k)}
    mean, std = fmean(best.values()), pstdev(best.values())
    with_it = [fmean(value for chosen, value in best.items() if i in chosen) for i in range(n)]
    expected = tensor([(value - mean) / (std + 1e-4) for value in with_it])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_pass_k_by_the_papers_closed_form():
    # two of eight right, k = 4: miss = C(6,4)/C(8,4) = 15/70, mean 55/70, sd = sqrt(15 * 55) / 70
    sd = (15 * 55) ** 0.5 / 70
    right, wrong = 15 / 70 / sd, (15 / 70 - 10 / 35) / sd  # of a wrong one's others, C(5,3) of C(7,3) miss
    found = of([1.0, 1.0] + [0.0] * 6, advantage="pass_k")
    torch.testing.assert_close(found, tensor([right] * 2 + [wrong] * 6), atol=1e-3, rtol=0)
    # five of eight right: every four have a right one, so nothing is left to learn
    assert of([1.0] * 5 + [0.0] * 3, advantage="pass_k").tolist() == [0.0] * 8


METHODS = ["group_std", "batch_std", "none", "leave_one_out", "median"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_equal_or_single_rewards_have_no_advantage(method, aggregation):
    options = dict(advantage=method, aggregation=aggregation)
    assert of([0.1] * 3, [0.7], [0.0, 1.0], **options)[:4].tolist() == [0.0] * 4
    assert of([0.3], **options).tolist() == [0.0]


@pytest.mark.parametrize("method", ["group_std", "none", "leave_one_out", "median"])
def test_groups_of_unequal_size_stay_apart(method):
    together = of([1.0, 0.0, 0.0], [2.0, 5.0], [1.0, 1.0, 0.0, 3.0], advantage=method)
    apart = [of(r, advantage=method) for r in ([1.0, 0.0, 0.0], [2.0, 5.0], [1.0, 1.0, 0.0, 3.0])]
    torch.testing.assert_close(together, torch.cat(apart))


@pytest.mark.parametrize("method", METHODS)
def test_a_rollout_that_nobody_scored_counts_nowhere(method):
    with_it, without = of([1.0, None, 0.0, 0.0], advantage=method), of([1.0, 0.0, 0.0], advantage=method)
    assert with_it[1] == 0.0
    torch.testing.assert_close(with_it[[0, 2, 3]], without)


def two_rewards(rows: list[tuple[float | None, float | None]], weights: dict[str, float]) -> Tensor:
    g = group([0.0] * len(rows))
    for rollout, (a, b) in zip(g.rollouts, rows, strict=True):
        rollout.rewards = {"a": a, "b": b}
    return advantages([g], GrpoConfig(aggregation="normalize_then_sum"), weights)


def test_gdpo_keeps_combinations_apart_that_a_sum_confounds():
    """Groups (0,0) (1,0) and (0,0) (1,1): added up and normalised, both are -0.707, +0.707."""
    one, both = group([0.0, 1.0]), group([0.0, 2.0])
    for g, second in ((one, 0.0), (both, 1.0)):
        g.rollouts[0].rewards = {"a": 0.0, "b": 0.0}
        g.rollouts[1].rewards = {"a": 1.0, "b": second}
    summed = advantages([one, both], GrpoConfig(), {})
    torch.testing.assert_close(summed, tensor([-0.7071, 0.7071] * 2), atol=2e-4, rtol=0)
    # each reward on its own: 0.707 and 0, 0.707 and 0.707; then divided by the std of the four sums, 1.2910
    expected = tensor([-0.7071, 0.7071, -1.4142, 1.4142]) / 1.2910
    apart = advantages([one, both], GrpoConfig(aggregation="normalize_then_sum"), {})
    torch.testing.assert_close(apart, expected, atol=5e-4, rtol=0)


def test_gdpo_weighs_by_name():
    rows = [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0)]
    first_only = two_rewards(rows, {"b": 0.0})
    torch.testing.assert_close(first_only, tensor([1.1547, -0.5774, -0.5774]), atol=5e-4, rtol=0)
    assert two_rewards(rows, {"a": 2.0}).argmax() == 0
    assert two_rewards(rows, {"b": 2.0}).argmax() == 1


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize("method", METHODS)
def test_advantages_brought_along_change_no_others(method, aggregation):
    config = GrpoConfig(advantage=method, aggregation=aggregation)
    first, foreign, last = group([1.0, 0.0, 0.0]), group([9.0, -9.0]), group([0.0, 1.0, 1.0, 0.5])
    alone = advantages([first, last], config, {})
    foreign.advantages = [1e-12, -2.0]
    together = advantages([first, foreign, last], config, {})
    assert together[3:5].tolist() == tensor([1e-12, -2.0]).tolist()
    assert torch.equal(torch.cat([together[:3], together[5:]]), alone)
    assert advantages([foreign], config, {}).tolist() == tensor([1e-12, -2.0]).tolist()


def test_a_formula_of_the_users_own(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def best(r): return r - r.nan_to_num(-1).amax(1, keepdim=True)\n"
        "def flat(r): return r.flatten()\n"
        "def infinite(r): return r / 0\n"
        "def broken(r): return r.nothing\n"
    )
    found = of([1.0, 0.0, None], [3.0, 5.0], advantage=f"{tmp_path}/mine.py:best")
    assert found.tolist() == [0.0, -1.0, 0.0, -2.0, 0.0]
    for name, message in (("flat", "must give finite"), ("infinite", "must give finite"), ("broken", "AttributeError")):
        with pytest.raises(UserError, match=f"grpo.advantage .*{message}"):
            of([1.0, 0.0], [1.0, 1.0], advantage=f"{tmp_path}/mine.py:{name}")
    with pytest.raises(UserError, match="no function 'nothing'"):
        of([1.0, 0.0], advantage=f"{tmp_path}/mine.py:nothing")
