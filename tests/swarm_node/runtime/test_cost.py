"""What training costs: closed forms, and that the total survives a resume."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from swarm_node.observability.metrics import MetricsWriter
from swarm_node.observability.tally import Buckets
from swarm_node.runtime.cost import LEAST_ROUNDS, CostMeter, gain
from tests.support.run_files import read_jsonl


def gained(*rewards: float | None) -> float | None:
    buckets = Buckets()
    for reward in rewards:
        buckets.add(reward)
    return gain(buckets)


def test_an_hour_costs_its_price() -> None:
    assert CostMeter(2.5, 0.0).round(0.5, 1, 3600.0)["cost/spent"] == 2.5
    assert CostMeter(2.5, 100.0).round(0.5, 1, 1000.0)["cost/spent"] == 0.625


def test_without_a_price_there_is_no_figure() -> None:
    meter = CostMeter(None, 0.0)
    meter.go_on({"round": 1, "reward": 0.5, "cost/spent": 9.0, "cost/groups": 9})
    assert meter.round(0.5, 8, 3600.0) == {}


def test_cost_follows_the_clock_and_the_groups() -> None:
    meter = CostMeter(3.6, 100.0)  # 0.001 a second
    assert meter.round(0.0, 0, 110.0) == pytest.approx({"cost/spent": 0.01, "cost/groups": 0})
    assert meter.round(0.0, 4, 120.0) == pytest.approx(
        {"cost/spent": 0.02, "cost/groups": 4, "cost/per_admitted_group": 0.005}
    )
    # an hour's pause costs an hour
    assert meter.round(0.0, 6, 3720.0) == pytest.approx(
        {"cost/spent": 3.62, "cost/groups": 10, "cost/per_admitted_group": 0.362}
    )


def test_a_reward_point_costs_spending_over_gain() -> None:
    meter, figures = CostMeter(36.0, 0.0), {}
    for second in range(1, 21):
        figures = meter.round(0.25 if second <= 10 else 0.75, 1, float(second))
        assert ("cost/per_reward_point" in figures) == (second == 20)
    assert figures["cost/spent"] == pytest.approx(0.2)
    assert figures["cost/per_reward_point"] == pytest.approx(0.2 / 0.5)


def test_the_gain_compares_first_and_last_tenth() -> None:
    assert gained(*[0.0] * 19) is None
    assert gained(*[0.0] * 10, *[0.5] * 10) == 0.5
    assert gained(*[0.0] * 10, *[9.0] * 80, *[0.5] * 10) == 0.5
    # 200 rounds: the first and the last twenty
    assert gained(*[0.0] * 10, *[0.2] * 10, *[9.0] * 160, *[0.5] * 20) == pytest.approx(0.4)


def test_nothing_gained_is_no_gain() -> None:
    assert gained(*[0.5] * 40) is None
    assert gained(*[0.5] * 20, *[0.25] * 20) is None


def test_a_gain_exceeds_twice_its_standard_error() -> None:
    # ten of 0 and 1 in turn: mean 1/2, variance 10/36; so 2 * sqrt(2 * 10/36 / 10) = 0.471
    swinging = [0.0, 1.0] * 5
    assert gained(*swinging, *[r + 0.48 for r in swinging]) == pytest.approx(0.48)
    assert gained(*swinging, *[r + 0.46 for r in swinging]) is None


def test_noise_alone_is_seldom_taken_for_a_gain() -> None:
    rng = random.Random(5)
    found = sum(gained(*(rng.random() for _ in range(100))) is not None for _ in range(500))
    assert 0 < found < 35  # of 500: 2.3 % in theory, a little more since variances are estimated of ten


def test_rewards_that_are_missing_count_for_nothing() -> None:
    rewards = [0.0] * 10 + [0.5] * 10
    assert gained(None, math.nan, *rewards, math.inf, None) == gained(*rewards) == 0.5


def run_rounds(path: Path, price: float | None, first: int, last: int) -> list[dict[str, Any]]:
    """Rounds of ten seconds and four groups each, by a process that begins at 1000 s on its clock."""
    writer = MetricsWriter(path, print)
    writer.truncate_after(first - 1)
    meter = CostMeter(price, 1000.0)
    for record in read_jsonl(path):
        meter.go_on(record)
    for number in range(first, last + 1):
        reward = 0.0 if number <= LEAST_ROUNDS else 1.0
        figures = meter.round(reward, 4, 1000.0 + 10.0 * (number - first + 1))
        writer.write({"round": number, "reward": reward, **figures})
    writer.close()
    return read_jsonl(path)


def test_a_resumed_run_keeps_its_costs(tmp_path: Path) -> None:
    whole = run_rounds(tmp_path / "whole.jsonl", 36.0, 1, 30)
    run_rounds(tmp_path / "resumed.jsonl", 36.0, 1, 17)
    resumed = run_rounds(tmp_path / "resumed.jsonl", 36.0, 13, 30)  # the checkpoint is of round 12
    assert whole[-1]["cost/spent"] == pytest.approx(3.0) and whole[-1]["cost/groups"] == 120
    for one, other in zip(whole, resumed, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_a_new_price_holds_from_then_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    run_rounds(path, 36.0, 1, 10)
    assert run_rounds(path, 72.0, 11, 20)[-1]["cost/spent"] == pytest.approx(3.0)
    assert "cost/spent" not in run_rounds(path, None, 21, 30)[-1]
    last = run_rounds(path, 36.0, 31, 40)[-1]
    assert last["cost/spent"] == pytest.approx(4.0) and last["cost/groups"] == 120
