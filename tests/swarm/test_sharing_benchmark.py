"""The sharing benchmark: every arm runs and trains on what it says, and figures are read off curves rightly."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import sharing
from benchmarks.format_reward import marked, tagged
from benchmarks.sharing_arms import ARMS
from benchmarks.sharing_settings import SETTINGS, Setting
from swarm_node.config import RewardsConfig
from swarm_node.runtime.simulation import Speed
from swarm_node.tasks import load_tasks

ROUNDS, PEERS = 6, 2
QUICK = "8/0", "4/4", "imitate"
"""Arms of every kind: alone, shared, and of another class of node."""
TASKS = ["small/gcd", "small/lcm"]


@pytest.fixture
def setting(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Setting:
    """Random models, and a reward that they earn."""
    monkeypatch.setattr(sharing, "QUESTIONS", 6)
    monkeypatch.setattr(sharing, "SPEED", Speed(150.0, 5000.0))
    rewards = {"checker_weight": 0.0, "functions": [{"path": "tests.swarm.parity:even"}]}
    return replace(
        SETTINGS["format"],
        tasks=lambda peer: TASKS,
        held_out=TASKS,
        start=lambda seed, peer: models["llama"],
        rewards=rewards,
        max_new_tokens=4,
    )


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in ARMS]
)
def test_every_arm_runs(setting: Setting, name: str) -> None:
    arm = ARMS[name]
    figures = sharing.run(setting, arm, seed=0, peers=PEERS, rounds=ROUNDS)
    assert json.loads(json.dumps(figures)) == figures
    peers = 1 if arm.alone else PEERS
    assert len(figures["cum_by_peer"]) == peers
    assert figures["cum"] == pytest.approx(sum(figures["cum_by_peer"]) / peers, abs=0.01)
    assert figures["curve"][-1][0] == ROUNDS * arm.longer
    assert figures["curve"][ROUNDS - 1][1] == pytest.approx(figures["cum"], abs=1e-3)
    assert sum(figures["cpu"].values()) == pytest.approx(figures["cpu_s"], abs=0.1)
    assert bool(figures["foreign_groups"]) == bool(arm.foreign)
    if arm.silo and "refill" not in name:
        assert figures["samples"] == (arm.alone or 1) * peers * ROUNDS * arm.own * 8
    if name in ("sender", "replay"):
        assert arm.own < figures["trained_groups"] <= arm.own + 4
    if name == "imitate":
        assert figures["trained_groups"] == figures["foreign_groups"]


def test_rewards_want_the_form_and_right_answer() -> None:
    tasks = load_tasks(["small/gcd", "small/fraction_simplification"], RewardsConfig()).held_out(2)
    columns: dict[str, Any] = {
        "question": [task.question for task in tasks],
        "answer": [task.answer for task in tasks],
        "task": [task.label for task in tasks],
        **{name: [task.metadata.get(name) for task in tasks] for name in tasks[0].metadata | tasks[1].metadata},
    }

    def scores(function: Any, form: str) -> list[float]:
        return function(prompts=["", ""], completions=[form.format(task.answer) for task in tasks], **columns)

    assert scores(marked, "#{}") == [1, 1] and scores(tagged, "<answer>{}</answer>") == [1, 1]
    for form in ("{}", "# no", "#{}9", "##{}", "<answer>{}</answer>"):
        assert scores(marked, form) == [0, 0]
    for form in ("{}", "#{}", "<answer>{}", "<answer>{}</answer>.", "<answer></answer>"):
        assert scores(tagged, form) == [0, 0]


def test_figures_are_read_where_another_arm_ends() -> None:
    points = [[2, 1.0, 10.0, 100], [4, 5.0, 20.0, 200]]
    assert sharing.at(points, 2, 5.0) == (0.5, True)
    assert sharing.at(points, 2, 15.0) == (3.0, True)
    assert sharing.at(points, 3, 200) == (5.0, True)
    assert sharing.at(points, 2, 21.0) == (5.0, False)


def test_windows_make_several_rounds_one() -> None:
    rounds = [(0.0, 1.0, 8), (1.0, 2.0, 16), (1.0, 3.0, 24), (1.0, 4.0, 32)]
    assert sharing.windows(rounds, 1) == rounds
    assert sharing.windows(rounds, 2) == [(0.5, 2.0, 16), (1.0, 4.0, 32)]


def test_finished_runs_are_reported_and_not_repeated(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "FOLDER", tmp_path)
    monkeypatch.setitem(sharing.SETTINGS, "format", setting)
    arguments = ["--arms", "8/0", "4/4", "--seeds", "0", "1", "100", "--peers", "2", "--rounds", "2"]
    sharing.main(arguments)
    monkeypatch.setattr(sharing, "run", lambda *args: pytest.fail("it is there"))
    sharing.main(arguments)
    monkeypatch.setattr(sharing, "PLOT", tmp_path / "plot.png")
    sharing.main(["--report", "--peers", "2", "--rounds", "2"])
    report = (tmp_path / "report.md").read_text()
    assert "seeds [0, 1]" in report, "seeds on which settings were searched are left out"
    assert "4/4: 4 own + 4 foreign" in report and "≤" in report or "x |" in report
    assert (tmp_path / "plot.png").stat().st_size > 5000
