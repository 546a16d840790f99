"""Signals while a run is being loaded, within a round, and after the last one."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from swarm_node.config import NodeConfig, load_config
from swarm_node.grpo.optimizer import Optimizer
from swarm_node.runtime import loop as run
from swarm_node.runtime import weight_changes
from swarm_node.runtime.shutdown import Stopper
from swarm_node.storage.rundir import RunDir
from swarm_node.tasks.judging.places import extract
from swarm_node.tasks.one_turn import FORM_PROMPTS
from swarm_node.types import Rollout
from tests.support.run_files import read_jsonl
from tests.support.starting import train_locally

PROGRAM = """
import os, sys, time
from pathlib import Path
from swarm_node.runtime import loop as run
from swarm_node.runtime.callbacks import Manner
from swarm_node.runtime.start import start
from swarm_node.config import NodeConfig
from swarm_node.storage.rundir import RunDir
from swarm_node.storage.bucket import Bucket
from swarm_node.storage.checkpoints import CheckpointStore

def hang(*arguments):
    print("copying", flush=True)
    for _ in range(1200): time.sleep(0.1)
    print("never", flush=True)

def told(what, word):
    def tell(*arguments):
        print(word, flush=True)
        return what(*arguments)
    return tell

Bucket.put = hang  # as where the place does not answer: no URL of one does that
CheckpointStore.close = told(CheckpointStore.close, "closed")
run.RunReport = told(run.RunReport, "reported")
config = {
    "run_dir": sys.argv[1],
    "rounds": 1,
    "rollouts": {"groups": 2, "group_size": 2, "max_new_tokens": 4},
    "eval": {"questions": 0},
    "checkpoints": {"to": f"file://{sys.argv[1]}-away"},
}
os.mkdir(f"{sys.argv[1]}-away")
config = NodeConfig.model_validate(config)
with RunDir.open(config.directory) as directory:
    start(config, directory, None, Manner())
"""


@pytest.mark.slow
def test_a_signal_ends_the_last_copy_well(tmp_path: Path) -> None:
    command, pipes = [sys.executable, "-c", PROGRAM, str(tmp_path / "run")], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipes, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            before = []
            while (line := process.stdout.readline()) and line.strip() != "copying":
                before.append(line)
            assert line, "".join(before)
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 0, out
    assert "never" not in out and "the last checkpoint is not at file://" in out
    assert out.index("closed\n") < out.index("reported\n"), "what people see comes after goodbye"
    assert any((tmp_path / "run/checkpoints").glob("round-00000001/SHA256SUMS"))


class Told(Exception):
    """Nobody was stopped where a signal came."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Settings of a run in this process, which has all the time it needs to end after a signal."""
    monkeypatch.setattr("swarm_node.runtime.preemption.Stopper", partial(Stopper, deadline_s=600.0))
    yield {
        "run_dir": str(tmp_path / "run"),
        "rounds": 1,
        "rollouts": {"groups": 2, "group_size": 2, "max_new_tokens": 4},
        "eval": {"questions": 0},
    }


def start(settings: dict[str, Any]) -> RunDir:
    config = NodeConfig.model_validate(settings)
    assert train_locally(config) == 0
    return RunDir(config.directory)


@pytest.mark.parametrize("what", ["load_policy", "tasks_of_run"])
def test_a_signal_before_training_is_one_sentence(
    what: str, here: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def loads(*arguments: object, **options: object) -> None:
        signal.raise_signal(signal.SIGTERM)
        raise Told

    monkeypatch.setattr(run, what, loads)
    folder = start(here).path
    said = "".join(capsys.readouterr())
    assert "stopping before training began; the same command begins here again" in said
    assert not folder.exists(), "a log alone is no run"


JUDGES = """
import signal
calls = []
def stops_at_the_second_group(completions, **columns):
    calls.append(completions)
    if len(calls) == 2:
        signal.raise_signal(signal.SIGTERM)
    return [0.0 for each in completions]
"""


def test_a_stopped_round_shares_what_is_finished(
    here: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared: list[int] = []
    monkeypatch.setattr(run.Node, "share", lambda node, collected: shared.append(len(collected.groups)))
    (tmp_path / "judges.py").write_text(JUDGES)
    judge = {"path": f"{tmp_path}/judges.py:stops_at_the_second_group"}
    start(here | {"rewards": {"functions": [judge]}})
    assert shared == [1]


def test_slow_rounds_are_saved_by_the_clock(here: dict[str, Any]) -> None:
    folder = start(here | {"rounds": 3, "checkpoints": {"every": 1000, "every_minutes": 1e-9}}).checkpoints
    names = sorted(path.name for path in folder.glob("round-*"))
    assert len(names) == 2 and names[-1] == "round-00000003", "the last is there anyway; nobody waits for a slow disk"


def test_a_lone_run_asks_for_its_form(here: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Rollout] = []
    monkeypatch.setattr(
        run.Node, "share", lambda node, collected: answers.extend(r for g in collected.groups for r in g.rollouts)
    )
    settings = load_config(start(here | {"rewards": {"answer": "tags"}}).config)
    assert settings.policy.system_prompt.endswith(FORM_PROMPTS["tags"])
    assert any(answer.text for answer in answers)
    assert [answer.extracted for answer in answers] == [extract(answer.text, "tags") for answer in answers]


BY_TURNS = """
def by_turns(completions, **columns):
    return [float(i % 2) for i in range(len(completions))]
"""


@pytest.mark.parametrize(("rest_s", "updates"), [(-1.0, 1), (math.inf, 2)], ids=["long", "short"])
def test_a_stop_ends_a_long_round_between_updates(
    rest_s: float, updates: int, here: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rest of a round is long or short beside `rest_s`. The signal comes while the first update changes weights."""
    update = Optimizer.step

    def signalled(optimizer: Optimizer) -> tuple[float, float]:
        if not optimizer.updates:
            signal.raise_signal(signal.SIGTERM)
        return update(optimizer)

    monkeypatch.setattr(Optimizer, "step", signalled)
    monkeypatch.setattr(weight_changes, "REST_S", rest_s)
    (tmp_path / "judges.py").write_text(BY_TURNS)
    rewards = {"checker_weight": 0.0, "functions": [{"path": f"{tmp_path}/judges.py:by_turns"}]}
    folder = start(here | {"rounds": 9, "grpo": {"batch_groups": 1}, "rewards": rewards})
    (record,) = read_jsonl(folder.metrics)
    assert (record["round"], record["step"]) == (1, updates)
    assert [path.name for path in folder.checkpoints.glob("round-*")] == ["round-00000001"]
