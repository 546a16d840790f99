"""Bounds on bytes a second: counted on a clock of the test's, and kept on a real socket without a byte lost."""

from __future__ import annotations

import asyncio
import hashlib
import selectors
import socket
from collections.abc import Coroutine
from typing import Any, cast

import pytest

from swarm_protocol.errors import PeerUnreachable, RemoteProtocolError
from swarm_protocol.limits import MAX_CHUNK_BYTES
from swarm_protocol.manifest import FILE_METHOD
from swarm_protocol.transports.base import Outgoing
from swarm_protocol.transports.pacing import BANDWIDTH_BURST_S, Bandwidth, bytes_s
from swarm_protocol.transports.streams.channels import Channels, StreamChannel
from swarm_protocol.transports.streams.exchanges import PIECE_S, Exchanges
from swarm_protocol.transports.streams.requests import ANSWER_READY_S, Answers
from swarm_protocol.transports.streams.stream import GRACE_S, LATENCY_S, PACED_BYTES, REQUEST_READ_S, Stream, Traffic


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_rest_is_made_up_for_a_little() -> None:
    clock = Clock()
    pace = Bandwidth(1000.0, clock)
    assert pace.take(500) == pytest.approx(0.5)
    assert pace.take(500) == pytest.approx(1.0), "whoever comes next waits for those before"
    clock.now += 1.5
    assert pace.take(1000) == pytest.approx(1.0 - BANDWIDTH_BURST_S)
    clock.now += 3600.0
    assert pace.take(1000) == pytest.approx(1.0 - BANDWIDTH_BURST_S)


def test_no_limit_is_no_limit() -> None:
    assert Bandwidth(0.0).take(2**40) == 0.0
    assert bytes_s(0.0) == 0.0 < bytes_s(8.0) < 500_000


