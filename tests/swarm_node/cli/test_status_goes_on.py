"""How `swarm-node status` says that a run goes on, and how it went."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from swarm_node.observability.tally import Tally
from swarm_node.storage.rundir import RunDir
from tests.swarm_node.cli.test_status import checkpoint_at, clock_stands_still, make_run, shown, trained_run

__all__ = ["clock_stands_still"]  # a fixture


def test_a_run_killed_on_this_machine_is_resumed_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    run = trained_run(1, "start")
    with RunDir.open(run.path):
        assert "swarm-node resume" not in shown(capsys, "runs/alice")
    text = shown(capsys, "runs/alice")
    assert "runs/alice, killed or crashed 1 s ago" in text and "swarm-node resume runs/alice\n" in text


def test_a_run_is_told_how_it_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    """The command that works, or what to do instead: never one that would be refused."""
    run = trained_run(600, "start", "summary")
    checkpoint_at(run, 41)
    run.config.write_text("rounds = 41\n")
    assert "next       swarm-node resume runs/alice --rounds 82\n" in shown(capsys, "runs/alice")
    run.config.write_text('rounds = 90\nrewards.functions = [{path = "mine.py:short"}]\n')
    text = shown(capsys, "runs/alice")
    assert "resume" not in text and "to go on, put 'mine.py' back, which its settings name, or go to the" in text
    Path("mine.py").touch()
    assert "next       swarm-node resume runs/alice\n" in shown(capsys, "runs/alice")
    run.config.write_text('rounds = 90\nrewards.functions = [{path = "__main__:short"}]\n')
    text = shown(capsys, "runs/alice")
    assert "resume" not in text
    assert "to go on, start the program again that gave it the reward function '__main__:short'\n" in text
    document = json.loads(shown(capsys, "runs/alice", json_output=True))
    assert document["goes_on"]["command"] == "" and "__main__:short" in document["goes_on"]["instead"]


@pytest.mark.parametrize("rounds", [1, 15, 19])
def test_single_rounds_are_no_trend(rounds: int, capsys: pytest.CaptureFixture[str]) -> None:
    run, tally = make_run("runs/alice"), Tally()
    for round in range(1, rounds + 1):
        tally.add({"round": round, "reward": 0.25 if round == 1 else 0.75})
    state = {"state": {"tally": msgspec.to_builtins(tally)}}
    (checkpoint_at(run, rounds) / "state.json").write_text(json.dumps(state))
    text = shown(capsys, "runs/alice")
    few = f"; reward 0.250 in the first, 0.750 in the last of {rounds} rounds: too few for a trend\n"
    assert "tenth" not in text and (few in text) == (rounds > 1)
