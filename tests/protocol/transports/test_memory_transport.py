"""The network in memory: who hears whom, faults that really happen, and equal seeds that give equal events."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any
from weakref import ref

import pytest

from protocol.errors import LocalProtocolError, PeerUnreachable, RemoteProtocolError
from protocol.identity import Identity
from protocol.limits import (
    CARD_RENEWAL_S,
    CARD_TTL_S,
    MAX_BATCH_BYTES,
    MAX_CHUNK_BYTES,
    MAX_HEAD_BYTES,
    MAX_REQUEST_BYTES,
)
from protocol.messages import PROTOCOL_VERSION, PeerCard
from protocol.transports.base import Accepted, Channel, Listener, Outgoing, Transport
from protocol.transports.memory import transport as memory
from protocol.transports.memory.transport import (
    MAX_BACKLOG_S,
    SPREAD_S,
    TURN_S,
    LinkModel,
    MemoryNetwork,
    MemoryTransport,
    VirtualClock,
)
from protocol.transports.streams.channels import MAX_CHANNELS_PER_PEER
from protocol.transports.streams.exchanges import MAX_EXCHANGES_PER_PEER
from tests.support.wire import SWARM

START = 1_800_000_000.0
UP = START + 30.0
"""By then everybody has found everybody."""
Heard = list[tuple[float, str, bytes]]


def card(name: str = "node", swarm: str = SWARM) -> PeerCard:
    return PeerCard(protocol=PROTOCOL_VERSION, swarm=swarm, created=0.0, name=name, roles=["trainer"])


class World:
    """A network, its clock, and what was heard on topic `t`: (seconds after START, who, what)."""

    def __init__(self, seed: int = 0, degree: int | None = None) -> None:
        self.clock = VirtualClock(START)
        self.network = MemoryNetwork(self.clock, seed, degree)
        self.heard: Heard = []

    def join(
        self, name: str, *bootstrap: str, link: LinkModel | None = None, dial_only: bool = False
    ) -> MemoryTransport:
        addresses = [f"/memory/p2p/{peer}" for peer in bootstrap]
        node = self.network.join(name, SWARM, link or LinkModel(), addresses, dial_only)
        node.announce(card(name))
        node.subscribe("t", lambda data: self.heard.append((self.clock.now() - START, name, data)))
        return node

    def run(self, seconds: float) -> None:
        self.clock.run_until(self.clock.now() + seconds)


def members(node: Transport) -> set[str]:
    return set(node.members())


# --------------------------------------------------------------------- the clock


def test_events_happen_in_order() -> None:
    clock, order = VirtualClock(5.0), []
    for t, name in ((7.0, "c"), (6.0, "a"), (6.0, "b"), (8.0, "d"), (1.0, "past"), (9.0, "later")):
        clock.call_at(t, lambda name=name: order.append((clock.now(), name)))  # type: ignore[misc]
    clock.run_until(8.0)
    assert order == [(5.0, "past"), (6.0, "a"), (6.0, "b"), (7.0, "c"), (8.0, "d")]
    assert clock.now() == 8.0
    assert not clock.step(8.5) and clock.now() == 8.0
    assert clock.step() and clock.now() == 9.0
    assert not clock.step()


# --------------------------------------------------------------------- delivery


def test_messages_reach_every_other_subscriber_once() -> None:
    world = World()
    a = world.join("a", link=LinkModel(latency_s=0.1, jitter_s=0.05))
    world.join("b", "a", link=LinkModel(latency_s=0.2))
    world.join("c", "b")
    world.network.join("deaf", SWARM, bootstrap=a.addresses)
    world.clock.run_until(UP)
    assert a.publish("t", b"hello") and a.publish("other", b"nobody")
    world.run(1.0)
    times = {who: t - (UP - START) for t, who, data in world.heard if data == b"hello"}
    assert len(world.heard) == 2 and times.keys() == {"b", "c"}
    assert 0.3 <= times["b"] <= 0.35
    assert 0.12 <= times["c"] <= 0.17


def test_bytes_and_messages_are_counted() -> None:
    world = World()
    a, b, c = world.join("a"), world.join("b", "a"), world.join("c", "a")
    world.clock.run_until(UP)
    a.publish("t", bytes(100))
    world.run(1.0)
    assert (a.stats()["bytes_out"], a.stats()["messages_out"], a.stats()["bytes_in"]) == (200, 1, 0)
    for node in (b, c):
        assert (node.stats()["bytes_in"], node.stats()["messages_in"], node.stats()["bytes_out"]) == (100, 1, 0)
    assert a.stats()["peers"] == 2


def test_a_full_uplink_refuses() -> None:
    world = World()
    a = world.join("a", link=LinkModel(latency_s=0.0, bandwidth_bytes_s=1000.0))
    world.join("b", "a", link=LinkModel(latency_s=0.0))
    world.clock.run_until(UP)
    sent = [a.publish("t", bytes(1000)) for _ in range(20)]
    world.run(60.0)
    accepted = int(MAX_BACKLOG_S) + 1
    assert sent == [True] * accepted + [False] * (20 - accepted)
    assert a.stats()["dropped"] == 20 - accepted
    assert [round(t - (UP - START), 6) for t, _, _ in world.heard] == [float(i + 1) for i in range(accepted)]


def test_an_oversized_message_is_not_sent() -> None:
    world = World()
    a = world.join("a")
    world.join("b", "a")
    world.clock.run_until(UP)
    assert not a.publish("t", bytes(MAX_BATCH_BYTES + 1))
    world.run(1.0)
    assert world.heard == [] and a.stats()["dropped"] == 1


def test_refusals_are_counted_and_bugs_raised() -> None:
    world = World()
    a, b = world.join("a"), world.join("b", "a")

    def refuse(data: bytes) -> None:
        raise RemoteProtocolError("schema")

    def crash(data: bytes) -> None:
        raise KeyError("bug")

    b.subscribe("refused", refuse)
    b.subscribe("crashed", crash)
    world.clock.run_until(UP)
    a.publish("refused", b"")
    world.run(1.0)
    assert b.stats()["rejected/schema"] == 1
    a.publish("crashed", b"")
    with pytest.raises(KeyError, match="bug"):
        world.run(1.0)


# --------------------------------------------------------------------- faults


def run_with_faults(seed: int, degree: int | None = None) -> tuple[Heard, Counter[str], list[dict[str, float]]]:
    """Twelve nodes on bad links, of which one is killed, one cut off for a while and one comes late."""
    world = World(seed, degree)
    link = LinkModel(latency_s=0.02, jitter_s=0.5, loss=0.1, duplicate=0.1)
    nodes = [world.join(f"n{i}", *([f"n{i // 2}"] if i else []), link=link, dial_only=i % 5 == 4) for i in range(12)]
    for second in range(120):
        world.clock.run_until(UP + second)
        nodes[second % 12].publish("t", b"%d" % second)
        if second == 20:
            world.network.kill("n7")
        if second == 30:
            world.network.partition(["n1", "n2", "n3"])
        if second == 60:
            world.network.heal()
        if second == 70:
            nodes[7] = world.join("n7", "n3", link=link)
    world.run(10.0)
    return world.heard, world.network.faults, [dict(node.stats()) for node in nodes]


@pytest.mark.parametrize("degree", [None, 4])
def test_equal_seeds_give_equal_events(degree: int | None) -> None:
    first = run_with_faults(1, degree)
    assert first == run_with_faults(1, degree)
    assert first[0] != run_with_faults(2, degree)[0]


@pytest.mark.parametrize("degree", [None, 4])
def test_nobody_hears_duplicates(degree: int | None) -> None:
    heard, faults, stats = run_with_faults(3, degree)
    assert faults["lost"] > 50 and faults["duplicated"] > 50
    assert sum(line["duplicates"] for line in stats) >= 50
    assert max(Counter((who, data) for _, who, data in heard).values()) == 1


def test_loss_and_duplication_have_the_rates_asked_for() -> None:
    world = World()
    a = world.join("a", link=LinkModel(loss=0.2, duplicate=0.1))
    b = world.join("b", "a", link=LinkModel(loss=0.1))
    world.clock.run_until(UP)
    for _ in range(4000):
        a.publish("t", b"")
    world.run(1.0)
    assert len(world.heard) / 4000 == pytest.approx(0.8 * 0.9, abs=0.03)
    assert b.stats()["duplicates"] / len(world.heard) == pytest.approx(0.1, abs=0.02)
    assert world.network.faults["lost"] + len(world.heard) == 4000


def test_messages_cross_no_cut() -> None:
    world = World()
    a = world.join("a", link=LinkModel(latency_s=5.0))
    world.join("b", "a")
    world.join("c", "a")
    world.clock.run_until(UP)
    a.publish("t", b"lost")
    world.network.partition(["b"])
    world.network.kill("c")
    world.run(10.0)
    assert world.heard == []
    assert world.network.faults["cut"] == 2


def test_a_killed_node_s_card_runs_out() -> None:
    world = World()
    a, b = world.join("a"), world.join("b", "a")
    world.clock.run_until(UP)
    world.network.kill("b")
    world.run(CARD_TTL_S - CARD_RENEWAL_S - 10.0)
    assert members(a) == {"b"}
    world.run(CARD_RENEWAL_S + 10.0)
    assert members(a) == set()
    assert not b.publish("t", b"ghost") and members(b) == set()
    with pytest.raises(PeerUnreachable):
        b.request("a", "m")
    with pytest.raises(PeerUnreachable):
        a.request("b", "m")


def test_a_node_that_closes_is_forgotten_at_once() -> None:
    world = World()
    a, b = world.join("a"), world.join("b", "a")
    world.clock.run_until(UP)
    b.close()
    b.close()
    assert members(a) == set()
    world.run(30.0)
    assert members(a) == set()


# --------------------------------------------------------------------- finding each other


def test_members_find_each_other_through_one_bootstrap_soon() -> None:
    world = World()
    nodes = [world.join(f"n{i}", "n0") for i in range(8)]
    world.run(20.0)
    for node in nodes:
        assert members(node) == {f"n{i}" for i in range(8)} - {node.peer_id}


def test_another_swarm_is_not_seen() -> None:
    world = World()
    a = world.join("a")
    other = world.network.join("other", "5b" * 32, bootstrap=a.addresses)
    other.announce(card(swarm="5b" * 32))
    world.run(20.0)
    assert members(a) == set() and members(other) == set()


def test_a_late_bootstrap_is_found_within_30_s() -> None:
    world = World()
    nodes = [world.join(f"n{i}", "boot") for i in range(4)]
    world.run(600.0)
    assert all(members(node) == set() for node in nodes)  # nobody blocks, nobody is there
    world.join("boot")
    world.run(30.0)
    assert all(members(node) == {"boot", "n0", "n1", "n2", "n3"} - {node.peer_id} for node in nodes)
    world.network.kill("boot")
    world.run(600.0)
    assert all(members(node) == {"n0", "n1", "n2", "n3"} - {node.peer_id} for node in nodes)  # they hold together
    boot = world.join("boot")  # knows nobody: it must be found
    world.run(30.0)
    assert members(boot) == {"n0", "n1", "n2", "n3"}


def two_halves(world: World) -> tuple[list[MemoryTransport], list[MemoryTransport]]:
    """Two swarms in one that have never heard of each other."""
    left = [world.join(f"l{i}", "l0") for i in range(4)]
    right = [world.join(f"r{i}", "r0") for i in range(4)]
    world.run(30.0)
    assert members(left[1]) == {"l0", "l2", "l3"} and members(right[1]) == {"r0", "r2", "r3"}
    left[1].publish("t", b"before")
    world.run(1.0)
    assert {who for _, who, _ in world.heard} == {"l0", "l2", "l3"}
    world.heard.clear()
    return left, right


def test_halves_merge_through_a_third_node() -> None:
    world = World()
    left, right = two_halves(world)
    world.join("bridge", "l2", "r3")
    world.run(30.0)
    assert members(left[1]) == {"bridge", "l0", "l2", "l3", "r0", "r1", "r2", "r3"}
    right[1].publish("t", b"together")
    world.run(1.0)
    assert len(world.heard) == 8
    world.network.kill("bridge")
    world.run(300.0)
    assert members(left[1]) == {"l0", "l2", "l3", "r0", "r1", "r2", "r3"}


def test_halves_meet_again_after_a_partition() -> None:
    world = World()
    nodes = {name: world.join(name, "a") for name in "abcdef"}
    world.clock.run_until(UP)
    world.network.partition("def")  # away from their bootstrap
    assert members(nodes["b"]) == set("acdef")  # until their cards run out
    nodes["a"].publish("t", b"cut")
    world.run(CARD_TTL_S + SPREAD_S)
    assert {who for _, who, _ in world.heard} == {"b", "c"}
    assert members(nodes["b"]) == {"a", "c"}
    assert members(nodes["e"]) == {"d", "f"}  # the cut-off ones go on among themselves
    world.network.heal()
    world.run(30.0)
    assert members(nodes["b"]) == set("acdef") and members(nodes["e"]) == set("abcdf")


def test_a_cut_while_meeting_prevents_it() -> None:
    world = World()
    a, b = world.join("a"), world.join("b", "a")
    world.run(SPREAD_S / 2)
    world.network.partition(["b"])
    world.run(20.0)
    assert members(a) == members(b) == set()


def test_nodes_that_only_dial_bootstrap_nobody() -> None:
    world = World()
    world.join("shy", dial_only=True)
    node = world.join("node", "shy")
    world.run(60.0)
    assert members(node) == set()


def test_halves_merge_by_remembered_addresses() -> None:
    world = World()
    left, right = two_halves(world)
    world.join("bridge", "l0", "r0")
    world.run(60.0)
    world.network.partition([node.peer_id for node in left])
    world.network.kill("bridge")
    world.run(600.0)
    assert members(left[1]) == {"l0", "l2", "l3"}
    world.network.heal()
    world.run(330.0)
    assert members(left[1]) == {"l0", "l2", "l3", "r0", "r1", "r2", "r3"}


def test_a_restarted_node_joins_by_its_cache() -> None:
    world = World()
    nodes = {name: world.join(name, "a") for name in "abc"}
    world.run(60.0)
    cache = nodes["c"].table.write_cache()
    world.network.kill("c")
    world.network.kill("a")
    again = world.join("c")
    again.table.read_cache(cache, world.clock.now())
    world.run(30.0)
    assert "b" in members(again)


def test_dialling_nodes_hear_each_other_through_listeners() -> None:
    world = World(degree=6)
    world.join("hub")
    nodes = [world.join(f"n{i}", "hub", dial_only=True) for i in range(12)]
    world.clock.run_until(UP)
    for node in nodes:
        node.publish("t", node.peer_id.encode())
    world.run(2.0)
    assert len(world.heard) == 12 * 12
    assert all(not node.addresses and len(members(node)) == 12 for node in nodes)
    world.network.kill("hub")
    world.run(CARD_TTL_S)
    assert all(members(node) == set() for node in nodes)


def test_dialling_nodes_need_a_listener_of_their_topic() -> None:
    world = World(degree=6)
    world.network.join("hub", SWARM)
    nodes = [world.join(f"n{i}", "hub", dial_only=True) for i in range(4)]
    world.clock.run_until(UP)
    assert len(members(nodes[0])) == 3
    nodes[0].publish("t", b"")
    world.run(2.0)
    assert world.heard == []


# --------------------------------------------------------------------- cards


def test_cards_are_renewed_with_the_last_word() -> None:
    world = World()
    a, b = world.join("a"), world.join("b", "a")
    world.clock.run_until(UP)
    b.announce(card("renamed"))
    world.run(CARD_RENEWAL_S + 10.0)
    seen = a.members()["b"]
    assert seen.name == "renamed" and seen.addresses == b.addresses
    assert world.clock.now() - seen.created < CARD_RENEWAL_S + 10.0


def test_an_unacceptable_card_is_refused_when_made() -> None:
    world = World()
    node = world.network.join(Identity.generate(bytes(32)), SWARM)
    with pytest.raises(LocalProtocolError):
        node.announce(card("a name with blanks"))
    node.announce(card())


def test_a_peer_is_there_once() -> None:
    world = World()
    world.join("a")
    with pytest.raises(LocalProtocolError):
        world.join("a")


# --------------------------------------------------------------------- requests


def test_requests_are_answered_and_counted() -> None:
    world = World()
    a, b = world.join("a"), world.join("b", "a")
    a.serve("double", lambda peer, payload: payload * 2 + peer.encode())
    assert b.request("a", "double", b"xy") == b"xyxyb"  # at once: the address is known
    assert (b.stats()["bytes_out"], b.stats()["bytes_in"]) == (2, 5)
    assert (a.stats()["bytes_out"], a.stats()["bytes_in"]) == (5, 2)


def test_requests_that_fail_say_why() -> None:
    world = World()
    a, b = world.join("a"), world.join("b", "a")
    world.join("shy", "a", dial_only=True).serve("long", lambda peer, payload: b"ok")
    coy = world.join("coy", "a", dial_only=True)
    world.clock.run_until(UP)

    def refuse(peer: str, payload: bytes) -> bytes:
        raise RemoteProtocolError("quota", "too often")

    a.serve("refuse", refuse)
    a.serve("long", lambda peer, payload: bytes(1000))
    assert len(b.request("a", "long", limit=1000)) == 1000
    with pytest.raises(RemoteProtocolError, match="quota: too often"):
        b.request("a", "refuse")
    assert a.stats()["rejected/quota"] == 1
    with pytest.raises(RemoteProtocolError, match="size"):
        b.request("a", "long", limit=999)
    with pytest.raises(LocalProtocolError):
        b.request("a", "long", bytes(MAX_REQUEST_BYTES + 1))
    for node, peer, method in ((b, "a", "unknown"), (b, "nobody", "long"), (b, "b", "long"), (coy, "shy", "long")):
        with pytest.raises(PeerUnreachable):
            node.request(peer, method)
    assert a.request("shy", "long") == b"ok"  # it has dialled a
    world.network.partition(["b"])
    with pytest.raises(PeerUnreachable):
        b.request("a", "long")


# --------------------------------------------------------------------- the mesh


def crowd(n: int, degree: int | None, loss: float = 0.0) -> tuple[World, Sequence[MemoryTransport]]:
    world = World(degree=degree)
    link = LinkModel(loss=loss)
    nodes = [world.join(f"n{i}", *(["n0"] if i else []), link=link) for i in range(n)]
    world.clock.run_until(UP)
    return world, nodes


def test_a_mesh_s_members_pay_for_forwarding() -> None:
    world, nodes = crowd(60, degree=6)
    for node in nodes:
        node.publish("t", bytes(100))
    world.run(5.0)
    assert len(world.heard) == 60 * 59
    copies = [node.stats()["bytes_out"] / 100 / 60 for node in nodes]
    assert sum(copies) / 60 == pytest.approx(5.0, abs=0.5)  # degree, less the one that it came from
    assert max(copies) < 15
    received = sum(node.stats()["bytes_in"] for node in nodes)
    assert received == sum(node.stats()["bytes_out"] for node in nodes)
    assert sum(node.stats()["duplicates"] for node in nodes) * 100 == received - len(world.heard) * 100


def test_a_mesh_survives_loss() -> None:
    world, nodes = crowd(60, degree=8, loss=0.1)
    nodes[0].publish("t", b"")
    world.run(5.0)
    assert len(world.heard) == 59
    assert max(t for t, _, _ in world.heard) - (UP - START) > 2.5 * 0.04  # three hops and more
    direct, others = crowd(60, degree=None, loss=0.1)
    others[0].publish("t", b"")
    direct.run(5.0)
    assert len(direct.heard) < 59


def test_a_mesh_mends_itself() -> None:
    world, nodes = crowd(30, degree=4)
    nodes[0].publish("t", b"1")
    world.run(5.0)
    for i in range(10, 25):
        world.network.kill(f"n{i}")
    world.join("new", "n0")
    world.run(10.0)
    world.heard.clear()
    nodes[1].publish("t", b"2")
    world.run(5.0)
    assert {who for _, who, _ in world.heard} == {f"n{i}" for i in range(30) if not 10 <= i < 25 and i != 1} | {"new"}


def test_nonlisteners_can_publish_into_a_mesh() -> None:
    world, _ = crowd(20, degree=4)
    outsider = world.network.join("outsider", SWARM, bootstrap=["/memory/p2p/n0"], dial_only=True)
    world.run(30.0)
    outsider.publish("t", b"")
    world.run(5.0)
    assert len(world.heard) == 20


# --------------------------------------------------------------------- exchanges


class Trade:
    """Exchanges of `swap` between `a`, who calls, and `b`: what was sent, taken and told, and when."""

    def __init__(self, world: World, a: MemoryTransport, b: MemoryTransport, ours: int = 0, theirs: int = 0) -> None:
        self.world, self.a, self.b = world, a, b
        self.bodies = {"a": bytes(i % 251 for i in range(ours)), "b": bytes(i % 241 for i in range(theirs))}
        self.got = {"a": bytearray(), "b": bytearray()}
        self.events: list[tuple[float, str]] = []
        self.outcomes: list[Exception | None] = []
        """Told to b's acceptor."""
        b.accept("swap", self.accept)

    def note(self, event: str) -> None:
        self.events.append((round(self.world.clock.now() - UP, 6), event))

    def outgoing(self, who: str) -> Outgoing:
        body = self.bodies[who]
        pieces = (body[i : i + 300_000] for i in range(0, len(body), 300_000))
        return Outgoing(f"from {who}".encode(), len(body), lambda: pieces)

    def sink(self, who: str) -> Callable[[memoryview], None]:
        def take(piece: memoryview) -> None:
            self.note(f"{who} takes {len(piece)}")
            self.got[who] += piece

        return take

    def accept(self, peer: str, head: bytes, size: int) -> Accepted:
        self.note(f"b is asked by {peer}: {head.decode()}, {size}")
        return Accepted(self.outgoing("b"), self.sink("b"), self.outcomes.append)

    def answered(self, head: bytes, size: int) -> Callable[[memoryview], None]:
        self.note(f"a is answered: {head.decode()}, {size}")
        return self.sink("a")

    def start(self, timeout: float = 100.0) -> Future[None]:
        future = self.a.exchange("b", "swap", self.outgoing("a"), self.answered, timeout)
        future.add_done_callback(lambda future: self.note("done"))
        return future

    def whole(self) -> bool:
        return self.got == {"a": self.bodies["b"], "b": self.bodies["a"]}


