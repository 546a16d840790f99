"""The whole real transport: nodes as processes on loopback, each with p2pd and a gossip process (p2p_node.py)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from swarm_protocol.identity import Identity
from tests.support.p2p_processes import Node
from tests.support.ports import free_port
from tests.support.processes import alive
from tests.support.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
LONG_LIVED = {"card_ttl_s": 3600.0}
"""Cards that do not run out: a member that is gone has said goodbye."""


Start = Callable[..., Node]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a node by name; all are ended with the test."""
    nodes: list[Node] = []

    def started(name: str, **settings: Any) -> Node:
        nodes.append(Node(tmp_path, name, **settings))
        return nodes[-1]

    yield started
    for node in nodes:
        node.end()


def hears(listener: Node, speaker: Node) -> None:
    """Until a message arrives. One that is sent before the gossip of both has met is lost, so it is said again."""

    def said() -> bool:
        number = speaker("publish")
        with contextlib.suppress(AssertionError):
            return bool(until(lambda: f"{speaker.peer[-4:]}/{number}" in listener("status")["heard"], 3.0))
        return False

    until(said)


def test_nodes_come_back_from_the_dead(start: Start) -> None:
    hub = start("hub", **LONG_LIVED)
    addresses = hub.up()
    one, two = (start(name, bootstrap=addresses, **LONG_LIVED) for name in ("one", "two"))
    nodes = {node.name: node for node in (hub, one, two)}
    for node in nodes.values():
        until(lambda node=node: node.members == nodes.keys() - {node.name})
    cache = Path.cwd() / "two.json"
    until(lambda: cache.exists() and addresses[0] in cache.read_text())  # it may be killed at any moment
    for speaker in nodes.values():
        assert hub("status")["said"] == []
        for listener in nodes.values():
            if speaker is not listener:
                hears(listener, speaker)
                assert listener("ask", speaker.peer, "hello") == listener.peer[-4:] + "hello"
    assert two("ask", Identity.generate().peer_id, "hello").startswith("PeerUnreachable")

    before = one("status")
    os.kill(before["pids"][1], signal.SIGKILL)
    until(lambda: one("status")["stats"]["restarts/dht"] == 1)
    until(lambda: two("ask", one.peer, "again") == two.peer[-4:] + "again")
    assert one("status")["addresses"] == before["addresses"]
    until(lambda: one.members == {"hub", "two"})

    os.kill(before["pids"][2], signal.SIGKILL)
    until(lambda: (now := one("status"))["stats"]["restarts/gossip"] == 1 and now["gossip"] != before["gossip"])
    until(lambda: two("status")["members"].get("one") == one("status")["gossip"])  # a new card at once
    hears(two, one)
    hears(one, two)

    stats = two("status")["stats"]
    assert stats["bytes_in"] > 1000 and stats["bytes_out"] > 1000 and stats["messages_in"] >= 1
    pids = [pid for node in nodes.values() for pid in node("status")["pids"]]
    one("close")
    until(lambda: two.members == {"hub"})  # it said goodbye
    for node in (hub, two):
        node("close")
    for node in nodes.values():
        node.end()
    until(lambda: not any(map(alive, pids)))
    assert addresses[0] in cache.read_text()  # kept for the next run


def test_parts_merge_when_a_bootstrap_appears(start: Start, tmp_path: Path) -> None:
    port, peer = free_port(), Identity.load_or_create(tmp_path / "bridge.key").peer_id
    address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}"
    one, two = start("one", bootstrap=[address]), start("two", bootstrap=[address])
    for node in (one, two):
        node.up()
        assert node.members == set()
    bridge = start("bridge", port=port)
    until(lambda: one.members == {"two", "bridge"} and two.members == {"one", "bridge"})
    hears(one, two)
    hears(two, one)

    pids = bridge("status")["pids"]
    bridge.process.kill()  # its p2pd and its gossip process go with it
    until(lambda: not any(map(alive, pids[1:])))
    until(lambda: one.members == {"two"} and two.members == {"one"})
    hears(one, two)  # the others do not need it
    bridge.end()
    (tmp_path / "bridge.json").unlink(missing_ok=True)
    back = start("bridge", port=port)  # knows nobody
    until(lambda: back.members == {"one", "two"} and one.members == {"two", "bridge"})


def test_a_node_that_only_dials_is_heard(start: Start) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        hub = start("hub", port=port, gossip_port=port)
        addresses = hub.up()
        status = hub("status")
        assert f"/tcp/{port}/" not in addresses[0]
        said = [sentence for sentence in status["said"] if f"port {port} is taken" in sentence]
        assert len(said) == 2  # by p2pd and by the gossip process
    inside = start("inside", bootstrap=addresses, dial_only=True)
    until(lambda: inside.members == {"hub"} and hub.members == {"inside"})
    assert inside("status")["addresses"] == []
    hears(hub, inside)
    hears(inside, hub)
    assert hub("ask", inside.peer, "x") == hub.peer[-4:] + "x"  # over the connection that it made
    for _ in range(3):
        assert hub("ask", inside.peer, "fail").startswith("PeerUnreachable")
    assert sum("ValueError('fail')" in sentence for sentence in inside("status")["said"]) == 1  # not again and again


