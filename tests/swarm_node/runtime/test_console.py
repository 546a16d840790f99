"""What a run says, as sentences and as JSON lines."""

from __future__ import annotations

import json
import logging
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from swarm_node.config import NodeConfig
from swarm_node.runtime.console import LOGGER, Console, say
from swarm_node.storage.rundir import RunDir


@pytest.fixture(autouse=True)
def outside_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_node.runtime.console.goes_with_container", lambda path: False)


def shown(path: Path, capsys: pytest.CaptureFixture[str], json_output: bool = False, **settings: Any) -> str:
    """All that a run of two rounds shows."""
    config = NodeConfig.model_validate({"run_dir": str(path), "rounds": 2, "health": {"port": 0}} | settings)
    with ExitStack() as stack:
        console = Console(config, stack.enter_context(RunDir.open(path)), json_output, stack)
        say("resumed", "resume")
        logging.getLogger("swarm_node.storage.mirror").info("the %s is full", "bucket")
        console.progress.start()
        for round in (1, 2):
            console.progress.update(round, {"reward": 0.5})
        console.progress.stop()
        console.progress.table("held-out questions", ["task", "pass@1"], [["gcd", 0.25]])
    output = capsys.readouterr()
    assert not (output.out if json_output else output.err)
    return output.err if json_output else output.out


@pytest.mark.parametrize("json_output", [False, True])
def test_each_line_is_a_json_object(json_output: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(tmp_path / "run", capsys, json_output, log_format="json", name="bob").splitlines()
    records = [json.loads(line) for line in lines]
    assert [(record["kind"], record["message"]) for record in records[:2]] == [
        ("resume", "resumed"),
        ("note", "the bucket is full"),
    ]
    assert any(record["kind"] == "progress" and "round 2/2  reward 0.500" in record["message"] for record in records)
    assert records[-1]["message"] == "task gcd, pass@1 0.250"
    assert {record["node"] for record in records} == {"bob"}
    assert all(datetime.fromisoformat(record["time"]).tzinfo is not None for record in records)


def test_sentences_reach_the_terminal_and_the_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(tmp_path / "run", capsys).startswith("resumed\nthe bucket is full\n")
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert [(event["kind"], event["text"]) for event in events] == [
        ("resume", "resumed"),
        ("note", "the bucket is full"),
    ]


def test_the_logger_is_as_before_when_a_run_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = LOGGER.level, LOGGER.propagate, [*LOGGER.handlers]
    shown(tmp_path / "run", capsys)
    assert (LOGGER.level, LOGGER.propagate, LOGGER.handlers) == before