def trade(ours: int = 0, theirs: int = 0, a: LinkModel | None = None, b: LinkModel | None = None) -> Trade:
    world = World()
    trade = Trade(world, world.join("a", link=a), world.join("b", "a", link=b), ours, theirs)
    world.clock.run_until(UP)
    return trade


def test_an_exchange_takes_latencies_and_slower_body() -> None:
    size = 2_500_000
    swap = trade(size, 100, LinkModel(0.1, bandwidth_bytes_s=1e6), LinkModel(0.2, bandwidth_bytes_s=1e5))
    before = dict(swap.a.stats()), dict(swap.b.stats())
    future = swap.start()
    swap.world.run(3.39)
    assert not future.done() and not swap.outcomes and not swap.got["b"]
    swap.world.run(0.02)
    assert future.done() and future.exception() is None and swap.outcomes == [None] and swap.whole()
    assert swap.events == [
        (0.3, "b is asked by a: from a, 2500000"),
        (0.6, "a is answered: from b, 100"),
        *[(3.4, f"b takes {n}") for n in (MAX_CHUNK_BYTES, MAX_CHUNK_BYTES, size - 2 * MAX_CHUNK_BYTES)],
        (3.4, "a takes 100"),
        (3.4, "done"),
    ]
    for node, old, sent, taken in ((swap.a, before[0], size, 100), (swap.b, before[1], 100, size)):
        assert node.stats()["bytes_out"] - old["bytes_out"] == sent + len("from a")
        assert node.stats()["bytes_in"] - old["bytes_in"] == taken + len("from b")


