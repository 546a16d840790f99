"""Members whose bootstrap is killed while they join: whoever had a group of another goes on with it, and a bootstrap
that comes back heals the rest."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from tests.support.processes import LOCAL, NodeProcess, Start, make_manifest
from tests.support.waiting import until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
MORE = 20  # groups that come after the bootstrap was killed: more than were still under way


def received(node: NodeProcess) -> int:
    """Groups of other members that have come."""
    try:
        peers = json.loads((node.run_dir / "swarm.json").read_text())["peers"]
    except (OSError, ValueError, KeyError):  # it has not trained yet, or is writing
        return 0
    return sum(figures.get("received", 0) for figures in peers.values())


def go_on(*nodes: NodeProcess) -> None:
    """Until each of them has received more groups."""
    for node, before in [(node, received(node)) for node in nodes]:
        node.until(lambda node=node, before=before: received(node) >= before + MORE)


def bootstrap(start: Start, manifest: Path, tmp_path: Path) -> NodeProcess:
    return start("bootstrap", str(manifest), *LOCAL, run_dir=tmp_path / "hub", sets=())


@pytest.mark.parametrize("seconds", range(1, 11))
def test_nobody_stays_alone_whenever_the_bootstrap_dies(start: Start, tmp_path: Path, seconds: int) -> None:
    manifest = make_manifest(tmp_path)
    hub = bootstrap(start, manifest, tmp_path)
    link = hub.link()
    a, b = (start("join", link, "--name", name, run_dir=tmp_path / name) for name in ("alice", "bob"))
    until(lambda: any("this is peer" in node.output for node in (a, b)))
    time.sleep(seconds)  # the moment is what is tested
    hub.stop(signal.SIGKILL)
    if not (received(a) or received(b)):  # they may not even have the manifest
        hub = bootstrap(start, manifest, tmp_path)
    go_on(a, b)
    assert all("Traceback" not in node.output for node in (a, b))


def test_those_who_are_left_find_each_other(start: Start, tmp_path: Path) -> None:
    hub = bootstrap(start, make_manifest(tmp_path), tmp_path)
    link = hub.link()
    a, b, c = (start("join", link, "--name", name, run_dir=tmp_path / name) for name in ("alice", "bob", "carol"))
    for node in (a, b, c):
        node.until(lambda node=node: received(node))
    hub.stop(signal.SIGKILL)
    c.stop(signal.SIGKILL)
    go_on(a, b)
