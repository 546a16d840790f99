"""How a run ended that no process of this machine holds, as its files tell."""

from __future__ import annotations

import os

import pytest

from swarm_node.observability.ending import QUIET_S, last_words
from swarm_node.runtime.limits import MemoryLimit
from swarm_node.storage.rundir import RunDir
from tests.support.run_files import metrics, write

NOW = 1041.0  # round 41 has just ended


def run_with(*kinds: str, rounds: int = 41, step_time: float = 1.0) -> RunDir:
    """A run with so many rounds, and with events of these kinds, all written before NOW."""
    run = RunDir("runs/alice")
    run.path.mkdir(parents=True)
    write(run.metrics, *(metrics(round, step_time=step_time) for round in range(1, rounds + 1)))
    write(run.events, *({"time": 1000.0, "kind": kind, "text": ""} for kind in kinds))
    return run


def test_silence_alone_kills_no_run() -> None:
    words = last_words(run_with("start", "note"))
    assert [words.end(NOW + silent) for silent in (-3, 1, QUIET_S, QUIET_S + 1)] == [*["unclear"] * 3, "killed"]


def test_a_process_of_this_machine_that_is_gone_was_killed_at_once() -> None:
    run = run_with("start")
    with RunDir.open(run.path):
        pass
    assert last_words(run).end(NOW + 1) == "killed"
    lock = run.path / "lock"
    pid, here = lock.read_text().split()
    assert int(pid) == os.getpid() and run.holder == pid
    for text in (f"{pid}\n", f"{pid}\nanother\n", f"{here}\n", ""):  # by an earlier version, of another machine
        lock.write_text(text)
        assert last_words(run).end(NOW + 1) == "unclear"


def test_long_rounds_are_waited_for() -> None:
    words = last_words(run_with("start", step_time=100.0))
    assert (words.end(NOW + 399), words.end(NOW + 401)) == ("unclear", "killed")


@pytest.mark.parametrize("end", ["summary", "stop", "error"])
def test_a_clock_set_back_kills_no_run(end: str) -> None:
    run = run_with("start")
    write(run.events, {"time": NOW - 3, "kind": end, "text": ""}, {"time": NOW - 3, "kind": "note", "text": ""})
    assert last_words(run).end(NOW + 900) == "ended"


def test_an_end_for_memory_names_what_was_lacked() -> None:
    run, error = run_with("start"), {"time": NOW, "kind": "error"}
    write(run.events, error | {"text": MemoryLimit(1.5, "lower it").exceeded_by(2 * 2**30)})
    assert last_words(run).lacked_gib == 2.0
    write(run.events, {"time": NOW, "kind": "note", "text": "9 GiB, more than --max-memory 1"})
    assert last_words(run).lacked_gib == 2.0
    write(run.events, error | {"text": "cannot write"})
    assert last_words(run).lacked_gib == 0.0


def test_an_end_before_the_last_start_does_not_count() -> None:
    assert last_words(run_with("start", "summary", "resume", "start", "note")).end(NOW + 900) == "killed"
    write(RunDir("runs/alice").events, {"time": NOW, "kind": "error", "text": "a start that failed"})
    assert last_words(RunDir("runs/alice")).end(NOW + 900) == "ended"


def test_a_run_without_rounds_may_be_killed() -> None:
    assert last_words(run_with("start", rounds=0)).end(NOW + 900) == "killed"


@pytest.mark.parametrize(("kinds", "rounds"), [([], 41), (["note", "link"], 0)])
def test_files_that_do_not_tell_mean_an_end(kinds: list[str], rounds: int) -> None:
    assert last_words(run_with(*kinds, rounds=rounds)).end(NOW + 900) == "ended"


def test_a_start_far_from_the_end_counts() -> None:
    run = run_with("start", *["note"] * 2000)
    assert last_words(run).end(NOW + 900) == "killed"


def test_status_and_events_are_heard_too() -> None:
    run = run_with("start")
    assert last_words(run).heard == NOW
    run.write_status({"time": NOW + 50})
    assert last_words(run).heard == NOW + 50
    write(run.events, {"time": NOW + 70, "kind": "note", "text": ""})
    assert last_words(run).heard == NOW + 70


def test_damaged_files_are_passed_over() -> None:
    run = run_with("start")
    run.status.write_text("{")
    for path in (run.metrics, run.events):
        with open(path, "a") as file:
            file.write('nonsense\n{"kind": 3}\n{"time": "late"}\n')
    words = last_words(run)
    assert (words.heard, words.end(NOW + 900)) == (NOW, "killed")