def test_both_bodies_travel_at_once() -> None:
    link = LinkModel(0.0, bandwidth_bytes_s=1000.0)
    swap = trade(4000, 4000, link, link)
    future = swap.start()
    swap.world.run(4.001)
    assert future.done() and swap.whole()
    empty = trade()
    future = empty.start()
    empty.world.run(1.0)
    assert future.done() and future.exception() is None and empty.outcomes == [None]


def test_a_body_shares_its_uplink() -> None:
    swap = trade(10_000, 0, LinkModel(0.0, bandwidth_bytes_s=1000.0), LinkModel(0.0))
    world = swap.world
    swap.a.publish("t", bytes(1000))
    first, second = swap.start(), swap.start()
    world.run(5.0)
    swap.a.publish("t", bytes(500))  # waits a turn of each at most
    world.run(25.0)
    assert first.done() and second.done() and swap.got["b"] == 2 * swap.bodies["a"]
    times = [round(t - (UP - START), 3) for t, _, _ in world.heard]
    assert times[0] == 1.0 and 5.5 <= times[1] <= 6.0 + 2 * TURN_S
    done = sorted(t for t, event in swap.events if event == "done")
    assert 21.0 <= done[0] <= done[1] == pytest.approx(21.5)


def test_exchanges_are_refused_and_counted() -> None:
    swap = trade(10, 10)

    def refuse(*arguments: object) -> Any:
        raise RemoteProtocolError("early", "no offer yet")

    unknown = swap.a.exchange("b", "other", swap.outgoing("a"), swap.answered, 10.0)
    declined = swap.a.exchange("b", "swap", swap.outgoing("a"), refuse, 10.0)
    swap.world.run(1.0)
    assert isinstance(unknown.exception(), PeerUnreachable)
    assert reason(declined.exception()) == "early" and [reason(error) for error in swap.outcomes] == ["torn"]
    swap.b.accept("swap", refuse)
    refused = swap.start()
    swap.world.run(1.0)
    assert reason(refused.exception()) == "early" and not swap.got["a"] and not swap.got["b"]
    assert swap.a.rejected == {"early": 1} and swap.b.rejected == {"early": 1, "method": 1}


