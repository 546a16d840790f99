"""Held-out figures that a checkpoint has, as the page shows them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from swarm_node.observability.dashboard.gallery import Gallery
from swarm_node.observability.evaluations import shown_held_out
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


def test_rewards_are_told_where_they_count() -> None:
    rewarded = state(20, evaluation(0.5)) | {"held_out": {"samples": 4, "rewards": [["own.py:close", 1.0]]}}
    found = shown_held_out(rewarded, with_reward=True)
    assert found is not None and (found["figure"], found["own_tasks"]) == ("reward", False)
    assert [point["reward"] for point in found["points"]] == [0.5, 0.5]


@pytest.mark.parametrize("damaged", [{}, {"held_out": {"samples": 4}, "before": {"all": [1]}}, {"held_out_figures": 3}])
def test_a_checkpoint_without_figures_shows_none(damaged: dict[str, Any]) -> None:
    assert shown_held_out(damaged, with_reward=False) is None


def test_each_new_checkpoint_is_looked_at() -> None:
    run = RunDir("runs/alice")
    write(run.metrics, metrics(1))
    assert (view := Gallery([]).view("alice")) is not None and view.held_out is None
    for round in (10, 20):
        folder = run.checkpoints / f"round-{round:08}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps({"state": state(round, evaluation(0.5))}))
        view.refresh()
        assert view.held_out is not None and view.held_out["points"][-1]["round"] == round