class Slept:
    """What was waited for, at no cost."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        self.clock = Clock()
        monkeypatch.setattr("swarm_protocol.transports.streams.stream.asyncio.sleep", self.sleep)

    async def sleep(self, seconds: float, really=asyncio.sleep) -> None:
        self.seconds += seconds
        self.clock.now += seconds
        await really(0)


def sending(writer: Any, pace: Bandwidth) -> Stream:
    """A stream whose bytes leave no faster than `pace`."""
    return Stream(asyncio.StreamReader(), writer, Traffic(upload=pace), "peer")


def receiving(reader: asyncio.StreamReader, pace: Bandwidth, writer: Any = None) -> Stream:
    """A stream whose bytes arrive no faster than `pace`."""
    return Stream(reader, writer, Traffic(download=pace), "peer")


async def streams() -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    return [await asyncio.open_connection(sock=end) for end in socket.socketpair()]


@pytest.mark.parametrize("paced", ["writer", "reader"])
def test_a_paced_frame_arrives_whole(monkeypatch: pytest.MonkeyPatch, paced: str) -> None:
    payload = bytes(range(256)) * (3 * MAX_CHUNK_BYTES // 512)
    slept = Slept(monkeypatch)
    pace = Bandwidth(float(len(payload)), slept.clock)

    async def go() -> bytes:
        (_, writer), (reader, other) = await streams()
        unpaced = Bandwidth(0.0)
        sent = asyncio.create_task(sending(writer, pace if paced == "writer" else unpaced).write_frame(payload))
        got = await receiving(reader, pace if paced == "reader" else unpaced).read_frame(2**23)
        await sent
        for each in (writer, other):
            each.close()
            await each.wait_closed()
        return got

    assert asyncio.run(go()) == payload
    assert slept.seconds == pytest.approx(1.0, abs=BANDWIDTH_BURST_S + PACED_BYTES / len(payload))


def test_an_abandoned_write_does_not_burst() -> None:
    async def go() -> int:
        (_, writer), (reader, other) = await streams()
        paced = sending(writer, Bandwidth(1000.0))
        paced.write(b"x" * 100)
        paced.write(b"y" * 100 * PACED_BYTES)
        drain = asyncio.create_task(paced.drain())
        got = await reader.read(100)
        drain.cancel()
        paced.close()
        while data := await reader.read(2**20):
            got += data
        other.close()
        return len(got)

    assert asyncio.run(go()) <= 100 + PACED_BYTES


@pytest.mark.parametrize("size", [40, 12_000, PACED_BYTES])
def test_many_small_writes_keep_to_the_limit(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    slept = Slept(monkeypatch)
    count, rate = 200, bytes_s(1.0)

    async def go() -> int:
        (_, writer), (reader, other) = await streams()
        paced = sending(writer, Bandwidth(rate, slept.clock))
        paced.write(b"x")  # one alone does not wait
        await paced.drain()
        assert slept.seconds == 0.0
        got = 0
        for _ in range(count):
            paced.write(b"x" * size)
            await paced.drain()
            got += len(await reader.read(2**20))
        for each in (writer, other):
            each.close()
            await each.wait_closed()
        return got

    assert asyncio.run(go()) == count * size + 1
    assert slept.seconds == pytest.approx(count * size / rate, abs=BANDWIDTH_BURST_S)


def test_short_answers_keep_to_the_limit_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    slept, payload, count = Slept(monkeypatch), b"x" * 1000, 100
    pace = Bandwidth(1000.0, slept.clock)

    async def go() -> None:
        for _ in range(count):  # each on a stream of its own, as requests are
            (_, writer), (reader, other) = await streams()
            await sending(writer, pace).write_frame(payload)
            assert await receiving(reader, Bandwidth()).read_frame(2**20) == payload
            for each in (writer, other):
                each.close()
                await each.wait_closed()

    asyncio.run(go())
    assert slept.seconds == pytest.approx(count * (1000 + 40) / 1000, abs=BANDWIDTH_BURST_S)


def test_own_limits_are_not_the_taker_s_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, deadlines = Clock(), []

    class Deadline(asyncio.Timeout):
        def __init__(self, when: float | None) -> None:
            super().__init__(when)
            deadlines.append(0.0)
            self.note()

        def reschedule(self, when: float | None) -> None:
            super().reschedule(when)
            self.note()

        def note(self) -> None:
            deadlines[-1] = (self.when() or 0.0) - asyncio.get_running_loop().time()

    async def go() -> None:
        (_, writer), (_, other) = await streams()
        pace = Bandwidth(1000.0, clock)
        paced = sending(writer, pace)
        pace.take(60_000)  # for other streams
        Slept(monkeypatch)
        monkeypatch.setattr("swarm_protocol.transports.streams.stream.asyncio.timeout_at", Deadline)
        await paced.write_frame(b"short")
        await paced.write_frame(bytes(2 * PACED_BYTES))
        for each in (writer, other):
            each.close()
            await each.wait_closed()

    asyncio.run(go())
    short, long = deadlines
    assert short > GRACE_S + 50
    assert long > GRACE_S + 50 + 2 * PACED_BYTES / 1000


async def take_in(pace: Bandwidth, sizes: list[int], others: int = 0) -> None:
    """One stream's readings; before each, `others` bytes are taken on other streams."""
    reader = asyncio.StreamReader()
    reader.feed_data(bytes(sum(sizes)))
    paced = receiving(reader, pace)
    for size in sizes:
        pace.take(others)
        assert len(await paced.read_exactly(size)) == size


def test_beats_pass_the_bodies_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    slept, pieces = Slept(monkeypatch), 100
    pace = Bandwidth(bytes_s(1.0), slept.clock)
    asyncio.run(take_in(pace, [1] * pieces, PACED_BYTES))
    assert slept.seconds < 2 * PACED_BYTES / pace.bytes_s, "for one of them"
    assert pace.take(0) > (pieces - 2) * PACED_BYTES / pace.bytes_s, "the others wait for what they took"


def test_short_requests_keep_to_the_limit_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    slept, count, sizes = Slept(monkeypatch), 100, [1, 7, 40, 952]
    pace = Bandwidth(1000.0, slept.clock)

    async def go() -> None:
        for _ in range(count):
            await take_in(pace, sizes)

    asyncio.run(go())
    assert slept.seconds == pytest.approx(count * sum(sizes) / 1000, abs=BANDWIDTH_BURST_S + LATENCY_S)