@pytest.mark.parametrize("who", ["a", "b"])
def test_a_sink_may_end_an_exchange(who: str) -> None:
    swap = trade(10, 10)

    def refuse(piece: memoryview) -> None:
        raise RemoteProtocolError("nan")

    sink = swap.sink
    swap.sink = lambda name: refuse if name == who else sink(name)  # type: ignore[method-assign]
    future = swap.start()
    swap.world.run(1.0)
    reasons = {"a": reason(future.exception()), "b": reason(swap.outcomes[0])}
    assert reasons.pop(who) == "nan" and list(reasons.values()) == ["torn"] and len(swap.outcomes) == 1
    assert (swap.a if who == "a" else swap.b).rejected == {"nan": 1}


@pytest.mark.parametrize("when", [0.1, 0.3, 1.0, 9.8])
@pytest.mark.parametrize("what", ["kill a", "kill b", "close a", "close b", "partition", "rejoin"])
def test_exchanges_survive_neither_peers_nor_cuts(what: str, when: float) -> None:
    slow = LinkModel(0.1, bandwidth_bytes_s=100.0)
    swap = trade(930, 930, slow, slow)  # 0.4 s until they leave, 9.3 s to leave, 0.2 s to arrive
    future = swap.start()
    network = swap.world.network
    swap.world.run(when)
    assert not future.done()
    act, _, who = what.partition(" ")
    if act == "partition":
        network.partition(["a"])
    elif act == "close":
        {"a": swap.a, "b": swap.b}[who].close()
    else:
        network.kill(who or "b")
    if act == "rejoin":
        swap.world.join("b", "a").accept("swap", swap.accept)  # another one by that name
    swap.world.run(max(TURN_S, 0.3))
    assert isinstance(future.exception(0), PeerUnreachable) and network.faults["cut"] == 1
    assert len(swap.outcomes) == (when > 0.2) and all(isinstance(error, PeerUnreachable) for error in swap.outcomes)
    assert not swap.got["a"] and not swap.got["b"]
    swap.world.run(200.0)
    assert len(swap.outcomes) <= 1 and not swap.got["a"] and not swap.got["b"]


