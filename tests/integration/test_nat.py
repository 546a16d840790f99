"""Behind a router: two nodes that can reach the bootstrap and nothing else, in network namespaces of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.processes import QUICK, nodes
from tests.integration.test_swarm import learns_from_others, make_manifest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="makes network namespaces: needs root"),
]
HUB, LEFT, RIGHT = (f"swarm-{os.getpid()}-{name}" for name in ("hub", "left", "right"))


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def namespaces() -> Iterator[None]:
    """left -- 10.77.1.0/24 -- hub -- 10.77.2.0/24 -- right; the hub passes nothing on."""
    try:
        for name in (HUB, LEFT, RIGHT):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        for number, name in ((1, LEFT), (2, RIGHT)):
            ip("link", "add", f"h{number}", "netns", HUB, "type", "veth", "peer", "name", "eth0", "netns", name)
            for space, device, host in ((HUB, f"h{number}", 1), (name, "eth0", 2)):
                ip("-n", space, "address", "add", f"10.77.{number}.{host}/24", "dev", device)
                ip("-n", space, "link", "set", device, "up")
            ip("-n", name, "route", "add", "default", "via", f"10.77.{number}.1")
        yield
    finally:
        for name in (HUB, LEFT, RIGHT):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def inside(name: str) -> tuple[str, ...]:
    return "ip", "netns", "exec", name


@pytest.mark.timeout(150)
@pytest.mark.parametrize("dial_only", [True, False], ids=["told", "untold"])
@pytest.mark.usefixtures("namespaces")
def test_nodes_that_can_only_dial_out_learn_from_each_other(tmp_path: Path, dial_only: bool) -> None:
    manifest = make_manifest(tmp_path)
    sets = tuple(pair for pair in QUICK if not pair.startswith("network.listen"))
    sets += (f"network.dial_only={str(dial_only).lower()}",)
    with nodes() as start:
        hub = start("bootstrap", str(manifest), run_dir=tmp_path / "hub", sets=(), prefix=inside(HUB))
        link = hub.link()
        left = start("join", link, "--name", "left", run_dir=tmp_path / "left", sets=sets, prefix=inside(LEFT))
        right = start("join", link, "--name", "right", run_dir=tmp_path / "right", sets=sets, prefix=inside(RIGHT))
        unreachable = subprocess.run([*inside(LEFT), "ping", "-c1", "-W1", "10.77.2.2"], capture_output=True)
        assert unreachable.returncode != 0 or shutil.which("ping") is None
        for node in (left, right):
            node.until(lambda node=node: node.rounds > 0 or None, 60)  # type: ignore[misc]
            node.until(lambda node=node: node.last("swarm/peers") == 2 or None, 40)  # type: ignore[misc]
            learns_from_others(node)
