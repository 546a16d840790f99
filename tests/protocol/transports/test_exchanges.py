"""Exchanges over real streams (socket pairs), whole, cut, altered and held up at every point: whoever is told that it
succeeded has the right body, nobody waits for ever, and every acceptor is told once."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import tracemalloc
from collections.abc import Callable, Iterable

import pytest

from swarm_protocol.errors import LocalProtocolError, PeerUnreachable, RemoteProtocolError
from swarm_protocol.limits import MAX_BODY_BYTES, MAX_CHUNK_BYTES, MAX_HEAD_BYTES
from swarm_protocol.transports.base import Accepted, Outgoing
from swarm_protocol.transports.streams import exchanges
from swarm_protocol.transports.streams.stream import Stream
from tests.protocol.transports.exchange_world import (
    HEAD,
    TO_ACCEPTOR,
    TO_CALLER,
    Held,
    Side,
    node,
    reason,
    until_still,
)
from tests.support.clocks import HANG_S, run, until


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "MAX_CHUNK_BYTES", 64)


# --------------------------------------------------------------------- whole


@pytest.mark.parametrize(
    ("ours", "theirs", "piece"),
    [
        (0, 0, 1),
        (1, 0, 1),
        (0, 5 * MAX_CHUNK_BYTES, MAX_CHUNK_BYTES),
        (MAX_CHUNK_BYTES, MAX_CHUNK_BYTES + 1, MAX_CHUNK_BYTES),
        (3 * MAX_CHUNK_BYTES - 1, 17, 100_003),
        (7 * MAX_CHUNK_BYTES, 9 * MAX_CHUNK_BYTES + 4321, 700_001),
    ],
)
def test_bodies_of_any_size_arrive_both_ways(ours: int, theirs: int, piece: int) -> None:
    async def scenario() -> None:
        us, them = Side(ours, 1, piece), Side(theirs, 2, piece)
        async with node() as there:
            assert await there.run(us, them) == (None, None)
        assert them.got == us.body and us.got == them.body
        assert us.told == [(them.head, theirs)] and them.told == [(us.head, ours)]
        for side, size in ((us, theirs), (them, ours)):
            whole, rest = divmod(size, MAX_CHUNK_BYTES)
            assert side.taken == [MAX_CHUNK_BYTES] * whole + [rest] * (rest > 0)
            assert threading.get_ident() not in side.threads
        assert there.traffic.bytes_in == there.callers.bytes_out == ours + len(us.head) + 72
        assert there.traffic.bytes_out == there.callers.bytes_in == theirs + len(them.head) + 72
        assert not there.traffic.rejected and not there.callers.rejected and not there.said

    run(scenario())


def test_memory_does_not_grow_with_the_body() -> None:
    size = 48 * MAX_CHUNK_BYTES
    block = bytes(MAX_CHUNK_BYTES)

    async def scenario() -> None:
        us, them = Side(), Side()
        for side in (us, them):
            side.claims = size
            side.pieces = lambda: (bytearray(block) for _ in range(48))  # type: ignore[assignment]
            side.sink = lambda piece: None  # type: ignore[method-assign]
            side.check = lambda other: None  # type: ignore[method-assign]
        async with node() as there:
            tracemalloc.start()
            try:
                assert await there.run(us, them) == (None, None)
                assert tracemalloc.get_traced_memory()[1] < 16 * MAX_CHUNK_BYTES  # both ends, both ways
            finally:
                tracemalloc.stop()

    run(scenario())


def test_few_pieces_lie_between_maker_and_taker() -> None:
    go = threading.Event()

    async def scenario() -> None:
        us, them = Side(40 * MAX_CHUNK_BYTES), Side()
        take = them.sink

        def slow(piece: memoryview) -> None:
            assert go.wait(HANG_S)
            take(piece)

        them.sink = slow  # type: ignore[method-assign]
        async with node() as there:
            running = asyncio.create_task(there.run(us, them))
            await until(lambda: us.made)
            await until_still(busy=1)
            assert us.made <= 8  # two at each end, two in asyncio's buffers, the rest in the socket's
            go.set()
            assert await running == (None, None)

    run(scenario())


def test_the_loop_goes_on_while_callbacks_are_busy() -> None:
    taking, go = threading.Event(), threading.Event()

    async def scenario() -> None:
        us, them = Side(1), Side(1)

        def slow(piece: memoryview) -> None:
            taking.set()
            assert go.wait(HANG_S)
            us.got += piece

        us.sink = slow  # type: ignore[method-assign]
        async with node() as there:
            running = asyncio.create_task(there.run(us, them))
            await until(taking.is_set)
            there.exchanges.acceptors["other"] = Side(5).accept
            other = Side(5)
            await there.call(other, "another peer", "other")
            assert other.outcomes == [None]
            go.set()
            assert await running == (None, None)

    run(scenario())


# --------------------------------------------------------------------- refused


def test_refusals_come_before_anything_of_the_body() -> None:
    def early(peer: str, head: bytes, size: int) -> Accepted:
        assert (peer, head, size) == ("peer", b"head 1", 1000)
        raise RemoteProtocolError("early", "no offer yet\n")

    async def scenario() -> None:
        us, unheard = Side(1000, 1), Side(1000, 1)
        async with node() as there:
            there.exchanges.acceptors["swap"] = early
            await there.call(us)
            await there.call(unheard, method="unknown")
            await asyncio.gather(*there.tasks)
        assert reason(us.outcomes[0]) == "early" and us.made == 0
        assert "does not know the method 'unknown'" in str(unheard.outcomes[0]) and unheard.made == 0
        assert reason(unheard.outcomes[0]) == "PeerUnreachable"
        assert there.traffic.rejected == {"early": 1, "method": 1} and not there.callers.rejected
        assert there.traffic.refusals.by_source()["peer"].reasons == {"early": 1, "method": 1}

    run(scenario())


def test_a_caller_may_refuse_the_answer() -> None:
    def refuse(head: bytes, size: int) -> Callable[[memoryview], None]:
        raise RemoteProtocolError("size", f"{size} bytes?")

    async def scenario() -> None:
        us, them = Side(1000, 1), Side(5 * MAX_CHUNK_BYTES, 2)
        us.answered = refuse  # type: ignore[method-assign]
        async with node() as there:
            caller, acceptor = await there.run(us, them)
        assert (reason(caller), reason(acceptor)) == ("size", "torn")
        assert us.made == 0 and not us.got and not them.got
        assert there.callers.rejected == {"size": 1} and there.traffic.rejected == {"torn": 1}
        assert (
            there.callers.refusals.by_source()["peer"].reasons == {"size": 1} and not there.traffic.refusals.by_source()
        )

    run(scenario())


@pytest.mark.parametrize(
    ("sent", "status", "why"),
    [
        (b"\4swap" + (MAX_HEAD_BYTES + 1).to_bytes(8, "big") + bytes(32), b"\1", b"size\n"),
        (b"\4swap" + (2**63).to_bytes(8, "big") + bytes(32), b"\1", b"size\n"),
        (b"\4swap" + (4).to_bytes(8, "big") + bytes(32) + b"test", b"\1", b"hash\n"),
        (b"\4swap" + HEAD + (MAX_BODY_BYTES + 1).to_bytes(8, "big"), b"\1", b"size\n"),
        (b"\4sw\xff\xff" + HEAD + bytes(8), b"\2", b"does not know"),
        (b"\0" + HEAD + bytes(8), b"\2", b"does not know"),
    ],
)
def test_a_hostile_caller_is_refused_unread(sent: bytes, status: bytes, why: bytes) -> None:
    async def scenario() -> None:
        them = Side(1)
        async with node() as there:
            there.exchanges.acceptors["swap"] = them.accept
            reader, writer = await there.dial()
            writer.write(sent)
            answer = await asyncio.wait_for(reader.read(), 20)
            assert answer[:1] == status and why in answer
            assert not them.told and there.traffic.rejected.total() == 1

    run(scenario())


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"\0" + (MAX_HEAD_BYTES + 1).to_bytes(8, "big") + bytes(32), "size"),
        (b"\0" + (4).to_bytes(8, "big") + bytes(32) + b"test", "hash"),
        (b"\0" + HEAD + (MAX_BODY_BYTES + 1).to_bytes(8, "big"), "size"),
        (b"\1" + (10**6).to_bytes(8, "big") + bytes(32), "size"),
        (b"\1" + HEAD, "test"),
        (b"\2" + HEAD, "PeerUnreachable"),
        (b"\0" + HEAD, "torn"),
        (b"", "torn"),
    ],
)
def test_a_hostile_acceptor_is_seen_through(sent: bytes, why: str) -> None:
    async def scenario() -> None:
        us = Side(100)
        async with node() as there:
            (reader, writer), (_, hostile) = await there.pair()
            hostile.write(sent)
            hostile.close()
            with pytest.raises((RemoteProtocolError, PeerUnreachable)) as caught:
                await there.mine.call(Stream(reader, writer, there.callers, "peer"), "swap", us.outgoing, us.answered)
        assert reason(caught.value) == why and not us.told and not us.made

    run(scenario())


@pytest.mark.parametrize(
    ("method", "ours"),
    [
        ("swap", Outgoing(bytes(MAX_HEAD_BYTES + 1))),
        ("swap", Outgoing(b"", MAX_BODY_BYTES + 1)),
        ("swap", Outgoing(b"", -1)),
        ("", Outgoing(b"")),
        ("x" * 256, Outgoing(b"")),
    ],
)
def test_what_no_peer_would_take_is_not_sent(method: str, ours: Outgoing) -> None:
    with pytest.raises(LocalProtocolError):
        exchanges.check_call(method, ours)


# --------------------------------------------------------------------- streams that break


def lengths(sizes: tuple[int, int]) -> dict[str, int]:
    """Bytes that each sends in a whole exchange."""
    passed = dict.fromkeys((TO_ACCEPTOR, TO_CALLER), 0)

    async def tap(who: str, before: int, data: bytes) -> None:
        passed[who] += len(data)

    async def scenario() -> None:
        async with node() as there:
            assert await there.run(Side(sizes[0], 1, 50), Side(sizes[1], 2, 50), tap) == (None, None)

    run(scenario())
    return passed


def points(length: int) -> Iterable[int]:
    """Most of a stream's offsets: all of the first and the last, where sizes, hashes and the last word are."""
    return [i for i in range(length) if i < 70 or i >= length - 36 or i % 9 == 0]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("where", [TO_ACCEPTOR, TO_CALLER])
