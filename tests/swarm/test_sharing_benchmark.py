"""The sharing benchmark: every arm runs and trains on what it says, and figures are read off curves rightly."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import sharing, sharing_report
from benchmarks.format_reward import marked
from benchmarks.intervals import first_reach, value_at
from benchmarks.sharing_arms import ARMS
from benchmarks.sharing_settings import SETTINGS, Setting
from swarm_node.config import NodeConfig, RewardsConfig
from swarm_node.node import fitted
from swarm_node.policy.loading import load_policy
from swarm_node.tasks.taskset import load_tasks

ROUNDS, PEERS = 6, 2
QUICK = "silo", "new", "imitate"
"""Arms of every kind: alone, shared, and of another class of node."""


@pytest.fixture
def setting(small: Callable[[Setting], Setting], monkeypatch: pytest.MonkeyPatch) -> Setting:
    monkeypatch.setattr(sharing, "QUESTIONS", 6)
    return small(SETTINGS["format"])


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in ARMS]
)
def test_every_arm_runs(setting: Setting, name: str) -> None:
    arm = ARMS[name]
    row = sharing.run(setting, arm, seed=0, peers=PEERS, rounds=ROUNDS)
    assert json.loads(json.dumps(row)) == row
    assert len(row["pass_1_by_peer"]) == row["peers"] == (arm.peers or PEERS)
    assert row["curve"][-1][0] == row["rounds"] == ROUNDS * arm.longer
    assert row["curve"][-1][2] == pytest.approx(row["cpu_s"], abs=0.2)
    assert sum(row["cpu"].values()) == pytest.approx(row["cpu_s"], abs=0.1)
    assert row["looks"][-1][0] < row["cpu_s"] + 0.1 and all(0 <= p <= q <= 1 for _, p, q in row["looks"])
    assert bool(row["groups"]["foreign"]) == bool(arm.foreign)
    if arm.silo:
        assert row["curve"][-1][3] == row["rounds"] * arm.own * 8
    if name == "silo replay":
        assert arm.own < row["groups"]["trained"] <= arm.own + 32
    if name == "imitate":
        assert row["groups"]["trained"] == row["groups"]["foreign"]


@pytest.mark.parametrize("name", ["silo", "new"])
def test_what_is_called_the_default_is_the_default(setting: Setting, name: str) -> None:
    made = sharing.config(setting, ARMS[name], 0, 0)
    plain = NodeConfig(
        tasks=made.tasks, rewards=made.rewards, policy=made.policy, grpo={"learning_rate": setting.learning_rate}
    )
    policy = load_policy(plain.policy, plain.rollouts, lambda text: None)
    groups = fitted(plain, policy, lambda text: None).rollouts.groups
    assert (made.grpo, made.rollouts.groups) == (plain.grpo, groups)
    if name == "new":
        assert (made.sharing, made.averaging) == (plain.sharing, plain.averaging)


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

    assert scores(marked, "#{}") == [1, 1]
    for form in ("{}", "# no", "#{}9", "##{}", "<answer>{}</answer>"):
        assert scores(marked, form) == [0, 0]


def row(arm: str, rewards: list[float], cpu_s: float, pass_1: list[float]) -> dict[str, Any]:
    """A run whose rounds cost `cpu_s` each, half of it for sampling eight answers of ten tokens."""
    n = len(rewards)
    return {
        "arm": arm,
        "peers": 1,
        "rounds": n,
        "cpu_s": n * cpu_s,
        "cpu": {"generate": n * cpu_s / 2},
        "held_out_before": {"pass_1": 0.0, "pass_8": 0.0},
        "held_out": {"pass_1": pass_1[-1], "pass_8": pass_1[-1]},
        "curve": [[i + 1, reward, (i + 1) * cpu_s, 8 * (i + 1), 80 * (i + 1)] for i, reward in enumerate(rewards)],
        "looks": [[(i + 1) * n * cpu_s / len(pass_1), value, value] for i, value in enumerate(pass_1)],
    }


def test_an_arm_is_sooner_by_its_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing_report, "WINDOW", 1)
    monkeypatch.setattr(sharing_report, "network_share", lambda: 0.25)
    silo = row("8/0", [i / 12 for i in range(1, 13)], 1.0, [0.5, 1.0])
    member = row("4/4", [i / 6 for i in range(1, 7)], 1.0, [0.5, 1.0])
    level = sharing_report.end_level(silo)
    assert level == pytest.approx(11.5 / 12)
    assert first_reach(sharing_report.levels(silo), level) == pytest.approx(11.5)
    # half of the rounds, each a quarter dearer by the network
    assert first_reach(sharing_report.levels(member), level) == pytest.approx(11.5 / 2 * 1.25)
    assert first_reach(sharing_report.levels(member, sharing_report.TOKENS), level) == pytest.approx(80 * 11.5 / 2)
    # sampling at 80 % of the silo's time costs four times as much: 0.5 + 4 * 0.5 s a round
    assert sharing_report.price_at(silo, 0.8) == pytest.approx(4)
    assert first_reach(sharing_report.levels(silo, price=4), level) == pytest.approx(2.5 * 11.5)
    assert first_reach(sharing_report.passes(silo), 0.75) == pytest.approx(9)
    assert sharing_report.strongest({"8/0": {0: silo}, "4/4": {0: member}}) == "8/0"
    assert sharing_report.ranged([sharing_report.times(4.0, 2.0), sharing_report.times(4.0, None)]) == (
        "never (never to 2.00)"
    )
    assert sharing_report.ranged([sharing_report.times(None, 2.0)]) == "only it"
    found = {"8/0": {0: silo}, "new": {0: member}}
    (ahead,) = sharing_report.first_silo(found, sharing_report.paired(found["8/0"], found["new"]))
    assert ahead == pytest.approx(
        sharing_report.times(*(first_reach(sharing_report.levels(r), level) for r in (silo, member)))
    )
    assert sharing_report.paired({0: silo | {"start": ["a"]}}, {0: member | {"start": ["b"]}}) == {}, "other policies"


def test_values_are_read_between_points() -> None:
    points = [(10.0, 1.0), (20.0, 5.0)]
    assert [value_at(points, x) for x in (5.0, 15.0, 20.0, 21.0)] == [1.0, 3.0, 5.0, None]
    assert [first_reach(points, y) for y in (0.5, 3.0, 6.0)] == [10.0, 15.0, None]


def test_finished_runs_are_reported_and_not_repeated(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (sharing, sharing_report):
        monkeypatch.setattr(module, "FOLDER", tmp_path)
    monkeypatch.setitem(sharing.SETTINGS, "format", setting)
    arguments = "--settings format --arms 8/0 4/4 --seeds 0 1 100 --peers 2 --rounds 2".split()
    sharing.main(arguments)
    monkeypatch.setattr(sharing, "run", lambda *args: pytest.fail("it is there"))
    sharing.main(arguments)
    sharing.main(["--report"])
    report = (tmp_path / "report.md").read_text()
    assert "Seeds [0, 1]" in report, "seeds on which settings were searched are left out"
    assert "4/4: 4 own + 4 foreign, all answers" in report and "CPU hours" in report
