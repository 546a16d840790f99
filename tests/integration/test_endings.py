"""Every way in which a node ends, with real processes: a row for each in the table of docs/fleet.md."""

from __future__ import annotations

import json
import re
import resource
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarm_node.cli.app import app
from tests.support.processes import QUICK, NodeProcess, make_manifest, nodes
from tests.support.repository import ROOT
from tests.support.waiting import PATIENCE_S, until

pytestmark = pytest.mark.long

REWARDS = '''
import time
from pathlib import Path

KEPT, METRICS = [], Path(__file__).parent / "run/metrics.jsonl"

def greedy(completions, **columns):
    """Takes memory without end, a little at a time."""
    KEPT.append(b"x" * 2**26)
    return [float(len(each)) for each in completions]

def later(completions, **columns):
    """The same after a round."""
    return greedy(completions) if METRICS.read_bytes() else [float(len(each)) for each in completions]

def deaf(completions, **columns):
    """After a round, takes much memory at once, and ends for nobody."""
    if not METRICS.read_bytes():
        return [float(len(each)) for each in completions]
    KEPT.append(b"x" * 2**31)
    print("deaf from here on", flush=True)
    while True:
        try:
            time.sleep(1)
        except BaseException:
            pass

def broken(completions, **columns):
    raise KeyError("grade")
'''
ROW = re.compile(r"\| `(\w+)` \|.*\| (\d+)(?: \((\d+)\))? \| ([\w-]+) \| `([^`]+)`")
TABLE = {match[1]: match for match in ROW.finditer((ROOT / "docs/fleet.md").read_text())}
"""Cause -> its row: (cause, code, another code, level of the last line that says why, words of it)."""


class World:
    """What a way to end needs: a place, and nodes in it."""

    def __init__(self, start: Callable[..., NodeProcess], place: Path) -> None:
        self.start, self.place = start, place
        (place / "rewards.py").write_text(REWARDS)

    def local(self, *options: str, sets: tuple[str, ...] = (), **rest: tuple[str, ...]) -> NodeProcess:
        words = "local", "--log-format", "json", *options
        return self.start(*words, run_dir=self.place / "run", sets=(*QUICK, *sets), **rest)

    def rewarded(self, function: str, *options: str, questions: int = 0) -> NodeProcess:
        """One that trains on a reward function of `REWARDS`, after so many held-out questions."""
        reward = "--reward", f"{self.place}/rewards.py:{function}"
        return self.local(*reward, *options, sets=(f"eval.questions={questions}",))

    def training(self) -> NodeProcess:
        node = self.local()
        node.until_rounds(1)
        return node


def rounds(world: World) -> NodeProcess:
    return world.local("--rounds", "2")


def minutes(world: World) -> NodeProcess:
    return world.local("--minutes", "0.02")


def told(world: World) -> NodeProcess:
    node = world.training()
    node.process.send_signal(signal.SIGTERM)
    return node


def stopped(world: World) -> NodeProcess:
    node = world.training()
    assert CliRunner().invoke(app, ["stop", str(node.run_dir)]).exit_code == 0
    return node


def hurried(world: World) -> NodeProcess:
    node = world.rewarded("deaf")
    node.until_says("deaf from here on")

    def ended() -> bool:
        node.process.send_signal(signal.SIGINT)  # two at the same time are one
        return node.process.poll() is not None

    until(ended, PATIENCE_S)
    return node


def memory(world: World) -> NodeProcess:
    return world.rewarded("later", "--max-memory", "1.6")


def memory_before(world: World) -> NodeProcess:
    return world.rewarded("greedy", "--max-memory", "1.6", questions=128)


def memory_deaf(world: World) -> NodeProcess:
    return world.rewarded("deaf", "--max-memory", "1.6")


def disk(world: World) -> NodeProcess:
    node = world.local(sets=("checkpoints.every=1000",))  # the stop writes the first
    node.until_rounds(1)
    resource.prlimit(node.process.pid, resource.RLIMIT_FSIZE, (2**20, 2**20))  # too little for a checkpoint
    node.process.send_signal(signal.SIGTERM)
    return node


def port(world: World) -> NodeProcess:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        node = world.local("--health-port", str(other.getsockname()[1]))
        node.ended()
    return node


def in_use(world: World) -> NodeProcess:
    world.training()
    return world.local()


def mirror(world: World) -> NodeProcess:
    return world.local("--checkpoint-to", f"file://{world.place}/nowhere")


def setting(world: World) -> NodeProcess:
    return world.local("--tasks", "gdc")


def function(world: World) -> NodeProcess:
    return world.rewarded("broken")


def manifest(world: World) -> NodeProcess:
    made = make_manifest(world.place)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        peer = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}"
        link = f"swarm://{'0' * 64}?peer={peer}/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
        assert made.exists()
        node = world.start("join", link, "--log-format", "json", "--minutes", "0.1", run_dir=world.place / "run")
        node.ended()
    return node


WAYS: dict[str, Callable[[World], NodeProcess]] = {
    way.__name__: way
    for way in (
        *(rounds, minutes, told, stopped, hurried, memory, memory_before, memory_deaf, disk, port, in_use, mirror),
        *(setting, function, manifest),
    )
}


def test_the_table_has_each_way() -> None:
    assert TABLE.keys() == WAYS.keys()


@pytest.mark.parametrize("cause", sorted(WAYS))
def test_a_node_ends_as_the_table_says(cause: str, tmp_path: Path) -> None:
    _, code, other, level, words = TABLE[cause].groups()
    with nodes() as start:
        node = WAYS[cause](World(start, tmp_path))
        assert str(node.ended()) in (code, other), node.output
        lines = [json.loads(line) for line in node.output.splitlines() if line.startswith("{")]
    said = [line["level"] for line in lines if words != "-" and words in line["message"]]
    assert said[-1:] == [level] * (words != "-"), node.output
    assert (level == "error") == any(line["level"] == "error" for line in lines)