def test_an_early_end_is_never_a_success(where: str) -> None:
    sizes = (301, 257)
    length = lengths(sizes)[where]

    async def cut_at(offset: int) -> None:
        async def tap(who: str, before: int, data: bytes) -> bytes | None:
            return data[: offset - before] if who == where and before + len(data) > offset else None

        async with node() as there:
            caller, acceptor = await there.run(Side(sizes[0], 1, 50), Side(sizes[1], 2, 50), tap)
            cut, other = (acceptor, caller) if where == TO_ACCEPTOR else (caller, acceptor)
            assert cut is not None, offset
            assert other is not None or offset == length - 1  # all but the last word
            assert not there.said

    async def scenario() -> None:
        for offset in points(length):
            await cut_at(offset)

    run(scenario())


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("where", [TO_ACCEPTOR, TO_CALLER])
def test_an_altered_byte_is_never_a_success(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "PIECE_S", 1.0)  # lengths that grew are waited for
    monkeypatch.setattr(exchanges, "REQUEST_READ_S", 1.0)
    sizes = (301, 257)
    length = lengths(sizes)[where]

    async def alter_at(offset: int, bit: int) -> None:
        async def tap(who: str, before: int, data: bytes) -> bytes | None:
            if who == where and before <= offset < before + len(data):
                altered = bytearray(data)
                altered[offset - before] ^= 1 << bit
                return bytes(altered)
            return None

        async with node() as there:
            caller, acceptor = await there.run(Side(sizes[0], 1, 50), Side(sizes[1], 2, 50), tap)
            assert (acceptor if where == TO_ACCEPTOR else caller) is not None, (offset, bit)
            assert not there.said

    async def scenario() -> None:
        for start in range(0, length, 64):
            await asyncio.gather(*(alter_at(i, i % 8) for i in points(length) if start <= i < start + 64))

    run(scenario())


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("where", [TO_ACCEPTOR, TO_CALLER])
def test_a_peer_that_stalls_is_given_up(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the side that it leaves waiting, whose patience is shorter here; the other finds the stream broken."""
    monkeypatch.setattr(exchanges, "MAX_IN_FLIGHT", 0)
    sizes = (301, 257)
    length = lengths(sizes)[where]
    answer = 1 + 40 + len(b"head 2") + 8  # a caller's own time limit bounds how long it waits for one

    async def stall_at(offset: int) -> None:
        async def tap(who: str, before: int, data: bytes) -> bytes | None:
            return Held(data[: offset - before]) if who == where and before + len(data) > offset else None

        async with node() as there:
            sides = {TO_ACCEPTOR: there.exchanges, TO_CALLER: there.mine}
            sides[where].piece_s = exchanges.PIECE_S / 2
            caller, acceptor = await there.run(Side(sizes[0], 1, 50), Side(sizes[1], 2, 50), tap)
            ends = {TO_ACCEPTOR: (acceptor, there.traffic), TO_CALLER: (caller, there.callers)}
            error, traffic = ends.pop(where)
            assert isinstance(error, PeerUnreachable) and traffic.rejected == {"slow": 1}, offset
            ((error, traffic),) = ends.values()
            if offset == length - 1:  # the last word: all that the other waited for has come
                assert error is None and not traffic.rejected
            else:
                assert reason(error) == "torn" and traffic.rejected == {"torn": 1}, offset

    async def scenario() -> None:
        await asyncio.gather(*map(stall_at, range(0 if where == TO_ACCEPTOR else answer, length - 1, 16)))
        await stall_at(length - 1)

    run(scenario())


@pytest.mark.parametrize("who", [TO_ACCEPTOR, TO_CALLER])
def test_a_side_that_has_everything_has_succeeded(who: str) -> None:
    taking, go = threading.Event(), threading.Event()
    theirs = Side(3, 2)

    async def leave_early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ours: Side) -> None:
        """The other side of an exchange, by hand: it waits for no last word."""
        opening = b"\x04swap" if who == TO_CALLER else b"\0"
        head, size = theirs.head, len(theirs.body)
        writer.write(opening + len(head).to_bytes(8, "big") + hashlib.sha256(head).digest() + head)
        writer.write(size.to_bytes(8, "big") + theirs.body + hashlib.sha256(theirs.body).digest() + b"\6")
        await reader.readexactly((1 if who == TO_CALLER else 5) + 40 + len(ours.head) + 8 + len(ours.body) + 32)
        await asyncio.to_thread(taking.wait, 20)
        writer.close()
        await writer.wait_closed()
        go.set()

    async def scenario() -> None:
        us = Side(5, 1)
        take = us.sink

        def slow(piece: memoryview) -> None:
            taking.set()
            assert go.wait(HANG_S)
            take(piece)

        us.sink = slow  # type: ignore[method-assign]
        async with node() as there:
            if who == TO_CALLER:
                there.exchanges.acceptors["swap"] = us.accept
                near = await there.dial()
                await leave_early(*near, us)
                await asyncio.gather(*there.tasks)
            else:
                near, far = await there.pair()
                leaving = asyncio.create_task(leave_early(*far, us))
                await there.mine.call(Stream(*near, there.callers, "peer"), "swap", us.outgoing, us.answered)
                us.done(None)
                await leaving
        assert us.outcomes == [None]
        us.check(theirs)

    run(scenario())
