"""Members whose bootstrap is killed while they join: whoever had a group of another has its groups again within a
minute, and a bootstrap that comes back heals the rest within a minute.

A minute is counted in rounds of the members. Each takes a fifth of a second at least, and more where others keep the
processor busy, so there the minute is longer.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import LOCAL, NodeProcess, Start, make_manifest
from tests.support.waiting import until

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
MINUTE = 300  # rounds
MORE = 50  # groups that come again: more than one write of swarm.json may miss
LONGEST_S = 600.0  # of a minute, on however busy a machine


def status(node: NodeProcess) -> dict[str, Any]:
    try:
        return dict(json.loads((node.run_dir / "swarm.json").read_text()))
    except (OSError, ValueError):  # it has not joined yet, or is writing
        return {}


def received(node: NodeProcess) -> int:
    """Groups of other members that have come."""
    return sum(figures.get("received", 0) for figures in status(node).get("peers", {}).values())


def go_on(*nodes: NodeProcess) -> bool:
    """Whether each of them receives groups from now on, before all that train have had a minute."""
    now = time.time()
    ends = {node: node.rounds + MINUTE for node in nodes}
    goals: dict[NodeProcess, int] = {}

    def all_receive() -> bool:
        for node in nodes:
            assert node.process.poll() is None, node.output[-3000:]
            if node not in goals and status(node).get("time", 0.0) > now:  # what was written before may lack groups
                goals[node] = received(node) + MORE
        return all(node in goals and received(node) >= goals[node] for node in nodes)

    def is_over() -> bool:
        rounds = {node: node.rounds for node in nodes}
        return any(rounds.values()) and all(not n or n >= ends[node] for node, n in rounds.items())

    until(lambda: all_receive() or is_over(), LONGEST_S, lambda: "\n".join(node.output[-1500:] for node in nodes))
    return all_receive()


def bootstrap(start: Start, manifest: Path, tmp_path: Path) -> tuple[NodeProcess, str]:
    """It, and its join link."""
    hub = start("bootstrap", str(manifest), *LOCAL, run_dir=tmp_path / "hub", sets=())
    return hub, hub.link()


@pytest.mark.parametrize("seconds", range(1, 11))
def test_nobody_stays_alone_whenever_the_bootstrap_dies(start: Start, tmp_path: Path, seconds: int) -> None:
    manifest = make_manifest(tmp_path)
    hub, link = bootstrap(start, manifest, tmp_path)
    a, b = (start("join", link, "--name", name, run_dir=tmp_path / name) for name in ("alice", "bob"))
    until(lambda: any("this is peer" in node.output for node in (a, b)))
    time.sleep(seconds)  # the moment is what is tested
    hub.stop(signal.SIGKILL)
    if not go_on(a, b):
        assert not received(a) and not received(b), "they had each other's groups"
        bootstrap(start, manifest, tmp_path)
        assert go_on(a, b)
    assert all("Traceback" not in node.output for node in (a, b))


def test_a_bootstrap_that_comes_back_heals_the_rest(start: Start, tmp_path: Path) -> None:
    manifest = make_manifest(tmp_path)
    hub, link = bootstrap(start, manifest, tmp_path)
    a = start("join", link, "--name", "alice", run_dir=tmp_path / "alice")
    a.until_rounds(1)
    hub.stop(signal.SIGKILL)
    b = start("join", link, "--name", "bob", run_dir=tmp_path / "bob")
    b.until_says("asking for the manifest")
    a.until_rounds(MINUTE)  # so long that it does not try all the time any more
    assert not b.rounds
    bootstrap(start, manifest, tmp_path)
    assert go_on(a, b)


def test_those_who_are_left_find_each_other(start: Start, tmp_path: Path) -> None:
    hub, link = bootstrap(start, make_manifest(tmp_path), tmp_path)
    a, b, c = (start("join", link, "--name", name, run_dir=tmp_path / name) for name in ("alice", "bob", "carol"))
    for node in (a, b, c):
        node.until(lambda node=node: received(node))
    hub.stop(signal.SIGKILL)
    c.stop(signal.SIGKILL)
    assert go_on(a, b)
