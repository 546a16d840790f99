"""Off-policy measures: by hand, against brute force, and in a step of the trainer."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_node.config import GrpoConfig
from swarm_node.grpo.off_policy import BOUND, effective_share, figures_by_peer, off_policy_metrics
from swarm_node.grpo.trainer import Trainer
from swarm_node.types import Sampling
from tests.support.tiny_policy import TinyPolicy, group, make

NOW = np.full(7, -1.0)
SEQUENCE = np.array([0, 0, 1, 2, 2, 3, 4])
STALE, FOREIGN = SEQUENCE <= 1, SEQUENCE >= 2
SAMPLED = NOW - np.log([2.0, 0.5, 4.0, 3.0, 3.0, np.nan, 1.0])  # ratios; one peer sent no log-probabilities
PEERS = [None, None, "a", "b", "a"]


def metrics(sampled: np.ndarray = SAMPLED) -> dict[str, float]:
    return off_policy_metrics(NOW, sampled, SEQUENCE, STALE, FOREIGN)


def test_metrics_by_hand():
    found = metrics()
    two = math.log(2) ** 2
    assert found["off_policy/foreign_logp"] == -1.0
    stale = {name.removeprefix("off_policy/stale/"): value for name, value in found.items() if "/stale/" in name}
    assert stale == pytest.approx(
        {  # ratios 0.5, 2, 4; weights 1 and 4
            "ratio_p1": 0.53,
            "ratio_p50": 2.0,
            "ratio_p99": 3.96,
            "second_moment": (two + two + 4 * two) / 3,
            "ess": 25 / (2 * 17),
        }
    )
    assert found["off_policy/foreign/ess"] == pytest.approx((9 + 1) ** 2 / (2 * (81 + 1)))
    assert found["off_policy/foreign/second_moment"] == pytest.approx(2 * math.log(3) ** 2 / 3)


def test_what_is_own_and_fresh_is_not_measured():
    nobody = np.zeros(7, dtype=bool)
    assert off_policy_metrics(NOW, SAMPLED, SEQUENCE, nobody, nobody) == {}
    unsaid = off_policy_metrics(NOW, np.full(7, np.nan), SEQUENCE, nobody, FOREIGN)
    assert unsaid.keys() == {"off_policy/foreign_logp"}


@pytest.mark.parametrize("claim", [0.0, -1e4])
def test_absurd_claims_leave_figures_finite_and_own_ones_as_they_were(claim):
    lied = np.where(FOREIGN, claim, SAMPLED)
    honest, found = metrics(), metrics(lied)
    assert all(map(math.isfinite, found.values()))
    assert found["off_policy/foreign/second_moment"] <= BOUND**2
    same = [name for name in honest if "/foreign/" not in name]
    assert [found[name] for name in same] == [honest[name] for name in same]


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=9), st.floats(-1e4, 1e4))
def test_effective_share_is_that_of_the_weights_and_needs_no_scale(logs, shift):
    weights = np.exp(logs)
    share = effective_share(np.array(logs) + shift)
    assert share == pytest.approx(weights.sum() ** 2 / (len(logs) * (weights**2).sum()), rel=1e-6)
    assert 1 / len(logs) <= share * (1 + 1e-9) and share <= 1 + 1e-9


def test_each_peer_has_figures_of_its_own_tokens():
    figures = figures_by_peer(NOW, SAMPLED, SEQUENCE, PEERS)
    assert figures.keys() == {"a", "b"} and figures["b"] == {"logp": -1.0}, "b sent no log-probabilities"
    assert figures["a"].pop("logp") == -1.0
    a = np.isin(SEQUENCE, [i for i, peer in enumerate(PEERS) if peer == "a"])
    alone = off_policy_metrics(NOW[a], SAMPLED[a], SEQUENCE[a], np.zeros(3, bool), np.ones(3, bool))
    assert figures["a"] == {name.rpartition("/")[2]: alone[name] for name in alone if "/foreign/" in name}
    assert figures["a"]["second_moment"] == pytest.approx(2 * math.log(3) ** 2 / 3)


@pytest.mark.parametrize("iterations", [1, 2])
def test_a_step_measures_its_first_pass(iterations):
    policy = TinyPolicy(make(), version=3)
    trainer = Trainer(policy, GrpoConfig(iterations=iterations, learning_rate=1e-2), Sampling(6))
    stale, foreign = group([1.0, 0.0], version=1), group([1.0, 0.0, 0.0], seed=1)
    foreign.peer = "12D3KooW"
    now_stale, now_foreign = (
        [np.array(rollout) for rollout in each] for each in trainer.logprobs([stale, foreign], 1.0, "testing") or []
    )
    for one, now, shift in ((stale, now_stale, 0.5), (foreign, now_foreign, -0.25)):
        for rollout, logprobs in zip(one.rollouts, now, strict=True):
            rollout.turns[0].logprobs = (logprobs - shift).tolist()
    heard = []
    trainer.measured = heard.append
    found = trainer.step([stale, foreign])
    assert found["off_policy/stale/ratio_p1"] == pytest.approx(math.exp(0.5), rel=1e-4)
    assert found["off_policy/foreign/ratio_p99"] == pytest.approx(math.exp(-0.25), rel=1e-4)
    assert found["off_policy/foreign_logp"] == pytest.approx(np.concatenate(now_foreign).mean(), rel=1e-4)
    (figures,) = heard
    assert figures.keys() == {"12D3KooW"} and figures["12D3KooW"]["second_moment"] == pytest.approx(1 / 16, rel=1e-4)
    assert figures["12D3KooW"]["logp"] == pytest.approx(np.concatenate(now_foreign).mean(), rel=1e-4)


def test_a_step_of_fresh_own_rollouts_measures_nothing():
    heard = []
    trainer = Trainer(TinyPolicy(make()), GrpoConfig(), Sampling(6))
    trainer.measured = heard.append
    found = trainer.step([group([1.0, 0.0])])
    assert not heard and not any(name.startswith("off_policy") for name in found)