def test_a_long_exchange_is_given_up() -> None:
    swap = trade(10_000, 0, LinkModel(0.0, bandwidth_bytes_s=100.0), LinkModel(0.0))
    future = swap.start(timeout=5.0)
    swap.world.run(4.99)
    assert not future.done()
    swap.world.run(0.02)
    assert isinstance(future.exception(0), PeerUnreachable) and "5 s" in str(future.exception())
    assert [type(error) for error in swap.outcomes] == [PeerUnreachable]
    swap.a.publish("t", bytes(100))
    swap.world.run(1.0 + TURN_S)
    assert len(swap.world.heard) == 1


class Body(bytearray):
    """One that weak references can be made to."""


@pytest.mark.parametrize("end", ["whole", "refused", "torn", "cut"])
def test_bodies_are_let_go_of_in_time(end: str) -> None:
    """Long before its time is up, and without Python's collector."""
    swap = trade()
    network, held = swap.world.network, []

    def outgoing() -> Outgoing:
        body = Body(1000)
        held.append(ref(body))
        return Outgoing(b"", 1000, lambda: [body])

    def sink() -> Callable[[memoryview], None]:
        got = Body()
        held.append(ref(got))

        def take(piece: memoryview) -> None:
            if end == "torn":
                raise RemoteProtocolError("values", "none")
            got.extend(piece)

        return take

    def accept(peer: str, head: bytes, size: int) -> Accepted:
        if end == "refused":
            raise RemoteProtocolError("early")
        return Accepted(outgoing(), sink(), swap.outcomes.append)

    swap.b.accept("swap", accept)
    gc.disable()
    try:
        future = swap.a.exchange("b", "swap", outgoing(), lambda head, size: sink(), 1000.0)
        if end == "cut":
            swap.world.clock.run_until(UP + 0.1)
            network.kill("b")
        swap.world.clock.run_until(UP + 10.0)
        assert (future.exception(0) is None) == (end == "whole")
        assert len(held) == (1 if end == "refused" else 4)
        assert not any(reference() for reference in held)
    finally:
        gc.enable()