class Jumping(selectors.DefaultSelector):
    """Instead of waiting, puts the clock on."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(timeout and 0)
        if not ready and timeout:
            self._clock.now += timeout
        return ready


def run(clock: Clock, what: Coroutine[Any, Any, Any]) -> Any:
    """On a loop whose time is that of `clock`."""
    loop = asyncio.SelectorEventLoop(Jumping(clock))
    loop.time = clock  # type: ignore[method-assign]
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(what)


class Taker:
    """A stream whose other end takes all at once, or nothing."""

    def __init__(self, takes: bool = True) -> None:
        self.got = 0
        self.aborted = False
        self.transport = self
        self._takes = takes

    def write(self, data: bytes) -> None:
        self.got += len(data)

    async def drain(self) -> None:
        if not self._takes:
            await asyncio.get_running_loop().create_future()

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None: ...


@pytest.mark.parametrize("count", [1, 2, 4])
def test_sharing_a_limit_drops_nobody(count: int) -> None:
    clock, rate, takers = Clock(), bytes_s(1.0), [Taker() for _ in range(count)]
    pace = Bandwidth(rate, clock)

    async def go() -> None:
        await asyncio.gather(*(sending(taker, pace).write_frame(bytes(MAX_CHUNK_BYTES)) for taker in takers))

    run(clock, go())
    assert [taker.got for taker in takers] == [MAX_CHUNK_BYTES + 40] * count
    assert clock.now - Clock.now == pytest.approx(count * MAX_CHUNK_BYTES / rate, rel=0.05)


def test_takers_of_nothing_are_dropped_despite_limits() -> None:
    clock = Clock()

    async def go() -> None:
        await sending(Taker(takes=False), Bandwidth(bytes_s(1.0), clock)).write_frame(bytes(MAX_CHUNK_BYTES))

    with pytest.raises(TimeoutError):
        run(clock, go())
    assert clock.now - Clock.now == pytest.approx(GRACE_S)


def test_a_large_answer_keeps_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, taker, answer = Clock(), Taker(), bytes(12 * MAX_CHUNK_BYTES)
    assert len(answer) / bytes_s(1.0) > ANSWER_READY_S
    answers = Answers(Traffic(), print)
    answers.servers[FILE_METHOD] = lambda peer, payload: answer

    async def at_once(what: Any, *arguments: Any) -> Any:
        return what(*arguments)

    monkeypatch.setattr("swarm_protocol.transports.streams.stream.asyncio.to_thread", at_once)

    async def go() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(bytes([len(FILE_METHOD)]) + FILE_METHOD.encode() + bytes(8) + hashlib.sha256().digest())
        pace = Bandwidth(bytes_s(1.0), clock)
        await answers.serve(Stream(reader, cast("Any", taker), Traffic(upload=pace), "peer"))

    run(clock, go())
    assert taker.got == 1 + 40 + len(answer) and not taker.aborted
    assert clock.now - Clock.now > ANSWER_READY_S


@pytest.mark.parametrize("what", ["exchange", "channel"])
def test_bodies_sharing_a_limit_are_not_dropped(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, rate, takers = Clock(), bytes_s(1.0), [Taker() for _ in range(4)]
    assert len(takers) * MAX_CHUNK_BYTES / rate > PIECE_S
    pace, exchanges = Bandwidth(rate, clock), Exchanges(Traffic(), print)

    async def at_once(method: str, callback: Any, *arguments: Any) -> Any:
        return callback(*arguments)

    monkeypatch.setattr(exchanges, "_in_thread", at_once)

    def send(stream: Stream) -> Coroutine[Any, Any, Any]:
        body = bytes(MAX_CHUNK_BYTES)
        if what == "exchange":
            return exchanges._send(stream, "weights", Outgoing(b"", len(body), lambda: iter([memoryview(body)])))
        channel = StreamChannel("peer", asyncio.get_running_loop(), Traffic(), print)
        return channel._send_frame(stream, (memoryview(body),))

    async def go() -> None:
        await asyncio.gather(*(send(sending(taker, pace)) for taker in takers))

    run(clock, go())
    assert {taker.got - MAX_CHUNK_BYTES for taker in takers} == {32 if what == "exchange" else 0}
    assert clock.now - Clock.now > PIECE_S


@pytest.mark.parametrize("what", ["exchange", "channel"])
def test_untaken_bodies_are_given_up_despite_limits(what: str) -> None:
    clock = Clock()

    async def go() -> None:
        asleep = sending(Taker(takes=False), Bandwidth(bytes_s(1.0), clock))
        asleep.write(bytes(MAX_CHUNK_BYTES))
        if what == "exchange":
            await Exchanges(Traffic(), print)._drain(asleep)
        else:
            channel = StreamChannel("peer", asyncio.get_running_loop(), Traffic(), print)
            await channel._send_frame(asleep, (memoryview(b"x"),))

    with pytest.raises((TimeoutError, PeerUnreachable)):
        run(clock, go())
    assert clock.now - Clock.now == pytest.approx(PIECE_S)


@pytest.mark.parametrize("what", ["exchange", "channel"])
def test_arriving_bodies_sharing_a_limit_are_kept(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, rate, count, got = Clock(), bytes_s(1.0), 4, []
    body = bytes(range(256)) * (MAX_CHUNK_BYTES // 256)
    assert count * len(body) / rate > PIECE_S
    pace, exchanges = Bandwidth(rate, clock), Exchanges(Traffic(), print)

    async def at_once(method: str, callback: Any, *arguments: Any) -> Any:
        return callback(*arguments)

    monkeypatch.setattr(exchanges, "_in_thread", at_once)

    async def take() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(body + hashlib.sha256(body).digest())
        paced = receiving(reader, pace)
        if what == "exchange":
            await exchanges._receive(paced, "weights", len(body), lambda piece: got.append(bytes(piece)))
        else:
            channel = StreamChannel("peer", asyncio.get_running_loop(), Traffic(), print)
            got.append(bytes(await channel._take(paced, len(body))))

    async def go() -> None:
        await asyncio.gather(*(take() for _ in range(count)))

    run(clock, go())
    assert got == [body] * count
    assert clock.now - Clock.now > PIECE_S


@pytest.mark.parametrize("what", ["exchange", "channel"])
def test_unsent_bodies_are_given_up_despite_limits(what: str) -> None:
    clock = Clock()
    pace, part = Bandwidth(bytes_s(1.0), clock), bytes(PACED_BYTES)

    async def go() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(part)
        paced = receiving(reader, pace)
        if what == "exchange":
            await Exchanges(Traffic(), print)._read(paced, MAX_CHUNK_BYTES, bytearray(MAX_CHUNK_BYTES))
        else:
            await StreamChannel("peer", asyncio.get_running_loop(), Traffic(), print)._take(paced, MAX_CHUNK_BYTES)

    with pytest.raises((TimeoutError, PeerUnreachable)):
        run(clock, go())
    expected = PIECE_S + len(part) / pace.bytes_s - BANDWIDTH_BURST_S
    assert clock.now - Clock.now == pytest.approx(expected, abs=BANDWIDTH_BURST_S)


def test_each_piece_of_a_body_has_a_minute() -> None:
    clock, size = Clock(), 3 * MAX_CHUNK_BYTES
    piece_s = 0.9 * PIECE_S

    async def go() -> bytearray:
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        for i in range(3):
            loop.call_later((i + 1) * piece_s, reader.feed_data, bytes(MAX_CHUNK_BYTES))
        return await StreamChannel("peer", loop, Traffic(), print)._take(receiving(reader, Bandwidth()), size)

    assert len(run(clock, go())) == size
    assert clock.now - Clock.now == pytest.approx(3 * piece_s)


@pytest.mark.parametrize("what", ["request", "exchange", "channel"])
def test_requests_held_up_by_limits_are_not_late(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, traffic, taker = Clock(), Traffic(), Taker()
    pace, asked = Bandwidth(bytes_s(1.0), clock), []
    pace.take(int((REQUEST_READ_S + 5) * pace.bytes_s))  # by others

    async def at_once(what: Any, *arguments: Any) -> Any:
        return what(*arguments)

    monkeypatch.setattr("swarm_protocol.transports.streams.stream.asyncio.to_thread", at_once)

    async def go() -> None:
        reader = asyncio.StreamReader()
        frame = bytes(8) + hashlib.sha256().digest()
        reader.feed_data(b"\x03ask" + (b"" if what == "channel" else frame) + (bytes(8) if what == "exchange" else b""))
        reader.feed_eof()
        stream = receiving(reader, pace, taker)
        if what == "request":
            answers = Answers(traffic, print)
            answers.servers["ask"] = lambda peer, payload: asked.append(peer) or b""
            await answers.serve(stream)
        elif what == "exchange":
            exchanges = Exchanges(traffic, print)
            exchanges.acceptors["ask"] = lambda peer, head, size: asked.append(peer) or refuse()
            monkeypatch.setattr(exchanges, "_in_thread", lambda method, callback, *args: at_once(callback, *args))
            await exchanges.serve(stream)
        else:
            channels = Channels(traffic, print)
            channels.openings["ask"] = lambda channel: asked.append(channel.peer) or refuse()
            await channels.serve(stream)

    run(clock, go())
    assert asked == ["peer"]
    assert clock.now - Clock.now > REQUEST_READ_S


def refuse() -> Any:
    raise RemoteProtocolError("busy", "later")
