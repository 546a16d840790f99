"""Real processes that average weights: they come together, whoever dies in the middle changes nobody's, and who comes
late or comes back goes on from where it should."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from swarm_node.storage.checkpoints import Checkpoint, CheckpointStore, read_checkpoint
from tests.support.processes import LOCAL, QUICK, NodeProcess, Start, make_manifest
from tests.support.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
PROGRAM = Path(__file__).with_name("averaging_node.py")
LOOPBACK = {"listen": "127.0.0.1", "port": 0, "gossip_port": 0, "relay": False, "card_renewal_s": 2.0, "lookup_s": 0.5}
PERIOD_S = 3.0
EVERY = 5
AVERAGING = (
    *QUICK,
    "averaging.method=noloco",
    f"averaging.every={EVERY}",
    "averaging.codec=float32",
    "grpo.learning_rate=3e-4",
    "sharing.own=4",
    "sharing.foreign=0",
    "pace_s=0.3",
)
"""Without foreign groups nothing but averaging holds nodes together."""


# --------------------------------------------------------------------- whole nodes


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    return make_manifest(tmp_path, "--averaging-period-s", str(PERIOD_S))


def exchanges(node: NodeProcess) -> float:
    return node.last("averaging/exchanges")


def newest(node: NodeProcess) -> Checkpoint:
    """Of a node that has stopped."""
    store = CheckpointStore(node.run_dir / "checkpoints", 1, pytest.fail)
    checkpoint = store.load_latest(lambda state: None)
    store.close()
    assert checkpoint is not None
    return checkpoint


def flat(checkpoint: Checkpoint) -> Tensor:
    return torch.cat([tensor.flatten().float() for _, tensor in sorted(checkpoint.tensors["policy"].items())])


def common_start() -> Tensor:
    """Of the starter model, whose weights are all trained."""
    from swarm_node.config import NodeConfig
    from swarm_node.policy.loading import load_policy

    config = NodeConfig()
    policy = load_policy(config.policy, config.rollouts, lambda sentence: None)
    return torch.cat([tensor.flatten().float() for _, tensor in sorted(policy.trainable_state().items())])


def test_nodes_average_although_one_dies(start: Start, manifest: Path, tmp_path: Path) -> None:
    link = start("bootstrap", str(manifest), *LOCAL, run_dir=tmp_path / "hub", sets=()).link()

    def join(name: str) -> NodeProcess:
        return start("join", link, "--name", name, run_dir=tmp_path / name, sets=AVERAGING)

    four = [join(name) for name in ("a", "b", "c", "d")]
    for node in four:
        node.until(lambda node=node: exchanges(node) >= 3)

    *three, victim = four
    before = [exchanges(node) for node in three]
    victim.stop(signal.SIGKILL)
    for node, count in zip(three, before, strict=True):
        node.until(lambda node=node, count=count: exchanges(node) >= count + 2)

    assert all(node.last("step") > EVERY for node in three)
    late = join("late")
    late.until(lambda: "going on with the weights of" in late.output)
    version = int(re.findall(r"going on with the weights of \S+, version (\d+)", late.output)[-1])
    assert version >= EVERY
    late.until_rounds(1)

    everybody = [*three, late]
    assert [node.stop() for node in everybody] == [0] * 4
    for node in everybody:
        assert "Traceback" not in node.output
    checkpoints = [newest(node) for node in everybody]
    began = common_start()
    progress = torch.stack([flat(checkpoint) - began for checkpoint in checkpoints])
    middle = progress.mean(0)
    ratio = float((progress - middle).norm(dim=1).mean() / middle.norm())
    assert ratio < 0.6  # usually 0.25; 1.0 without averaging

    counts = [checkpoint.state["averaging"]["counts"]["exchanges"] for checkpoint in checkpoints[:2]]
    assert all(count >= 5 for count in counts)
    again = [join(name) for name in ("a", "b")]
    for node, checkpoint, count in zip(again, checkpoints, counts, strict=False):
        node.until(lambda node=node, rounds=checkpoint.round: node.rounds > rounds)
        assert "resumed" in node.output and "going on with the weights of" not in node.output
        first = next(line for line in node.metrics if line["round"] > checkpoint.round)
        assert first["averaging/exchanges"] >= count
        node.until(lambda node=node, count=count: exchanges(node) > count)
    assert [node.stop() for node in again] == [0, 0]


def test_outer_rounds_draw_nodes_together(start: Start, manifest: Path, tmp_path: Path) -> None:
    """By checkpoints of every round: the spread before and after each outer round; and that weights have not changed by
    a bit but by training, by exchanges that came about, and in a node that came late by the weights it went on with,
    while two are killed, one after the other, in an exchange."""
    model = tmp_path / "model"
    command = [sys.executable, "-m", "swarm_node", "starter", "--out", str(model), "--layers", "1", "--hidden", "64"]
    subprocess.run([*command, "--steps", "300"], check=True, capture_output=True)
    link = start("bootstrap", str(manifest), *LOCAL, run_dir=tmp_path / "hub", sets=()).link()
    sets = (*AVERAGING, f"policy.model={model}", "checkpoints.keep=1000")
    four = [start("join", link, "--name", name, run_dir=tmp_path / name, sets=sets) for name in "abcd"]
    for node in four:
        node.until(lambda node=node: exchanges(node) >= 5)

    one, two, three, victim = four
    kill_while_bytes_flow(victim)
    kill_while_bytes_flow(three)
    before = [exchanges(node) for node in (one, two)]
    for node, count in zip((one, two), before, strict=True):
        node.until(lambda node=node, count=count: exchanges(node) > count)
    assert [node.stop() for node in (one, two)] == [0] * 2

    histories = [history(node) for node in four]
    steps = [outer_rounds(states) for states in histories]
    whole = sorted(set.intersection(*(set(of_node) for of_node in steps)))
    assert len(whole) >= 3
    for number in whole:
        before, after = (torch.stack([of_node[number][i] for of_node in steps]) for i in (0, 1))
        spread_before, spread_after = (float((x - x.mean(0)).norm()) for x in (before, after))
        assert spread_after < spread_before, (number, spread_before, spread_after)

    for number, (node, states) in enumerate(zip(four, histories, strict=True)):
        assert all(state.weights.isfinite().all() for state in states)
        idle = [  # rounds without signal and without an exchange
            (before, after)
            for before, after in pairwise(states)
            if (before.updates, before.exchanges) == (after.updates, after.exchanges)
        ]
        still = [
            torch.equal(before.weights, after.weights) for before, after in idle if before.version == after.version
        ]
        assert all(still) and (number >= 2 or len(still) >= 3)
        assert len(idle) - len(still) <= node.output.count("going on with the weights of"), "it came late"


def kill_while_bytes_flow(victim: NodeProcess) -> None:
    """A body passes through its network process: nothing else there is of that size."""
    counters = Path(f"/proc/{victim.children()['p2pd']}/io")

    def passed() -> int:
        read, written = counters.read_text().splitlines()[:2]
        return int(read.split()[1]) + int(written.split()[1])

    end, before = time.monotonic() + PATIENCE_S, passed()
    while (now := passed()) - before < 2**15:
        assert time.monotonic() < end, "no exchange"
        before = now
        time.sleep(0.002)
    victim.stop(signal.SIGKILL)


class State(NamedTuple):
    """As of one checkpoint."""

    version: int
    updates: int
    exchanges: int
    outer_round: int
    weights: Tensor


def history(node: NodeProcess) -> list[State]:
    """After each of its rounds; every checkpoint must be intact."""
    states = []
    for path in sorted((node.run_dir / "checkpoints").glob("round-*")):
        checkpoint = read_checkpoint(path, lambda state: None)
        state = checkpoint.state
        count = state["averaging"]["counts"].get("exchanges", 0)
        updates, outer_round = state["trainer"]["updates"], int(state["time"] / PERIOD_S)
        states.append(State(state["policy_version"], updates, count, outer_round, flat(checkpoint)))
    return states


def outer_rounds(states: list[State]) -> dict[int, tuple[Tensor, Tensor]]:
    """Outer round -> weights before and after the exchange."""
    return {
        other.outer_round: (one.weights, other.weights)
        for one, other in pairwise(states)
        if one.exchanges < other.exchanges
    }


# --------------------------------------------------------------------- killed in the middle of an exchange


class Node:
    """An `averaging_node.py` process."""

    def __init__(self, folder: Path, name: str, **settings: Any) -> None:
        settings = LOOPBACK | {"values": 8_000_000, "bytes_per_s": 8e6, "period_s": 1.0} | settings
        with (folder / f"{name}.err").open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(PROGRAM), str(folder), name, json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

    def __call__(self, command: str = "status") -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command]) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        with self.process:  # closes its pipes and waits for it
            self.process.kill()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    started: list[Node] = []

    def starter(name: str, **settings: Any) -> Node:
        one = Node(tmp_path, name, **settings)
        started.append(one)
        assert one.answer() == "ready"
        return one

    yield starter
    for one in started:
        one.end()


@pytest.mark.parametrize("victim", ["node", "p2pd"])
def test_a_torn_exchange_changes_no_weights(node: Callable[..., Node], victim: str) -> None:
    one = node("one", fill=1.0)
    addresses = until(lambda: one().get("addresses"))
    two = node("two", fill=3.0, bootstrap=addresses)
    before = one()["sha256"], until(lambda: two().get("sha256"))
    status = until(lambda: (now := one())["bytes_in"] > 5e6 and now, 60)  # of 32e6
    assert status["metrics"]["averaging/exchanges"] == 0
    os.kill(two()["pids"][["node", "p2pd"].index(victim)], signal.SIGKILL)

    survivors = [one] if victim == "node" else [one, two]
    for survivor, sha256 in zip(survivors, before, strict=False):
        now = until(lambda survivor=survivor: survivor()["skipped"])
        assert now["metrics"]["averaging/exchanges"] == 0
        assert now["sha256"] == sha256

    fresh = node("three", fill=3.0, bootstrap=addresses, bytes_per_s=1e9) if victim == "node" else two
    for party in (one, fresh):
        until(lambda party=party: party()["metrics"]["averaging/exchanges"] >= 1)
    assert one()["sha256"] != before[0]
    assert 1.0 < one()["mean"] < 3.0