def test_exchanges_reach_no_further_than_requests() -> None:
    swap = trade(10, 10)
    for peer in ("nobody", "a"):
        assert isinstance(
            swap.a.exchange(peer, "swap", swap.outgoing("a"), swap.answered, 1.0).exception(0), PeerUnreachable
        )
    swap.world.network.partition(["a"])
    assert isinstance(swap.start().exception(0), PeerUnreachable)
    swap.world.network.heal()
    swap.world.run(60.0)
    future = swap.start()
    swap.world.run(1.0)
    assert future.exception(0) is None and swap.whole()
    swap.world.network.kill("a")
    assert isinstance(swap.start().exception(0), PeerUnreachable)
    with pytest.raises(LocalProtocolError):
        swap.b.exchange("a", "swap", Outgoing(bytes(MAX_HEAD_BYTES + 1)), swap.answered, 1.0)


def test_a_peer_has_few_exchanges_at_once() -> None:
    swap = trade(100, 0, LinkModel(0.0, bandwidth_bytes_s=100.0), LinkModel(0.0))
    futures = []
    for _ in range(MAX_EXCHANGES_PER_PEER + 1):
        futures.append(swap.a.exchange("b", "swap", Outgoing(b"", 100, lambda: [bytes(100)]), swap.answered, 50.0))
    swap.world.run(20.0)
    assert [str(future.exception(0)) for future in futures] == ["None"] * MAX_EXCHANGES_PER_PEER + ["busy"]
    assert swap.b.rejected == {"busy": 1} and len(swap.outcomes) == MAX_EXCHANGES_PER_PEER
    again = swap.start()
    swap.world.run(20.0)
    assert again.exception(0) is None


def test_a_bug_in_an_exchange_is_not_hidden() -> None:
    swap = trade(10, 10)
    swap.a.exchange("b", "swap", Outgoing(b"", 11, lambda: [bytes(10)]), swap.answered, 10.0)
    with pytest.raises(LocalProtocolError, match="10 bytes together, where 11 were promised"):
        swap.world.run(1.0)


