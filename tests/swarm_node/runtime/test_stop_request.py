"""`swarm-node stop` ends the node of a run as Ctrl-C does, and says what it found."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from swarm_node.cli.app import app
from swarm_node.config import NodeConfig
from swarm_node.errors import TemporaryError
from swarm_node.runtime.pause import pause_run
from swarm_node.runtime.shutdown import Stopper
from swarm_node.runtime.stop_request import stop_run
from swarm_node.storage.rundir import BOOTSTRAP, RunDir
from tests.support.run_files import read_jsonl
from tests.support.starting import train_locally
from tests.support.waiting import until


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run whose node has all the time it needs to end."""
    monkeypatch.setattr("swarm_node.runtime.preemption.Stopper", partial(Stopper, deadline_s=600.0))
    return RunDir(tmp_path / "run")


def train(run: RunDir) -> None:
    settings: dict[str, Any] = {
        "run_dir": str(run.path),
        "rounds": 10**6,
        "rollouts": {"groups": 2, "group_size": 2, "max_new_tokens": 4},
        "eval": {"questions": 0},
    }
    assert train_locally(NodeConfig.model_validate(settings)) == 0


@contextmanager
def asked(run: RunDir, when: Any) -> Iterator[list[str]]:
    """Within the context, ask the node of `run` to stop once `when()` is true; gives what the command says."""
    said: list[str] = []

    def ask() -> None:
        until(when)
        said.append(stop_run(run, said.append, wait_s=600.0))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield said
    finally:
        thread.join()


def test_a_node_that_trains_saves_and_leaves(run: RunDir) -> None:
    with asked(run, lambda: run.has_rounds) as said:
        train(run)
    rounds = read_jsonl(run.metrics)[-1]["round"]
    assert (run.checkpoints / f"round-{rounds:08}").is_dir()
    assert said == [
        f"stopping {run.path}: its node is asked to save and leave …",
        f"{run.path} has stopped; `swarm-node resume {run.path}` goes on with it after round {rounds}",
    ]
    assert "asked to stop by `swarm-node stop`" in [event["text"] for event in read_jsonl(run.events)]
    assert not run.stop.exists() and not run.in_use


def test_a_paused_node_can_be_asked_to_stop(run: RunDir) -> None:
    RunDir.open(run.path).close()
    run.config.touch()
    pause_run(run, None, 0.0)
    with asked(run, run.read_waits) as said:
        train(run)
    assert "has stopped" in said[-1] and not run.has_rounds
    if run.exists:
        assert f"still paused: `swarm-node unpause {run.quoted}`" in said[-1]


def test_what_no_node_saw_is_said(tmp_path: Path) -> None:
    with RunDir.open(tmp_path / "busy") as busy:
        busy.keep()
        with pytest.raises(TemporaryError, match="has not seen the request within 0 s"):
            stop_run(RunDir(busy.path), print, wait_s=0.0)
        assert busy.take_stop() and not busy.take_stop()
        busy.write_stop()
    with RunDir.open(tmp_path / "busy") as again:
        assert not again.take_stop(), "it was for the process that has ended"


@pytest.mark.parametrize(
    ("role", "saved", "last", "again"),
    [
        ("", None, None, "begins it: no round had ended"),
        ("", None, 7, "begins it anew: nothing was saved"),
        ("", 5, 5, "goes on with it after round 5"),
        ("", 5, 7, "goes on with it after round 5; its last round was 7, and nothing newer was saved"),
        (BOOTSTRAP, None, None, "starts it again"),
    ],
)
def test_without_a_node_it_says_what_resumes(role: str, saved: int | None, last: int | None, again: str) -> None:
    with RunDir.open("r") as run:
        run.config.touch()
        run.write_status({"role": role})
        if saved is not None:
            (run.checkpoints / f"round-{saved:08}-1").mkdir()
            (run.checkpoints / f"round-{saved + 1:08}.tmp").mkdir()
        if last is not None:
            run.metrics.write_text(f'{{"round": {last}}}\n')
    result = CliRunner().invoke(app, ["stop", "r"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"no node runs in r; `swarm-node resume r` {again}\n"
