"""What `swarm-node status` says of averaged weights, of traffic an hour, and of a pause while a run loads."""

from __future__ import annotations

import time
from typing import Any

import pytest

from swarm_node.cli.commands import status, status_text
from swarm_node.cli.commands.status import show_status
from swarm_node.config import NetworkConfig
from swarm_node.runtime.pause import pause_run
from swarm_node.storage.rundir import RunDir
from tests.support.run_files import metrics, write

AVERAGED = {
    "partners": {},
    "last": None,
    "skipped": {},
    "refused": {},
    "bytes": 0,
    "cohort": "ab",
    "method": "noloco",
    "when": "in pairs",
    "codec": "8bit",
}


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_text, "own_command", lambda: "swarm-node")


def a_run(**told: Any) -> RunDir:
    """A run with one round; `told` is what its status tells."""
    run = RunDir("runs/alice")
    write(run.metrics, metrics(1), mode="w")
    run.write_status({"swarm": "ab" * 32, "time": time.time(), "peers": {}, "addresses": [], **told})
    return run


def shown(capsys: pytest.CaptureFixture[str], run: RunDir) -> str:
    show_status(str(run.path), NetworkConfig(), json_output=False)
    return capsys.readouterr().out


def test_weights_of_others_are_told_under_worth(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed = "so held-out figures are not its own gain alone\n"
    once = shown(capsys, a_run(averaging=AVERAGED | {"exchanges": 1}))
    assert f"worth      its weights: averaged once, {mixed}" in once
    assert "its weights" not in shown(capsys, a_run(averaging=AVERAGED | {"exchanges": 0}))
    worth = {"own_groups": 1, "others_groups": 2}
    run = a_run(worth=worth, averaging=AVERAGED | {"exchanges": 12, "began_with": "bob"})
    text = shown(capsys, run)
    assert f"(67%)\n           its weights: began with those of bob and averaged 12 times, {mixed}" in text
    monkeypatch.setattr(status, "is_shown", lambda level: True)  # -v
    assert "then `compare`" not in text and "then `compare`" in shown(capsys, run)


@pytest.mark.parametrize(("seconds", "hourly"), [(600.0, False), (7200.0, True)])
def test_traffic_an_hour_needs_an_hour(capsys: pytest.CaptureFixture[str], seconds: float, hourly: bool) -> None:
    now = time.time()
    text = shown(capsys, a_run(time=now, since=now - seconds, traffic={"bytes_in": 2e6, "bytes_out": 1e6}))
    assert "2.0 MB in, 1.0 MB out" in text and ("1.5 MB an hour" in text) == hourly


def test_a_pause_is_told_while_the_run_loads(capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run()
    run.config.touch()
    pause_run(run, 3600.0, time.time())
    with RunDir.open(run.path):
        text = shown(capsys, run)
    assert "starting (loading)" in text and "paused     by `swarm-node pause` until " in text
    assert "swarm-node unpause runs/alice" in text


CREW = {"name": "home", "count": 1, "whole": True, "lead": None, "updates": 1, "round": 1, "stages": [], "held": [0]}
CREW |= {"spares": 0, "replicas": {}, "recovered": {}}


@pytest.mark.parametrize(("crew", "verb"), [(None, "pause"), (CREW, "stop")])
def test_a_stage_is_stopped_and_not_paused(crew: object, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(crew=crew)
    run.config.touch()
    with RunDir.open(run.path):
        assert f"swarm-node {verb} runs/alice" in shown(capsys, run)


def test_a_stage_that_does_not_lead_tells_how_old_its_round_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert "round      1; its reward" in shown(capsys, a_run(crew=CREW))
    assert "round      1, the last that this node led; its" in shown(capsys, a_run(crew=CREW | {"held": [1]}))


def test_a_run_that_ended_before_its_first_round_says_how(capsys: pytest.CaptureFixture[str]) -> None:
    run, over = RunDir("early"), "the node took 4.02 GiB, more than --max-memory 4: lower grpo.microbatch_tokens"
    told = {"start": "tasks gcd", "error": over, "note": "the picture is drawn"}
    write(run.events, *({"time": time.time() - 300, "kind": kind, "text": text} for kind, text in told.items()))
    lines = shown(capsys, run).splitlines()
    assert lines[0] == "run        early, ended 5 min ago (-v says more)"
    assert f"round      none was done; it ended: {over}" in lines
