"""A swarm of real processes on this machine: it learns together, and whoever dies leaves the rest learning."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarm_node.cli.app import app
from tests.support.processes import LOCAL, QUICK, NodeProcess, Start, alive, learns_from_others, make_manifest
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)
AVERAGING = (*QUICK, "averaging.method=noloco", "averaging.every=2", "averaging.codec=float32", "pace_s=1")


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    return make_manifest(tmp_path)


def bootstrap(start: Start, manifest: Path, directory: Path) -> NodeProcess:
    return start("bootstrap", str(manifest), *LOCAL, run_dir=directory, sets=())


def test_two_nodes_learn_from_each_other_and_average(start: Start, tmp_path: Path) -> None:
    manifest = make_manifest(tmp_path, "--averaging-period-s", "3")
    a = start("join", str(manifest), "--name", "alice", run_dir=tmp_path / "a", sets=AVERAGING)
    b = start("join", a.link(), "--name", "bob", run_dir=tmp_path / "b", sets=AVERAGING)
    for node in (a, b):
        learns_from_others(node)
        node.until(lambda node=node: node.last("averaging/exchanges") > 0)
        assert node.last("swarm/peers") == 1 and "Traceback" not in node.output
    kids = a.children()
    assert set(kids) == {"p2pd", "gossip"}
    assert a.stop(signal.SIGINT) == 0
    until(lambda: not any(map(alive, kids.values())))
    b.until_rounds(1)


@pytest.mark.long
def test_three_processes_learn_together_and_any_may_die(start: Start, manifest: Path, tmp_path: Path) -> None:
    hub = bootstrap(start, manifest, tmp_path / "hub")
    link = hub.link()
    a = start("join", link, "--name", "alice", run_dir=tmp_path / "a")
    b = start("join", link, "--name", "bob", run_dir=tmp_path / "b")
    for node in (a, b):
        node.until(lambda node=node: node.rounds > 0)
        node.until(lambda node=node: node.last("swarm/groups_admitted") > 0)
        learns_from_others(node)
    a.until(lambda: a.last("swarm/peers") == 2)  # the bootstrap and bob
    assert a.link() and a.link() != link  # every member can be joined through

    children = a.children()
    assert set(children) == {"p2pd", "gossip"}
    for kind in ("gossip", "p2pd"):
        old = children[kind]
        os.kill(old, signal.SIGKILL)
        a.until_rounds(3)
        a.until(lambda kind=kind, old=old: a.children().get(kind, old) != old)
    learns_from_others(a)
    learns_from_others(b)

    kids = b.children()
    b.stop(signal.SIGKILL)
    kept = max(int(path.parent.name[6:14]) for path in (tmp_path / "b" / "checkpoints").glob("round-*/SHA256SUMS"))
    rounds = b.rounds
    until(lambda: not any(map(alive, kids.values())))
    a.until_rounds(5)
    b = start("join", link, "--name", "bob", run_dir=tmp_path / "b")
    b.until(lambda: b.rounds > rounds)
    assert f"at round {kept}" in b.output
    learns_from_others(b)
    learns_from_others(a)

    hub.stop(signal.SIGKILL)
    a.until_rounds(5)
    learns_from_others(a)
    learns_from_others(b)
    c = start("join", a.link(), "--name", "carol", run_dir=tmp_path / "c")
    c.until(lambda: c.rounds > 0)
    learns_from_others(c)

    kids = {**a.children()}
    assert a.stop(signal.SIGINT) == 0
    until(lambda: not any(map(alive, kids.values())))
    b.until_rounds(3)


@pytest.mark.long
def test_a_dead_bootstrap_is_found_again(start: Start, manifest: Path, tmp_path: Path) -> None:
    hub = bootstrap(start, manifest, tmp_path / "hub")
    link = hub.link()
    assert hub.stop() == 0
    address = link.partition("?peer=")[2]
    a = start("join", str(manifest), "--name", "alice", "--bootstrap", address, run_dir=tmp_path / "a")
    a.until_rounds(3)
    assert a.last("swarm/peers") == 0
    hub = bootstrap(start, manifest, tmp_path / "hub")
    assert hub.link() == link  # same identity, and the port that it got last time
    a.until(lambda: a.last("swarm/peers") == 1)


@pytest.mark.long
def test_a_member_goes_on_with_its_own_settings(start: Start, manifest: Path, tmp_path: Path) -> None:
    run = tmp_path / "a"
    first = start("join", str(manifest), "--name", "alice", "--tasks", "small/gcd", "--rounds", "3", run_dir=run)
    assert first.ended() == 0, first.output
    config = (run / "config.toml").read_bytes()
    done = start("join", run_dir=run, sets=())
    assert done.ended() == 0 and "all 3 rounds are done" in done.output, done.output
    alone = start("local", "--rounds", "5", run_dir=run, sets=())
    assert alone.ended() == 2 and f"`swarm-node resume {run}` goes on" in alone.output
    assert (run / "config.toml").read_bytes() == config
    more = start("join", "--rounds", "4", run_dir=run, sets=("rollouts.max_new_tokens=4",))
    assert more.ended() == 0 and "rollouts.max_new_tokens 8 -> 4, from round 4" in more.output, more.output
    assert (run / "config-0001.toml").read_bytes() == config
    measured = CliRunner().invoke(app, ["eval", str(run), "--questions", "6", "--json"], catch_exceptions=False)
    assert json.loads(measured.stdout)["held_out"].keys() == {"gcd", "all"}, "what it chose of the swarm's tasks"
