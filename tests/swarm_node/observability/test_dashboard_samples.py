"""Questions and answers on the dashboard, as its data and as its page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swarm_node.observability.dashboard.view import SAMPLES, View
from swarm_node.observability.shown_samples import MAX_ANSWERS, TEXT, shown_sample
from swarm_node.storage.rundir import RunDir
from tests.support.run_files import answered, write


def view() -> View:
    shown = View("run", RunDir("run"))
    shown.refresh()
    return shown


def test_the_newest_samples_are_shown() -> None:
    path = Path("run/samples.jsonl")
    write(path, *(answered(round) for round in range(1, 20)))
    shown = view()
    assert [sample["round"] for sample in shown.samples] == list(range(20 - SAMPLES, 20))
    write(path, answered(20))
    shown.refresh()
    assert shown.samples[-1]["round"] == 20 and len(shown.samples) == SAMPLES
    write(path, answered(7), mode="w")  # the run went back to an earlier checkpoint
    shown.refresh()
    assert [sample["round"] for sample in shown.samples] == [7]


def test_a_run_without_samples_shows_none() -> None:
    Path("run").mkdir()
    assert list(view().samples) == []


def test_equal_answers_are_counted() -> None:
    rewards = {"rewards": {"checker": 1.0, "short": None}}
    right = {"text": "7", "extracted": "7", "reward": 1.0, "correct": True, "finished": True, **rewards}
    wrong = {"text": "8…", "extracted": None, "reward": 0.0, "correct": False, "finished": False}
    trained = right | {"advantage": 1.5}
    one, other = shown_sample(answered(1, wrong, right, trained))["answers"]
    assert one == {
        "text": "7",
        "judged": "7",
        "reward": 1.0,
        "times": 2,
        "correct": True,
        "cut": False,
        "rewards": {"checker": 1.0},
        "advantage": 1.5,
    }
    assert (other["text"], other["times"], other["cut"]) == ("8…", 1, True)
    assert (other["rewards"], other["advantage"]) == ({}, None)


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"answers": "none", "round": "x", "peer": 3, "question": None, "right": ["7"], "reward": None, "of": 1e300},
        {"answers": [1, {}, {"reward": "x", "text": "y" * 10**6}] * 100, "task": "t" * 10**6},
    ],
)
def test_whatever_a_file_has_is_bounded(record: dict[str, Any]) -> None:
    shown = shown_sample(record)
    assert len(json.dumps(shown)) < 10 * (TEXT + 500) and len(shown["answers"]) <= MAX_ANSWERS
