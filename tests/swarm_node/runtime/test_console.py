"""What a run says, as sentences and as JSON lines."""

from __future__ import annotations

import json
import logging
from contextlib import ExitStack, suppress
from datetime import datetime
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from swarm_node.config import NodeConfig
from swarm_node.errors import UserError
from swarm_node.runtime.console import LOGGER, Console, say
from swarm_node.say import Detail, Warned
from swarm_node.storage.rundir import RunDir


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


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
        say(Warned("the hub is down"))
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
    assert [(record["level"], record["kind"], record["message"]) for record in records[:3]] == [
        ("info", "resume", "resumed"),
        ("info", "note", "the bucket is full"),
        ("warning", "note", "the hub is down"),
    ]
    assert any(record["kind"] == "progress" and "round 2/2  reward 0.500" in record["message"] for record in records)
    assert records[-1]["message"] == "task gcd, pass@1 0.250"
    assert {record["node"] for record in records} == {"bob"}
    assert all(datetime.fromisoformat(record["time"]).tzinfo is not None for record in records)


@pytest.mark.parametrize("json_output", [False, True])
def test_each_plain_line_has_time_and_level(
    json_output: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line.split(maxsplit=2) for line in shown(tmp_path / "run", capsys, json_output).splitlines()]
    assert all(datetime.fromisoformat(time).tzinfo is not None for time, _, _ in lines)
    assert [(level, text) for _, level, text in lines[:3]] == [
        ("INFO", "resumed"),
        ("INFO", "the bucket is full"),
        ("WARNING", "the hub is down"),
    ]
    assert lines[-1][2] == "task gcd, pass@1 0.250"


def test_a_terminal_gets_the_bare_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    config = NodeConfig.model_validate({"run_dir": str(tmp_path / "run"), "health": {"port": 0}})
    with suppress(UserError), ExitStack() as stack:
        Console(config, stack.enter_context(RunDir.open(tmp_path / "run")), False, stack)
        say(Warned("the hub is down"))
        raise UserError("no such model")
    assert terminal.getvalue() == "the hub is down\n"  # the command line shows the error


def test_the_error_that_ends_a_run_is_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = NodeConfig.model_validate({"run_dir": str(tmp_path / "run"), "health": {"port": 0}})
    with suppress(UserError), ExitStack() as stack:
        run = stack.enter_context(RunDir.open(tmp_path / "run"))
        Console(config, run, False, stack)
        run.keep()
        raise UserError("no such model")
    assert capsys.readouterr().out.split(maxsplit=1)[1] == "ERROR   no such model\n"
    assert json.loads((tmp_path / "run/events.jsonl").read_text())["kind"] == "error"


def test_sentences_reach_the_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown(tmp_path / "run", capsys)
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert [(event["kind"], event["text"]) for event in events] == [
        ("resume", "resumed"),
        ("note", "the bucket is full"),
        ("note", "the hub is down"),
    ]


def test_the_logger_is_as_before_when_a_run_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = LOGGER.level, LOGGER.propagate, [*LOGGER.handlers]
    shown(tmp_path / "run", capsys)
    assert (LOGGER.level, LOGGER.propagate, LOGGER.handlers) == before


@pytest.mark.parametrize(
    ("level", "sentences"),
    [
        (logging.NOTSET, ["plain", "warned"]),
        (logging.DEBUG, ["technical", "plain", "warned"]),
        (logging.WARNING, ["warned"]),
    ],
)
def test_the_logger_s_level_decides_what_is_shown(
    level: int,
    sentences: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LOGGER, "level", level)
    run = RunDir(tmp_path / "run")
    with ExitStack() as stack:
        opened = stack.enter_context(RunDir.open(run.path))
        console = Console(NodeConfig(run_dir=str(run.path), rounds=2, log_format="json"), opened, False, stack)
        for sentence in (Detail("technical"), "plain", Warned("warned")):
            say(sentence)
        console.progress.start()
        console.progress.update(2, {"reward": 0.5})
        console.progress.stop()
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["message"] for one in told if one["kind"] == "note"] == sentences
    assert any(one["kind"] == "progress" for one in told) == (level < logging.WARNING)
    events = run.events.read_text()
    assert all(sentence in events for sentence in ("technical", "plain", "warned")), "the file has all of them"