def exchanges_with_faults(seed: int) -> list[object]:
    """Six nodes on jittery links that exchange in a ring; one is killed and one cut off for a while."""
    world = World(seed)
    link = LinkModel(0.02, jitter_s=0.3, bandwidth_bytes_s=2000.0)
    nodes = [world.join(f"n{i}", "n0", link=link) for i in range(6)]
    log: list[object] = []
    for node in nodes:
        node.accept(
            "swap",
            lambda peer, head, size, node=node: Accepted(  # type: ignore[misc]
                Outgoing(b"", 700, lambda: [bytes(700)]),
                lambda piece: log.append((world.clock.now(), node.peer_id, len(piece))),
                lambda error: log.append((world.clock.now(), node.peer_id, repr(error))),
            ),
        )
    futures = []
    for second in range(40):
        world.clock.run_until(UP + second)
        ours = Outgoing(b"", 1500, lambda: [bytes(1500)])
        for i in (second % 6, (second + 3) % 6):
            futures.append(
                nodes[i].exchange(f"n{(i + 1) % 6}", "swap", ours, lambda head, size: lambda piece: None, 5.0)
            )
        if second == 10:
            world.clock.run_until(UP + second + 0.7)
            world.network.kill("n2")
        if second == 20:
            world.clock.run_until(UP + second + 0.7)
            world.network.partition(["n4"])
        if second == 30:
            world.network.heal()
    world.run(20.0)
    assert world.network.faults["cut"] > 0 and all(future.done() for future in futures)
    assert sum(future.exception() is None for future in futures) > 30
    return [*log, *(repr(future.exception()) for future in futures), *(dict(node.stats()) for node in nodes)]


def test_equal_seeds_give_equal_exchanges() -> None:
    assert exchanges_with_faults(1) == exchanges_with_faults(1) != exchanges_with_faults(2)


def reason(error: BaseException | None) -> str:
    return error.reason if isinstance(error, RemoteProtocolError) else type(error).__name__


# --------------------------------------------------------------------- channels


class Talk:
    """Channels of `talk` from `a` to `b`: what each end was told, and when."""

    def __init__(self, a: LinkModel | None = None, b: LinkModel | None = None) -> None:
        self.world = World()
        self.a, self.b = self.world.join("a", link=a), self.world.join("b", "a", link=b)
        self.events: list[tuple[float, str, object]] = []
        self.ends: dict[str, Channel] = {}
        self.b.listen("talk", lambda channel: self.opened("b", channel))
        self.world.clock.run_until(UP)

    def connect(self, peer: str = "b", method: str = "talk") -> Channel:
        return self.a.connect(peer, method, lambda channel: self.opened("a", channel))

    def opened(self, who: str, channel: Channel) -> Listener:
        self.ends[who] = channel
        return Listener(
            lambda head, size: self.note(who, (head, size)),
            lambda head, body: self.note(who, bytes(body)),
            lambda why: self.note(who, why),
        )

    def note(self, who: str, what: object) -> None:
        self.events.append((round(self.world.clock.now() - UP, 6), who, what))

    def told(self) -> list[tuple[float, str, object]]:
        """Since this was last asked."""
        events, self.events = self.events, []
        return events


def test_channel_messages_take_turns_on_the_uplink() -> None:
    talk = Talk(LinkModel(0.1, bandwidth_bytes_s=1000.0), LinkModel(0.2))
    before = talk.a.stats()["bytes_out"]
    channel = talk.connect()
    assert channel.peer == "b"
    body = bytearray(b"12")
    assert channel.send(b"x" * 400, memoryview(body)[:1], memoryview(body)[1:]) and channel.send(b"y" * 98)
    talk.world.run(0.29)
    assert not talk.ends.keys() - {"a"}
    talk.world.run(0.02)
    assert talk.ends["b"].peer == "a" and talk.ends["b"].send(b"z", b"back")
    talk.world.run(5.0)
    assert talk.told() == [
        (0.61, "a", (b"z", 4)),  # it began when it was sent, not when a was told that the channel is open
        (0.61, "a", b"back"),
        (1.302, "b", (b"x" * 400, 2)),
        (1.302, "b", b"12"),
        (1.4, "b", (b"y" * 98, 0)),
        (1.4, "b", b""),
    ]
    assert talk.a.stats()["bytes_out"] - before == 500

    talk.a.publish("t", bytes(1000))
    assert channel.send(b"", bytes(1000)) and channel.send(b"", b"")
    talk.world.run(0.5)
    channel.close()
    talk.world.run(5.0)
    assert [(who, what) for _, who, what in talk.told()] == [
        ("a", "closed"),
        ("b", "closed"),
    ]  # the rest is lost
    assert not channel.send(b"") and not talk.ends["b"].send(b"")


def test_nothing_overtakes_and_a_goodbye_comes_last() -> None:
    talk = Talk(LinkModel(0.0, jitter_s=5.0), LinkModel(0.0))
    channel = talk.connect()
    talk.world.run(20.0)
    for i in range(50):
        channel.send(b"%d" % i)
    talk.world.run(0.001)
    channel.close()
    talk.world.run(20.0)
    assert [what[0] for _, _, what in talk.told() if isinstance(what, tuple)] == [b"%d" % i for i in range(50)]


