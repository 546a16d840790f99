"""Held-out figures that a checkpoint has, as the page shows them."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from swarm_node.config.figures import reports_reward
from swarm_node.config.training import RewardsConfig
from swarm_node.observability.dashboard.gallery import Gallery
from swarm_node.observability.dashboard.view import View
from swarm_node.observability.evaluations import newest_checkpoint, shown_change, shown_held_out
from swarm_node.observability.noise import interval
from swarm_node.storage.rundir import RunDir
from tests.support.run_files import metrics, write


def evaluation(*shares: float) -> dict[str, Any]:
    """Of one task; each question with its share of right answers."""
    held = {"questions": len(shares), "pass_1": sum(shares) / len(shares), "pass_k": 1.0, "reward": 0.5}
    shown = [
        {"task": "gcd", "question": f"{i}?", "right": "1", "answer": "1", "correct": True} for i in range(len(shares))
    ]
    table = {"gcd": held, "all": held}
    return {"table": table, "by_question": list(shares), "labels": ["gcd"] * len(shares), "shown": shown}


def state(round: int, after: dict[str, Any]) -> dict[str, Any]:
    figures = {"before": evaluation(0.0, 0.25, 0.5, 1.0), "last": after, "round": round}
    return {"held_out_figures": figures, "held_out": {"samples": 4}}


def test_three_questions_are_shown_before_and_after() -> None:
    found = shown_held_out(state(20, evaluation(0.5, 0.25, 1.0, 0.25)), with_reward=False)
    assert found is not None
    assert [one["question"] for one in found["answers"]] == ["0?", "1?", "3?"]
    assert (found["answers_of"], found["samples"], found["figure"]) == (4, 4, "pass_1")
    assert found["tasks"] == [{"task": "gcd", "questions": 4, "before": 0.4375, "after": 0.5}]
    assert found["points"] == [
        {"round": 0, "questions": 4, "pass_1": 0.4375, "pass_k": 1.0},
        {"round": 20, "questions": 4, "pass_1": 0.5, "pass_k": 1.0},
    ]


def test_a_change_is_judged_as_in_the_summary() -> None:
    before, after = [0.0, 0.5] * 10, [0.5, 0.5] * 10
    figures = {"before": evaluation(*before), "last": evaluation(*after), "round": 20}
    found = shown_change({"held_out_figures": figures, "held_out": {"samples": 4}})
    assert found == {"interval": list(interval(before, after) or ()), "verdict": "more than noise"}
    few = shown_change(state(20, evaluation(0.5, 0.25, 1.0, 0.25)))
    assert few == {"interval": None, "verdict": "4 questions are too few to tell it from noise"}
    assert shown_change(state(20, evaluation(0.5))) is None, "other questions were asked"


def test_rewards_are_told_where_they_count() -> None:
    rewarded = state(20, evaluation(0.5)) | {"held_out": {"samples": 4, "rewards": [["own.py:close", 1.0]]}}
    found = shown_held_out(rewarded, with_reward=True)
    assert found is not None and (found["figure"], found["own_tasks"]) == ("reward", False)
    assert [point["reward"] for point in found["points"]] == [0.5, 0.5]


@pytest.mark.parametrize("damaged", [{}, {"held_out": {"samples": 4}, "before": {"all": [1]}}, {"held_out_figures": 3}])
def test_a_checkpoint_without_figures_shows_none(damaged: dict[str, Any]) -> None:
    assert shown_held_out(damaged, with_reward=False) is None
    assert shown_change(damaged) is None


def save(run: RunDir, round: int) -> None:
    """A checkpoint with figures of that round."""
    folder = run.checkpoints / f"round-{round:08}"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"state": state(round, evaluation(0.5))}))


def rounds(view: View) -> list[int]:
    """Those with held-out figures."""
    view.refresh()
    return [point["round"] for point in view.held_out["points"]] if view.held_out else []


def test_each_new_checkpoint_is_looked_at() -> None:
    run = RunDir("runs/alice")
    write(run.metrics, metrics(20))
    assert (view := Gallery([]).view("alice")) is not None and view.held_out is None
    for round in (10, 20):
        save(run, round)
        assert rounds(view) == [0, round]


def test_figures_after_the_last_round_are_not_shown() -> None:
    run = RunDir("runs/alice")
    write(run.metrics, metrics(500))
    save(run, 500)
    view = View("alice", run)
    assert rounds(view) == [0, 500]
    write(run.metrics, metrics(3), mode="w")  # the run was started anew
    assert rounds(view) == [0]
    assert view.held_out is not None and (view.held_out["tasks"], view.held_out["answers"]) == ([], [])
    write(run.metrics, metrics(500))
    assert rounds(view) == [0, 500] and view.held_out is not None and view.held_out["tasks"]


def test_figures_of_removed_rounds_are_forgotten() -> None:
    run = RunDir("runs/alice")
    write(run.metrics, metrics(500))
    save(run, 500)
    view = View("alice", run)
    assert rounds(view) == [0, 500]
    write(run.metrics, metrics(3), mode="w")
    run.checkpoints.rename("elsewhere")
    assert rounds(view) == []


def test_unreadable_checkpoints_cost_only_their_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir("runs/alice")
    write(run.metrics, metrics(10))
    save(run, 10)
    view = View("alice", run)

    def refuse(path: Path) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(Path, "iterdir", refuse)
    view.refresh()
    assert view.held_out is None and newest_checkpoint(run) == (0, {})
    assert view.summary(0.0)["rounds"] == 10


@pytest.mark.parametrize("rewards", ["", "partial = true", 'functions = [{ path = "own.py:close" }]'])
def test_the_page_tells_rewards_as_the_run_does(rewards: str) -> None:
    run = RunDir("runs/alice")
    write(run.metrics, metrics(10))
    run.config.write_text(f"[rewards]\n{rewards}\n")
    save(run, 10)
    view = View("alice", run)
    view.refresh()
    assert view.held_out is not None
    reported = reports_reward(RewardsConfig.model_validate(tomllib.loads(rewards)))
    assert ("reward" in view.held_out["points"][-1]) == reported
