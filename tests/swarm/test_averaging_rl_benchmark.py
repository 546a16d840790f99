"""The benchmark of averaging in RL: every arm does what it says, and figures add up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import averaging_rl, sharing
from benchmarks.averaging_rl import ARMS, ONCE, apart
from benchmarks.sharing_settings import SETTINGS, Setting
from swarm_node.runtime.simulation import Speed

ROUNDS, PEERS = 8, 2
TASKS = ["small/gcd", "small/lcm"]


@pytest.fixture
def setting(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Setting:
    """Random models, and a reward that they earn; an outer round about every round."""
    monkeypatch.setattr(averaging_rl, "QUESTIONS", 6)
    monkeypatch.setattr(sharing, "SPEED", Speed(150.0, 5000.0))
    rewards = {"checker_weight": 0.0, "functions": [{"path": "tests.swarm.parity:even"}]}
    return replace(
        SETTINGS["plain"],
        tasks=lambda peer: TASKS,
        held_out=TASKS,
        start=lambda seed, peer: models["llama"],
        rewards=rewards,
        max_new_tokens=4,
    )


@pytest.mark.parametrize(
    "name", [name if name == "sharing + averaging" else pytest.param(name, marks=pytest.mark.long) for name in ONCE]
)
def test_every_arm_runs(setting: Setting, name: str) -> None:
    arm = replace(ARMS[name], period_s=1.0)
    figures = averaging_rl.run(setting, arm, seed=0, peers=PEERS, rounds=ROUNDS)
    assert json.loads(json.dumps(figures)) == figures
    assert len(figures["own"]) == PEERS
    assert figures["updates"] > 0
    averages = "averaging" in arm.sets
    assert bool(figures["averaging_bytes"]) == bool(figures["averaging"].get("averaging/exchanges")) == averages
    assert bool(figures["rollout_bytes"] > 100) == (not arm.silo)
    sent = figures["rollout_bytes"] + figures["averaging_bytes"] + figures["rest_bytes"]
    assert figures["curve"][-1] == [ROUNDS, figures["cum"], figures["seconds"], pytest.approx(sent, abs=1)]
    seconds = [point[2] for point in figures["curve"]]
    assert seconds == sorted(seconds) and seconds[0] > 0
    assert figures["spread_of_progress"] > 0


def test_an_arm_may_double_the_settings_learning_rate(setting: Setting) -> None:
    rates = [sharing.config(setting, ARMS[name], 0, 0).grpo.learning_rate for name in ("silo", "silo x2")]
    assert rates == [setting.learning_rate, 2 * setting.learning_rate]


def test_spread_is_a_part_of_progress() -> None:
    states = {"a": {"w": torch.tensor([3.0, 1.0])}, "b": {"w": torch.tensor([1.0, 1.0])}}
    assert apart(states, {"w": torch.tensor([2.0, 1.0])}, {"w": torch.tensor([2.0, -1.0])}) == pytest.approx(0.5)


def test_finished_runs_are_reported_and_not_repeated(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(averaging_rl, "FOLDER", tmp_path)
    monkeypatch.setitem(averaging_rl.SETTINGS, "plain", setting)
    size = ["--peers", "2", "--rounds", "3"]
    arguments = ["--arms", "silo", "averaging x2", "--seeds", "0", "100", *size]
    averaging_rl.main(arguments)
    monkeypatch.setattr(averaging_rl, "run", lambda *args: pytest.fail("it is there"))
    averaging_rl.main(arguments)
    monkeypatch.setattr(averaging_rl, "PLOT", tmp_path / "plot.png")
    averaging_rl.main(["--report", *size])
    report = (tmp_path / "report.md").read_text()
    assert "seeds [0];" in report, "seeds on which settings were searched are left out"
    assert all(f"| {arm} | 1 |" in report for arm in ("silo", "averaging x2"))
    assert (tmp_path / "plot.png").stat().st_size > 5000
