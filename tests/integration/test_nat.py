"""Behind a router: two nodes that can reach the bootstrap and nothing else, in network namespaces of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.p2p_processes import Node
from tests.support.processes import QUICK, alive, learns_from_others, make_manifest, nodes
from tests.support.waiting import PATIENCE_S, until

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="makes network namespaces: needs root"),
]
HUB, LEFT, RIGHT = (f"swarm-{os.getpid()}-{name}" for name in ("hub", "left", "right"))
LISTEN = "import socket; s = socket.create_server(('', 0)); print(s.getsockname()[1], flush=True); input()"
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 2.0)"


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


@pytest.mark.usefixtures("namespaces")
def test_nodes_that_only_dial_learn(tmp_path: Path) -> None:
    """One was told that nobody can dial it, the other was not."""
    manifest = make_manifest(tmp_path)
    sets = tuple(pair for pair in QUICK if not pair.startswith("network.listen"))
    told = (*sets, "network.dial_only=true")
    with nodes() as start:
        hub = start("bootstrap", str(manifest), run_dir=tmp_path / "hub", sets=(), prefix=inside(HUB))
        link = hub.link()
        left = start("join", link, "--name", "left", run_dir=tmp_path / "left", sets=told, prefix=inside(LEFT))
        right = start("join", link, "--name", "right", run_dir=tmp_path / "right", sets=sets, prefix=inside(RIGHT))
        unreachable = subprocess.run([*inside(LEFT), "ping", "-c1", "-W1", "10.77.2.2"], capture_output=True)
        assert unreachable.returncode != 0 or shutil.which("ping") is None
        for node in (left, right):
            node.until(lambda node=node: node.rounds > 0)
            node.until(lambda node=node: node.last("swarm/peers") == 2)
            learns_from_others(node)


def passed_on(device: str) -> int:
    """Bytes that the hub has sent through this device."""
    counter = f"/sys/class/net/{device}/statistics/tx_bytes"
    return int(subprocess.run([*inside(HUB), "cat", counter], check=True, capture_output=True).stdout)


def can_connect(space: str, host: str) -> bool:
    """Whether a listener at `host`, in RIGHT, is reached from `space`."""
    command = [*inside(RIGHT), sys.executable, "-c", LISTEN]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as listener:
        assert listener.stdout is not None
        port = listener.stdout.readline().strip()
        try:
            tried = subprocess.run([*inside(space), sys.executable, "-c", CONNECT, host, port], capture_output=True)
        finally:
            listener.communicate("\n", PATIENCE_S)
    return tried.returncode == 0


@pytest.mark.usefixtures("namespaces")
def test_nodes_are_asked_through_a_relay(tmp_path: Path) -> None:
    with ExitStack() as ends:

        def start(space: str, name: str, **settings: Any) -> Node:
            defaults = {"listen": "0.0.0.0", "relay": True}
            ends.callback((node := Node(tmp_path, name, inside(space), **(defaults | settings))).end)
            return node

        assert can_connect(HUB, "10.77.2.2") and not can_connect(LEFT, "10.77.2.2")
        hub = start(HUB, "hub", serve_relay=True, roles=["bootstrap", "relay"])
        near_left, near_right = (
            next(address for address in hub.up() if address.startswith(f"/ip4/10.77.{number}.1/")) for number in (1, 2)
        )
        left = start(LEFT, "left", bootstrap=[near_left], dial_only=True)
        right = start(RIGHT, "right", bootstrap=[near_right], dial_only=True)
        apart = start(HUB, "apart", bootstrap=[near_left], listen="127.0.0.1")  # listens where the two cannot dial
        ways = {"left": [f"{near_left}/p2p-circuit/p2p/{left.peer}"], "right": []}
        ways["right"] = [f"{near_right}/p2p-circuit/p2p/{right.peer}"]
        for node in (left, right, apart, hub):
            others = {name: way for name, way in ways.items() if name != node.name}
            until(lambda node=node, others=others: others.items() <= node("status")["ways"].items())

        text = "?" * 30_000  # a circuit may end after 128 KiB
        for asking, asked in ((left, right), (right, left), (apart, left)):
            before = [passed_on(device) for device in ("h1", "h2")]
            assert asking("ask", asked.peer, text) == asking.peer[-4:] + text
            passed = [passed_on(device) - count for device, count in zip(("h1", "h2"), before, strict=True)]
            assert all(count > len(text) for count in (passed if asking is not apart else passed[:1])), passed

        pids = hub("status")["pids"]
        hub.end()
        until(lambda: not any(map(alive, pids)))
        for asking, asked in ((left, right), (right, left)):
            assert asking("ask", asked.peer, "?").startswith("PeerUnreachable")

        start(HUB, "hub", serve_relay=True, roles=["bootstrap", "relay"], port=int(near_left.split("/")[4]))
        until(lambda: left("ask", right.peer, "again") == left.peer[-4:] + "again")
