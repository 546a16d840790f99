"""The network in memory: who hears whom, faults that really happen, and equal seeds that give equal events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from swarm_protocol.errors import LocalProtocolError, PeerUnreachable, RemoteProtocolError
from swarm_protocol.identity import Identity
from swarm_protocol.limits import (
    CARD_RENEWAL_S,
    CARD_TTL_S,
    MAX_BATCH_BYTES,
    MAX_REQUEST_BYTES,
)
from swarm_protocol.transports.memory import (
    LinkModel,
    MemoryTransport,
    VirtualClock,
)
from swarm_protocol.transports.memory.transport import MAX_BACKLOG_S, SPREAD_S
from tests.protocol.transports.memory_world import START, UP, Heard, World, card, members
from tests.support.wire import SWARM

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


def test_those_that_left_are_others() -> None:
    world = World()
    a, b = world.join("a"), world.join("b", "a")
    world.clock.run_until(UP)
    b.close()
    assert set(a.left()) == {"b"}
    again = world.join("b", "a")
    a.close()
    assert set(again.left()) == {"a"}


# --------------------------------------------------------------------- finding each other


def test_members_find_each_other_through_one_bootstrap_soon() -> None:
    world = World()
    nodes = [world.join(f"n{i}", "n0") for i in range(8)]
    world.run(20.0)
    for node in nodes:
        assert members(node) == {f"n{i}" for i in range(8)} - {node.peer_id}


def test_who_is_met_by_its_card_is_found_without_a_bootstrap() -> None:
    world = World()
    nodes = [world.join(name) for name in ("a", "b")]
    world.run(20.0)
    assert not members(nodes[0])
    nodes[0].meet({"b": replace(card("b"), created=world.clock.now(), addresses=nodes[1].addresses)})
    world.run(20.0)
    assert [members(node) for node in nodes] == [{"b"}, {"a"}]


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