def test_nodes_keep_their_ports_after_ctrl_c(start: Start, tmp_path: Path) -> None:
    port = free_port()
    wanted = {"port": port, "gossip_port": port + 1}
    nodes = [start(name, **wanted) for name in ("one", "two")]  # the network of the first is not up yet

    def noted(node: Node) -> dict[str, int]:
        """Once they are what it serves on."""
        address, file = node.up()[0], tmp_path / f"{node.name}.ports"
        until(lambda: file.exists() and f"/tcp/{json.loads(file.read_text())[str(port)]}/" in address)
        found: dict[str, int] = json.loads(file.read_text())
        return found

    got = [noted(node) for node in nodes]
    assert len({number for one in got for number in one.values()}) == 4
    assert os.getsid(nodes[1]("status")["pids"][1]) != nodes[1].process.pid  # Ctrl-C does not reach p2pd
    pids = nodes[1]("status")["pids"]
    os.killpg(nodes[1].process.pid, signal.SIGINT)
    nodes[1].process.wait(PATIENCE_S)
    until(lambda: not any(map(alive, pids)))
    assert json.loads((tmp_path / "two.ports").read_text()) == got[1]
    assert noted(start("two", **wanted)) == got[1]


def test_bodies_are_exchanged_until_the_network_closes(start: Start) -> None:
    hub = start("hub")
    one = start("one", bootstrap=hub.up())
    assert one("exchange", Identity.generate().peer_id, "x", 0).startswith("PeerUnreachable")
    until(lambda: one.members == {"hub"} and hub.members == {"one"})
    for caller, acceptor in ((one, hub), (hub, one)):
        assert caller("exchange", acceptor.peer, "head", 3 * 2**20 + 1) == "head 5 hello"
        until(lambda acceptor=acceptor: acceptor("status")["outcomes"] == ["None"])
    assert one("status")["stats"]["bytes_out"] > 3 * 2**20

    one("exchange", hub.peer, "late", 10, False)
    until(lambda: hub("status")["holds"])
    one("close")
    assert one("outcome").startswith("PeerUnreachable")
    hub("let_go")
    assert one("exchange", hub.peer, "x", 0) == "PeerUnreachable: the network is closed"
    until(lambda: len(outcomes := hub("status")["outcomes"]) == 2 and "torn" in outcomes[1])


def test_channels_notice_every_end(start: Start) -> None:
    hub = start("hub")
    addresses = hub.up()
    one, two = (start(name, bootstrap=addresses) for name in ("one", "two"))
    for node in (one, two):
        until(lambda node=node: "hub" in node.members)

    def ended(node: Node) -> str:
        """Why the last channel of that node ended."""
        (why,) = until(lambda: node("status")["talks"][-1][2])
        return str(why)

    def talk(node: Node, count: int) -> None:
        """Over a new channel to the hub; what is sent arrives in order, both ways."""
        talks = len(hub("status")["talks"])
        said = node("talk", hub.peer, 1, count)
        until(lambda: len(hub("status")["talks"]) > talks)
        answered = hub("talk", None, 2, count)
        until(lambda: hub("status")["talks"][-1] == [count, said, []])
        until(lambda: node("status")["talks"][-1] == [count, answered, []])

    assert one("talk", Identity.generate().peer_id, 0, 1)
    assert "not found" in ended(one) or "failed" in ended(one)
    talk(one, 200)
    one.process.kill()
    assert ended(hub) == "gone"

    talk(two, 3)
    os.kill(hub("status")["pids"][1], signal.SIGKILL)
    assert ended(hub) == ended(two) == "gone"
    until(lambda: hub("status")["stats"]["restarts/dht"] == 1)
    until(lambda: two("ask", hub.peer, "again") == two.peer[-4:] + "again")

    talk(two, 3)
    two.process.send_signal(signal.SIGSTOP)
    assert ended(hub) == "silent"
    two.process.send_signal(signal.SIGCONT)
    assert ended(two) in ("closed", "gone", "silent")

    talk(two, 3)
    two("close")
    assert ended(hub) == ended(two) == "closed"


def test_cards_are_renewed_after_a_clock_set_back(start: Start) -> None:
    hub = start("hub", clock=3600.0)
    one = start("one", clock=3600.0, bootstrap=hub.up())
    until(lambda: one.members == {"hub"} and hub.members == {"one"})
    for node in (hub, one):
        node("set_clock", 0.0)
    soon = time.time() + 60.0
    for node, other in ((hub, "one"), (one, "hub")):
        until(lambda node=node, other=other: 0 < node("status")["created"].get(other, 0) < soon)
