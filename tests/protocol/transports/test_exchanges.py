"""Exchanges over real streams (socket pairs), whole, cut, altered and held up at every point: whoever is told that it
succeeded has the right body, nobody waits for ever, and every acceptor is told once."""

from __future__ import annotations

import asyncio
import hashlib
import random
import socket
import threading
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from weakref import ref

import pytest

from protocol.errors import LocalProtocolError, PeerUnreachable, RemoteProtocolError
from protocol.limits import MAX_BODY_BYTES, MAX_CHUNK_BYTES, MAX_HEAD_BYTES
from protocol.transports.base import Accepted, Outgoing
from protocol.transports.streams import exchanges
from protocol.transports.streams.exchanges import MAX_EXCHANGES, MAX_EXCHANGES_PER_PEER, Exchanges
from protocol.transports.streams.requests import Traffic
from tests.support.clocks import HANG_S, Loop, run, settle, until

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Tap = Callable[[str, int, bytes], Awaitable[bytes | None]]
"""(who sends, bytes before, bytes) -> what goes on; None = both ends see the stream end."""
TO_ACCEPTOR, TO_CALLER = "caller", "acceptor"


class Held(bytes):
    """What goes on, and nothing after it, although the stream stays open."""


def body(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


class Side:
    """What one peer sends and gets."""

    def __init__(self, size: int = 0, seed: int = 0, piece: int = MAX_CHUNK_BYTES) -> None:
        self.body = body(size, seed)
        self.piece = piece
        self.head = b"head %d" % seed
        self.claims = size
        self.got = bytearray()
        self.taken: list[int] = []
        """Sizes of the pieces that its sink was given."""
        self.made = 0
        self.told: list[tuple[bytes, int]] = []
        """Head and size of the other."""
        self.threads: set[int] = set()
        self.outcomes: list[Exception | None] = []

    def pieces(self) -> Iterator[memoryview]:
        for start in range(0, len(self.body), self.piece):
            self.threads.add(threading.get_ident())
            self.made += 1
            yield memoryview(self.body)[start : start + self.piece]

    @property
    def outgoing(self) -> Outgoing:
        return Outgoing(self.head, self.claims, self.pieces)

    def sink(self, piece: memoryview) -> None:
        self.threads.add(threading.get_ident())
        self.taken.append(len(piece))
        self.got += piece

    def answered(self, head: bytes, size: int) -> Callable[[memoryview], None]:
        self.threads.add(threading.get_ident())
        self.told.append((head, size))
        return self.sink

    def accept(self, peer: str, head: bytes, size: int) -> Accepted:
        self.answered(head, size)
        return Accepted(self.outgoing, self.sink, self.done)

    def done(self, error: Exception | None) -> None:
        self.threads.add(threading.get_ident())
        self.outcomes.append(error)

    def check(self, other: Side) -> None:
        """Whoever was told of success has everything."""
        assert len(self.outcomes) <= 1
        if self.outcomes == [None]:
            assert self.got == other.body and self.told == [(other.head, len(other.body))]


class Node:
    """Accepts, over streams that can be tapped; `said` = what it reported."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.traffic, self.callers = Traffic(), Traffic()
        self.exchanges = Exchanges(self.traffic, self.said.append)
        self.mine = Exchanges(self.callers, self.said.append)
        """The callers'."""
        self.tasks: list[asyncio.Task[None]] = []
        self.pumps: list[asyncio.Task[None]] = []
        self.writers: list[asyncio.StreamWriter] = []

    async def dial(self, peer: str = "peer", tap: Tap | None = None) -> Streams:
        """A stream to here."""
        near, far = await self.pair() if tap is None else await self._tapped(tap)
        self.tasks.append(asyncio.create_task(self.exchanges.serve(peer, *far)))
        return near

    async def pair(self) -> tuple[Streams, Streams]:
        one, other = [await asyncio.open_connection(sock=end) for end in socket.socketpair()]
        self.writers += [one[1], other[1]]
        return one, other

    async def _tapped(self, tap: Tap) -> tuple[Streams, Streams]:
        (caller, ours), (theirs, acceptor) = await self.pair(), await self.pair()

        async def pump(who: str, source: Streams, target: Streams) -> None:
            passed = 0
            try:
                while data := await source[0].read(2**16):
                    changed = await tap(who, passed, data)
                    target[1].write(data if changed is None else changed)
                    passed += len(data)
                    await target[1].drain()
                    if isinstance(changed, Held):
                        await asyncio.Event().wait()
                    if changed is not None and len(changed) < len(data):
                        break
            except OSError:
                pass
            for _, writer in (ours, theirs):
                writer.close()

        self.pumps += [
            asyncio.create_task(pump(TO_ACCEPTOR, ours, theirs)),
            asyncio.create_task(pump(TO_CALLER, theirs, ours)),
        ]
        return caller, acceptor

    async def call(self, us: Side, peer: str = "peer", method: str = "swap", tap: Tap | None = None) -> None:
        """Exchange, and note how it went."""
        reader, writer = await self.dial(peer, tap)
        try:
            await self.mine.call(reader, writer, method, us.outgoing, us.answered, peer)
        except Exception as error:
            us.outcomes.append(error)
        else:
            us.outcomes.append(None)

    async def run(self, us: Side, them: Side, tap: Tap | None = None) -> tuple[Exception | None, Exception | None]:
        """One exchange: how it ended for the caller and for the acceptor."""
        self.exchanges.acceptors["swap"] = them.accept
        async with asyncio.timeout(HANG_S):
            await self.call(us, tap=tap)
            await asyncio.gather(*self.tasks)
        us.check(them)
        them.check(us)
        assert len(them.outcomes) == len(them.told)
        return us.outcomes[0], them.outcomes[0] if them.outcomes else PeerUnreachable("was not asked")


@asynccontextmanager
async def node() -> AsyncIterator[Node]:
    node = Node()
    try:
        yield node
    finally:
        for pump in node.pumps:
            pump.cancel()
        for writer in node.writers:
            writer.transport.abort()
        await asyncio.wait_for(asyncio.gather(*node.tasks), HANG_S)
        await asyncio.gather(*node.pumps, return_exceptions=True)
        await asyncio.sleep(0)  # for sockets to be closed
        assert not node.exchanges.cancel()


async def until_still(busy: int) -> None:
    """Until so many threads work, and nothing else can happen before one of them is done."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Loop)
    turns = 0
    async with asyncio.timeout(HANG_S):
        while turns < 100:
            still = loop.clock.working == busy
            turns = turns + 1 if still else 0
            await asyncio.sleep(0 if still else 0.01)


def reason(error: Exception | None) -> str:
    return error.reason if isinstance(error, RemoteProtocolError) else type(error).__name__


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
        assert there.traffic.refusals.by_peer() == {"peer": {"early": 1, "method": 1}}

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
        assert there.callers.refusals.by_peer() == {"peer": {"size": 1}} and not there.traffic.refusals.by_peer()

    run(scenario())


HEAD = (
    (4).to_bytes(8, "big") + bytes.fromhex("9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08") + b"test"
)


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
                await there.mine.call(reader, writer, "swap", us.outgoing, us.answered, "peer")
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
    monkeypatch.setattr(exchanges, "REQUEST_S", 1.0)
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
                await there.mine.call(*near, "swap", us.outgoing, us.answered, "peer")
                us.done(None)
                await leaving
        assert us.outcomes == [None]
        us.check(theirs)

    run(scenario())


# --------------------------------------------------------------------- faults of peers and of ours


@pytest.mark.parametrize("who", [TO_ACCEPTOR, TO_CALLER])
def test_a_sink_may_end_the_exchange(who: str) -> None:
    async def scenario() -> None:
        us, them = Side(5 * MAX_CHUNK_BYTES, 1), Side(4 * MAX_CHUNK_BYTES, 2)

        def refuse(piece: memoryview) -> None:
            raise RemoteProtocolError("nan", "not a number")

        (us if who == TO_CALLER else them).sink = refuse  # type: ignore[method-assign]
        async with node() as there:
            caller, acceptor = await there.run(us, them)
            ends = {TO_CALLER: (caller, there.callers), TO_ACCEPTOR: (acceptor, there.traffic)}
            error, traffic = ends.pop(who)
            assert reason(error) == "nan" and traffic.rejected == {"nan": 1}
            ((error, traffic),) = ends.values()
            assert reason(error) == "torn" and traffic.rejected == {"torn": 1}
            assert not there.said

    run(scenario())


class Body(bytearray):
    """One that weak references can be made to."""


def test_a_kept_error_keeps_no_buffers() -> None:
    held = []

    def fail() -> None:
        buffer = Body()
        held.append(ref(buffer))
        raise OSError("torn")

    def fail_again() -> None:
        buffer = Body()
        held.append(ref(buffer))
        try:
            fail()
        except OSError as error:
            raise RemoteProtocolError("torn") from error

    try:
        fail_again()
    except RemoteProtocolError as error:
        kept = error
    assert all(reference() is not None for reference in held)
    exchanges.let_go(kept)
    assert len(held) == 2 and all(reference() is None for reference in held)


@pytest.mark.parametrize("who", [TO_ACCEPTOR, TO_CALLER])
@pytest.mark.parametrize(
    ("claims", "size", "piece"),
    [
        (1001, 1000, 100),
        (999, 1000, 100),
        (1000, 0, 1),
        (0, 1, 1),
        (2 * MAX_CHUNK_BYTES, 2 * MAX_CHUNK_BYTES, MAX_CHUNK_BYTES + 1),
    ],
)
def test_pieces_must_add_up(who: str, claims: int, size: int, piece: int) -> None:
    async def scenario() -> None:
        us, them = Side(1, 1), Side(1, 2)
        wrong, right = (us, them) if who == TO_CALLER else (them, us)
        wrong.body, wrong.claims, wrong.piece = body(size), claims, piece
        async with node() as there:
            ends = dict(zip((TO_CALLER, TO_ACCEPTOR), await there.run(us, them), strict=True))
            assert isinstance(ends.pop(who), LocalProtocolError)
            assert reason(ends.popitem()[1]) == "torn"
            assert (there.callers if who == TO_CALLER else there.traffic).rejected == {"handler": 1}
            assert len(there.said) == 1 and "'swap' failed" in there.said[0]

    run(scenario())


@pytest.mark.parametrize(
    ("who", "callback"),
    [(who, callback) for who in (TO_ACCEPTOR, TO_CALLER) for callback in ("answered", "pieces", "sink")]
    + [(TO_ACCEPTOR, "done")],
)
def test_faults_in_callbacks_are_reported_and_survived(who: str, callback: str) -> None:
    async def scenario() -> None:
        us, them = Side(MAX_CHUNK_BYTES, 1), Side(MAX_CHUNK_BYTES, 2)
        side = us if who == TO_CALLER else them

        def fail(*arguments: object) -> None:
            if callback == "done":
                side.outcomes.append(arguments[0])  # type: ignore[arg-type]
            raise OSError("disk full")

        setattr(side, callback, fail)
        async with node() as there:
            caller, acceptor = await there.run(us, them)
            assert (there.callers if who == TO_CALLER else there.traffic).rejected == {"handler": 1}
            assert there.said == ["exchanging 'swap' failed: OSError('disk full')"]
            if callback == "done":
                assert caller is acceptor is None
            elif callback == "answered" and who == TO_ACCEPTOR:
                assert isinstance(caller, PeerUnreachable) and "failed" in str(caller)
            else:
                assert isinstance(caller if who == TO_CALLER else acceptor, LocalProtocolError)
            good, fine = Side(10, 3), Side(20, 4)
            assert await there.run(good, fine) == (None, None)

    run(scenario())


def test_an_acceptor_s_long_head_is_refused() -> None:
    async def scenario() -> None:
        us, them = Side(1), Side(1)
        them.head = bytes(MAX_HEAD_BYTES + 1)
        async with node() as there:
            caller, acceptor = await there.run(us, them)
            assert isinstance(caller, PeerUnreachable) and isinstance(acceptor, LocalProtocolError)

    run(scenario())


# --------------------------------------------------------------------- places, ends


def test_one_peer_gets_few_places() -> None:
    async def scenario() -> None:
        async with node() as there:
            them = Side()

            async def hold(peer: str) -> None:
                """Be accepted, and send no body."""
                _, writer = await there.dial(peer)
                writer.write(b"\4swap" + HEAD + (1).to_bytes(8, "big"))

            there.exchanges.acceptors["swap"] = them.accept
            for _ in range(MAX_EXCHANGES_PER_PEER):
                await hold("greedy")
            await until(lambda: len(them.told) == MAX_EXCHANGES_PER_PEER)
            us = Side()
            await there.call(us, "greedy")
            assert isinstance(us.outcomes[0], PeerUnreachable) and str(us.outcomes[0]) == "busy"
            for i in range(MAX_EXCHANGES - MAX_EXCHANGES_PER_PEER):
                await hold(f"peer {i}")
            await until(lambda: len(them.told) == MAX_EXCHANGES)
            late = Side()
            await there.call(late, "late")
            assert str(late.outcomes[0]) == "busy" and there.traffic.rejected == {"busy": 2}
            assert len(them.told) == MAX_EXCHANGES and not them.outcomes
            for writer in there.writers:
                writer.transport.abort()
            await until(lambda: len(them.outcomes) == MAX_EXCHANGES)
            await asyncio.gather(*there.tasks)
            again = Side()
            await there.call(again, "greedy")
            assert again.outcomes == [None]

    run(scenario())


def test_openings_have_few_places_and_little_time() -> None:
    async def scenario() -> None:
        async with node() as there:
            there.exchanges.acceptors["swap"] = Side().accept
            for _ in range(exchanges.MAX_OPENINGS_PER_PEER):
                _, writer = await there.dial("slow")
                writer.write(b"\4sw")
            await settle()
            us = Side()
            await there.call(us, "slow")
            assert us.outcomes == [None]
            await until(lambda: there.traffic.rejected["slow"] == exchanges.MAX_OPENINGS_PER_PEER - 1)
            assert there.traffic.rejected["crowded"] == 1 and len(there.said) == 1  # the oldest made room

    run(scenario())


def test_openings_that_do_not_come_keep_nobody_out() -> None:
    async def scenario() -> None:
        async with node() as there:
            there.exchanges.acceptors["swap"] = Side().accept
            for i in range(exchanges.MAX_OPENINGS + 10):
                (await there.dial(f"slow {i}"))[1].write(b"\4sw")
            us = Side()
            await there.call(us, "newcomer")
            assert us.outcomes == [None]
            assert there.traffic.rejected["crowded"] >= 10 and there.traffic.rejected["busy"] == 0

    run(scenario())


@pytest.mark.parametrize("callback", ["accept", "pieces", "sink", "done"])
def test_cancelling_waits_for_callbacks_and_tells_once(callback: str) -> None:
    inside, go = threading.Event(), threading.Event()

    async def scenario() -> None:
        us, them = Side(100, 1), Side(100, 2)
        original = getattr(them, callback)

        def slow(*arguments: object) -> object:
            inside.set()
            assert go.wait(HANG_S)
            return original(*arguments)

        setattr(them, callback, slow)
        async with node() as there:
            running = asyncio.create_task(there.run(us, them))
            await until(inside.is_set)
            tasks = there.exchanges.cancel()
            assert tasks == set(there.tasks)
            there.exchanges.cancel()
            await until_still(busy=1)
            assert them.outcomes == [] and not any(task.done() for task in tasks)
            go.set()
            await running
            assert len(them.outcomes) == 1
            if callback != "done":
                assert isinstance(them.outcomes[0], PeerUnreachable) and us.outcomes != [None]

    run(scenario())


def test_a_cancelled_caller_ends_its_callbacks_first() -> None:
    inside, go = threading.Event(), threading.Event()

    async def scenario() -> None:
        us, them = Side(100, 1), Side(100, 2)

        def slow(piece: memoryview) -> None:
            inside.set()
            assert go.wait(HANG_S)
            us.got += piece

        async with node() as there:
            there.exchanges.acceptors["swap"] = them.accept
            reader, writer = await there.dial()
            call = asyncio.create_task(
                there.mine.call(reader, writer, "swap", us.outgoing, lambda head, size: slow, "peer")
            )
            await until(inside.is_set)
            (task,) = there.mine.cancel()
            assert task is call
            await until_still(busy=1)
            assert not call.done()
            go.set()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert us.got == them.body
            await asyncio.gather(*there.tasks)
            assert reason(them.outcomes[0]) == "torn"

    run(scenario())
