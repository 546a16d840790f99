"""Exchanges in memory: what they cost, how they end, and equal seeds that give equal events."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any
from weakref import ref

import pytest

from swarm_protocol.errors import LocalProtocolError, PeerUnreachable, RemoteProtocolError
from swarm_protocol.limits import (
    MAX_CHUNK_BYTES,
    MAX_HEAD_BYTES,
)
from swarm_protocol.transports.base import Accepted, Outgoing
from swarm_protocol.transports.memory import (
    LinkModel,
    MemoryTransport,
)
from swarm_protocol.transports.memory.links import UPLINK_TURN_S
from swarm_protocol.transports.streams.exchanges import MAX_EXCHANGES_PER_PEER
from tests.protocol.transports.memory_world import START, UP, World


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
    assert times[0] == 1.0 and 5.5 <= times[1] <= 6.0 + 2 * UPLINK_TURN_S
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
    swap.world.run(max(UPLINK_TURN_S, 0.3))
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
    swap.world.run(1.0 + UPLINK_TURN_S)
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