@pytest.mark.parametrize("what", ["kill", "partition", "close", "hang up"])
@pytest.mark.parametrize("who", ["a", "b"])
def test_ends_find_out_that_a_channel_is_over(what: str, who: str) -> None:
    talk = Talk()
    talk.connect()
    talk.world.run(1.0)
    survivor = "ab".replace(who, "")
    if what == "kill":
        talk.ends[who].send(b"in flight")
        talk.world.network.kill(who)
        expected = {"a": (5.0, "silent"), "b": (5.0, "silent")}
    elif what == "partition":
        talk.ends[who].send(b"in flight")
        talk.world.network.partition([who])
        talk.world.network.heal()
        expected = {"a": (5.0, "silent"), "b": (5.0, "silent")}
    else:
        (getattr(talk, who) if what == "close" else talk.ends[who]).close()
        assert not talk.told()  # never from within a call
        expected = {who: (1.0, "closed"), survivor: (1.04, "closed")}
    talk.world.run(10.0)
    assert {end: (at, why) for at, end, why in talk.told()} == expected
    assert talk.world.network.faults["cut"] == (what in ("kill", "partition"))
    assert not talk.ends["a"].send(b"") and not talk.ends["b"].send(b"")
    assert not talk.a._channels and not talk.b._channels
    if what == "hang up" or what == "partition":
        talk.world.run(30.0)
        channel = talk.connect()
        channel.send(b"again")
        talk.world.run(1.0)
        assert [event[1:] for event in talk.told()] == [("b", (b"again", 0)), ("b", b"")]


@pytest.mark.parametrize("what", ["kill", "partition", "close", "blip"])
def test_a_peer_may_vanish_during_opening(what: str) -> None:
    for delay in (0.01, 0.05):
        talk = Talk()
        talk.connect()
        talk.world.run(delay)
        if what == "kill":
            talk.world.network.kill("b")
        elif what == "close":
            talk.b.close()
        else:
            talk.world.network.partition(["b"])
            if what == "blip":
                talk.world.network.heal()
        talk.world.run(20.0)
        ends = [(who, why) for _, who, why in talk.told()]
        assert sorted(who for who, _ in ends) == sorted(talk.ends) and not talk.a._channels and not talk.b._channels


def test_channels_are_refused_and_counted() -> None:
    talk = Talk()

    def refuse(channel: Channel) -> Listener:
        raise RemoteProtocolError("crew", "not one of us")

    talk.b.listen("closed", refuse)
    for peer, method in (("b", "closed"), ("b", "unknown"), ("c", "talk"), ("a", "talk")):
        channel = talk.connect(peer, method)
        channel.send(b"unheard")
        talk.world.run(1.0)
        assert not channel.send(b"late")
    assert [why for _, _, why in talk.told()] == [
        "refused: crew: not one of us",
        "refused: does not know the method 'unknown'",
        "c cannot be reached",
        "a cannot be reached",
    ]
    for _ in range(MAX_CHANNELS_PER_PEER):
        last = talk.connect()
    talk.connect()
    talk.world.run(1.0)
    assert [why for _, _, why in talk.told()] == ["refused: busy"]
    last.close()
    talk.world.run(1.0)
    talk.told()
    talk.connect()
    talk.world.run(1.0)
    assert not talk.told()
    assert talk.b.rejected == {"crew": 1, "method": 1, "busy": 1}


def test_queues_of_channels_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(head: bytes, size: int) -> None:
        raise RemoteProtocolError("shape", f"{size} bytes")

    talk = Talk(LinkModel(0.0, bandwidth_bytes_s=1000.0))
    heard: list[object] = []
    talk.b.listen("judged", lambda channel: Listener(judge, lambda head, body: heard.append(body), heard.append))
    channel = talk.connect(method="judged")
    channel.send(b"1", b"x")
    channel.send(b"2", b"x")
    talk.world.run(1.0)
    assert heard == ["shape: 1 bytes"] and [why for _, _, why in talk.told()] == ["closed"]
    assert talk.b.rejected == {"shape": 1}

    monkeypatch.setattr(memory, "MAX_QUEUED_BYTES", 5000)
    channel = talk.connect()
    assert [channel.send(b"", bytes(2000)) for _ in range(4)] == [True, True, False, False]
    talk.world.run(1.0)
    assert [why for _, _, why in talk.told()] == ["slow"] and talk.a.rejected == {"slow": 1}
    with pytest.raises(LocalProtocolError, match="cannot be sent"):
        channel.send(bytes(MAX_HEAD_BYTES + 1))
    with pytest.raises(LocalProtocolError, match="cannot be a method"):
        talk.connect(method="")


def test_a_bug_in_a_listener_is_not_hidden() -> None:
    talk = Talk()
    talk.b.listen("buggy", lambda channel: Listener(lambda h, n: None, lambda h, b: [][1], lambda why: None))
    talk.connect(method="buggy").send(b"")
    with pytest.raises(IndexError):
        talk.world.run(1.0)


def test_equal_seeds_give_equal_channels() -> None:
    def talked(seed: int) -> list[object]:
        world, events = World(seed), []
        link = LinkModel(0.05, jitter_s=0.5, bandwidth_bytes_s=1e5)
        nodes = [world.join(f"n{i}", *(["n0"] if i else []), link=link) for i in range(4)]

        def opened(channel: Channel) -> Listener:
            def note(what: object) -> None:
                events.append((world.clock.now(), channel.peer, what))

            return Listener(lambda head, size: None, lambda head, body: note(head), note)

        for node in nodes:
            node.listen("talk", opened)
        world.clock.run_until(UP)
        channels = [node.connect(f"n{(i + 1) % 4}", "talk", opened) for i, node in enumerate(nodes)]
        for turn in range(20):
            for channel in channels:
                channel.send(b"%d" % turn, bytes(10_000))
            if turn == 10:
                world.network.kill("n2")
            world.run(0.5)
        world.run(20.0)
        assert world.network.faults["cut"] and sum(what == "silent" for _, _, what in events) == 4
        return events

    assert talked(1) == talked(1) != talked(2)
