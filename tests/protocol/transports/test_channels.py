"""Channels over real streams (socket pairs): what arrives is whole and in order, and whatever a peer or a stream does,
each end is told once that it is over, and why."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_protocol.errors import LocalProtocolError, PeerUnreachable, RemoteProtocolError
from swarm_protocol.limits import MAX_CHUNK_BYTES, MAX_HEAD_BYTES, MAX_MESSAGE_BYTES
from swarm_protocol.transports.base import Channel, Listener
from swarm_protocol.transports.streams import channels
from swarm_protocol.transports.streams.channels import (
    BEAT_S,
    MAX_CHANNELS,
    MAX_CHANNELS_PER_PEER,
    SILENCE_S,
    Channels,
    StreamChannel,
)
from swarm_protocol.transports.streams.exchanges import MAX_OPENINGS
from swarm_protocol.transports.streams.stream import Stream, Traffic
from tests.support.clocks import HANG_S, hold_up, run, until
from tests.support.wire import mutations

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

BEAT, GOODBYE = b"\0", b"\2"
OPENING = b"\4talk"


def frame(head: bytes, body: bytes) -> bytes:
    return b"\1" + struct.pack(">HI", len(head), len(body)) + head + body


class Side:
    """What one end is told."""

    def __init__(self) -> None:
        self.judged: list[tuple[bytes, int]] = []
        self.got: list[tuple[bytes, bytes]] = []
        self.ends: list[str] = []
        self.threads: set[int] = set()
        self.judge: Callable[[bytes, int], None] = lambda head, size: None
        self.on_message: Callable[[bytes], None] = lambda head: None
        self.channel: Channel | None = None

    def opened(self, channel: Channel) -> Listener:
        self.channel = channel
        return Listener(self._judge, self._received, self._closed)

    def _judge(self, head: bytes, size: int) -> None:
        assert len(self.judged) == len(self.got)
        self.threads.add(threading.get_ident())
        self.judged.append((head, size))
        self.judge(head, size)

    def _received(self, head: bytes, body: bytearray) -> None:
        assert isinstance(body, bytearray) and self.judged[-1] == (head, len(body))
        self.got.append((head, bytes(body)))
        self.on_message(head)

    def _closed(self, why: str) -> None:
        self.ends.append(why)


class Hasty(Side):
    """Closes its channel at once."""

    def opened(self, channel: Channel) -> Listener:
        channel.close()
        return super().opened(channel)


class World:
    """Two nodes: `theirs` takes channels of `talk`, told to `them`; `ours` opens them, told to `us`."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.theirs, self.ours = (Channels(Traffic(), self.said.append) for _ in range(2))
        self.us, self.them = Side(), Side()
        self.theirs.openings["talk"] = self.them.opened
        self.tasks: list[asyncio.Task[None]] = []
        self.writers: list[asyncio.StreamWriter] = []

    async def pair(self) -> tuple[Streams, Streams]:
        one, other = [await asyncio.open_connection(sock=end) for end in socket.socketpair()]
        self.writers += [one[1], other[1]]
        return one, other

    async def taker(self, peer: str = "us") -> Streams:
        """A stream on which `theirs` takes a channel."""
        near, far = await self.pair()
        self.tasks.append(asyncio.create_task(self.theirs.serve(Stream(*far, self.theirs.traffic, peer))))
        return near

    async def open(self, side: Side | None = None, method: str = "talk", peer: str = "us") -> StreamChannel:
        """A channel from `ours` to `theirs`."""
        return self.call(side or self.us, method, lambda: self.taker(peer))

    def call(self, side: Side, method: str, dial: Callable[[], Awaitable[Streams]]) -> StreamChannel:
        async def dialled() -> Stream:
            return Stream(*await dial(), self.ours.traffic, "them")

        channel = self.ours.new("them", asyncio.get_running_loop())
        channel.listener = side.opened(channel)
        self.tasks.append(asyncio.create_task(self.ours.call(channel, method, dialled)))
        return channel

    async def raw(self) -> Streams:
        """The other end of a channel that `theirs` has taken, by hand."""
        reader, writer = await self.taker()
        writer.write(OPENING)
        assert await reader.readexactly(1) == b"\0"
        return reader, writer

    async def ended(self) -> None:
        async with asyncio.timeout(HANG_S):
            await asyncio.gather(*self.tasks)


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    one = World()
    troubles: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: troubles.append(context))
    yield one
    for task in one.ours.cancel() | one.theirs.cancel():
        await asyncio.wait({task}, timeout=HANG_S)
    await one.ended()
    for writer in one.writers:
        writer.close()
    await asyncio.sleep(0.01)  # for sockets to be closed
    assert not troubles
    assert not one.theirs.cancel() | one.ours.cancel()
    for side in (one.us, one.them):
        assert len(side.ends) == (side.channel is not None) and len(side.judged) - len(side.got) in (0, 1)


# --------------------------------------------------------------------- whole


def test_messages_of_any_size_arrive_in_order() -> None:
    sizes = [0, 1, 2**14, 2**14 + 1, 2**16, MAX_CHUNK_BYTES, 3 * MAX_CHUNK_BYTES + 1, *range(200)]
    messages = {seed: [(b"%d" % i, random.Random(seed).randbytes(n)) for i, n in enumerate(sizes)] for seed in (1, 2)}

    def say(channel: Channel, seed: int) -> None:
        for head, body in messages[seed]:
            middle = len(body) // 3
            assert channel.send(head, body[:middle], b"", memoryview(bytearray(body[middle:])))

    async def scenario() -> None:
        async with world() as w:
            channel = await w.open()
            say(channel, 1)  # before it is open
            await until(lambda: w.them.channel is not None)
            assert w.them.channel is not None and (w.them.channel.peer, channel.peer) == ("us", "them")
            say(w.them.channel, 2)
            await until(lambda: len(w.them.got) == len(w.us.got) == len(sizes))
            assert w.them.got == messages[1] and w.us.got == messages[2]
            assert w.them.judged == [(head, len(body)) for head, body in messages[1]]
            assert not w.us.ends and not w.them.ends and channel._queued == 0
            assert w.ours.traffic.bytes_out > sum(sizes) <= w.theirs.traffic.bytes_in
        assert not w.said and not w.ours.traffic.rejected and not w.theirs.traffic.rejected

    run(scenario())


def test_messages_of_any_thread_keep_their_order() -> None:
    def talk(channel: Channel, name: int) -> None:
        for i in range(100):
            assert channel.send(b"%d" % name, b"%d" % i)

    async def scenario() -> None:
        async with world() as w:
            channel = await w.open()
            await asyncio.gather(*(asyncio.to_thread(talk, channel, name) for name in range(4)))
            await until(lambda: len(w.them.got) == 400)
            for name in range(4):
                assert [int(body) for head, body in w.them.got if int(head) == name] == list(range(100))
            assert w.them.threads == {threading.get_ident()}

    run(scenario())


def test_what_no_peer_would_take_is_not_sent() -> None:
    async def scenario() -> None:
        async with world() as w:
            channel = await w.open()
            for head, body in ((bytes(MAX_HEAD_BYTES + 1), b""), (b"", memoryview(bytes(MAX_MESSAGE_BYTES + 1)))):
                with pytest.raises(LocalProtocolError, match="cannot be sent"):
                    channel.send(head, body)
            assert channel.send(bytes(MAX_HEAD_BYTES))
            await until(lambda: w.them.got)

    run(scenario())


# --------------------------------------------------------------------- refused


def test_channels_are_refused_and_counted() -> None:
    def refuse(channel: Channel) -> Listener:
        raise RemoteProtocolError("crew", "not one of us")

    def fail(channel: Channel) -> Listener:
        raise ValueError("oops")

    async def scenario() -> None:
        async with world() as w:
            w.theirs.openings |= {"closed": refuse, "broken": fail}
            for method, why in (
                ("closed", "refused: crew: not one of us"),
                ("unknown", "refused: does not know the method 'unknown'"),
                ("broken", "refused: failed"),
            ):
                side = Side()
                channel = await w.open(side, method)
                channel.send(b"unheard")
                await w.ended()
                assert side.ends == [why] and not channel.send(b"late")
            assert w.theirs.traffic.rejected == {"crew": 1, "method": 1, "handler": 1} and len(w.said) == 1
            (refused,) = w.theirs.traffic.refusals.by_source().values()
            assert refused.reasons == {"crew": 1, "method": 1}

    run(scenario())


def test_there_is_room_again_when_channels_end() -> None:
    async def scenario() -> None:
        async with world() as w:
            taken: list[Channel] = []
            w.theirs.openings["talk"] = lambda channel: taken.append(channel) or Side().opened(channel)
            sides = [Side() for _ in range(MAX_CHANNELS + 2)]
            places = [await w.open(side, peer=f"peer {i}") for i, side in enumerate(sides[:-2])]
            await until(lambda: len(taken) == MAX_CHANNELS)
            await w.open(sides[-2], peer="one more")
            await until(lambda: sides[-2].ends == ["refused: busy"])
            for channel in places:
                channel.close()
            await w.ended()
            for side in sides[: MAX_CHANNELS_PER_PEER + 1]:
                side.ends.clear()
                await w.open(side, peer="the same")
            await until(lambda: sides[MAX_CHANNELS_PER_PEER].ends == ["refused: busy"])
            assert not any(side.ends for side in sides[:MAX_CHANNELS_PER_PEER])
            assert w.theirs.traffic.rejected == {"busy": 2}
            refused = w.theirs.traffic.refusals.by_source()
            assert {peer: one.reasons for peer, one in refused.items()} == dict.fromkeys(
                ("one more", "the same"), {"busy": 1}
            )

    run(scenario())


def test_openings_that_do_not_come_keep_nobody_out() -> None:
    async def scenario() -> None:
        async with world() as w:
            for i in range(MAX_OPENINGS + 10):
                (await w.taker(f"slow {i}"))[1].write(OPENING[:1])
            channel = await w.open(peer="newcomer")
            assert channel.send(b"hello")
            await until(lambda: w.them.got)
            assert len(w.said) == 1
            assert w.theirs.traffic.rejected["crowded"] >= 10 and w.theirs.traffic.rejected["busy"] == 0
            for writer in w.writers:
                writer.close()

    run(scenario())


def test_messages_are_judged_before_bodies_are_read() -> None:
    def judge(head: bytes, size: int) -> None:
        raise RemoteProtocolError("shape", f"{size} bytes for {head!r}")

    async def scenario() -> None:
        async with world() as w:
            w.them.judge = judge
            reader, writer = await w.raw()
            tracemalloc.start()
            try:
                writer.write(b"\1" + struct.pack(">HI", 4, MAX_MESSAGE_BYTES) + b"head")
                await w.ended()  # of the body there was nothing
                assert tracemalloc.get_traced_memory()[1] < 2**20
            finally:
                tracemalloc.stop()
            assert w.them.judged == [(b"head", MAX_MESSAGE_BYTES)] and not w.them.got
            assert w.them.ends == [f"shape: {MAX_MESSAGE_BYTES} bytes for b'head'"]
            assert w.theirs.traffic.rejected == {"shape": 1} and not w.said
            assert (await reader.read()).strip(BEAT) == GOODBYE

    run(scenario())


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\1" + struct.pack(">HI", MAX_HEAD_BYTES + 1, 0), "size"),
        (b"\1" + struct.pack(">HI", 1, MAX_MESSAGE_BYTES + 1), "size"),
        (b"\3", "schema"),
    ],
)
def test_what_is_no_message_ends_it(data: bytes, reason: str) -> None:
    async def scenario() -> None:
        async with world() as w:
            _, writer = await w.raw()
            writer.write(frame(b"good", b"body") + data)
            await w.ended()
            assert w.them.got == [(b"good", b"body")] and len(w.them.judged) == 1
            assert w.them.ends[0].startswith(f"{reason}: ") and w.theirs.traffic.rejected == {reason: 1}

    run(scenario())


def test_a_listener_s_fault_ends_its_channel_only() -> None:
    def fault(*arguments: object) -> None:
        raise ValueError("oops")

    def refuse(*arguments: object) -> None:
        raise RemoteProtocolError("crew")

    async def scenario() -> None:
        async with world() as w:
            ends = []
            for judge, received, closed in (
                (fault, refuse, ends.append),
                (len, fault, ends.append),
                (len, refuse, ends.append),
                (len, refuse, fault),
            ):
                listener = Listener(lambda h, n, judge=judge: judge(h), received, closed)  # type: ignore[misc]
                w.theirs.openings["other"] = lambda channel, listener=listener: listener  # type: ignore[misc]
                side = Side()
                (await w.open(side, "other")).send(b"head", b"body")
                await w.ended()
                assert side.ends == ["closed"]
            assert ends == ["failed", "failed", "crew"]
            assert w.theirs.traffic.rejected == {"handler": 3, "crew": 2}
            assert len(w.said) == 3 and all("oops" in sentence for sentence in w.said)
            (await w.open()).send(b"fine")
            await until(lambda: w.them.got)

    run(scenario())


# --------------------------------------------------------------------- the end


def test_nothing_is_told_after_it_was_closed() -> None:
    async def scenario() -> None:
        async with world() as w:
            w.them.on_message = lambda head: w.them.channel and w.them.channel.close()  # type: ignore[assignment]
            _, writer = await w.raw()
            writer.write(frame(b"1", b"") + frame(b"2", b""))
            await w.ended()
            assert w.them.got == [(b"1", b"")] and w.them.ends == ["closed"]

    run(scenario())


@pytest.mark.parametrize("who", ["us", "them"])
def test_either_end_may_close(who: str) -> None:
    async def scenario() -> None:
        async with world() as w:
            channel = await w.open()
            channel.send(b"last words", bytes(MAX_CHUNK_BYTES))
            await until(lambda: w.them.got)
            side = getattr(w, who)
            await asyncio.to_thread(side.channel.close)
            await w.ended()
            assert w.us.ends == w.them.ends == ["closed"]
            assert w.them.channel is not None and not channel.send(b"x") and not w.them.channel.send(b"x")
            channel.close()
            channel.end("again")  # is not told again

    run(scenario())


def test_what_was_sent_before_a_goodbye_arrives() -> None:
    async def scenario() -> None:
        async with world() as w:
            _, writer = await w.raw()
            writer.write(frame(b"1", bytes(300_000)) + frame(b"2", b"") + GOODBYE + frame(b"3", b""))
            await w.ended()
            assert [head for head, _ in w.them.got] == [b"1", b"2"] and w.them.ends == ["closed"]

    run(scenario())


def test_a_channel_closed_while_opening_ends() -> None:
    async def nobody() -> Streams:
        await asyncio.sleep(1000)
        raise AssertionError

    async def far() -> Streams:
        raise PeerUnreachable("nobody listens")

    async def scenario() -> None:
        async with world() as w:
            sides = [Hasty(), Side(), Side(), Side()]
            w.call(sides[0], "talk", nobody)
            await w.ended()
            closed = w.call(sides[1], "talk", nobody)
            w.call(sides[2], "talk", far)
            w.call(sides[3], "talk", nobody)
            await asyncio.sleep(0.01)
            closed.close()
            for task in w.ours.cancel():
                await asyncio.wait({task})
            await w.ended()
            assert [side.ends for side in sides] == [["closed"], ["closed"], ["nobody listens"], ["closed"]]

    run(scenario())


def test_nothing_torn_is_told() -> None:
    good, torn = frame(b"good", b"body"), frame(b"head", bytes(100))

    async def scenario(cut: int) -> None:
        async with world() as w:
            _, writer = await w.raw()
            writer.write(good + torn[:cut])
            writer.close()
            await w.ended()
            assert w.them.got == [(b"good", b"body")] and w.them.ends == ["gone"]
            assert w.theirs.traffic.rejected == ({"torn": 1} if cut else {})

    for cut in (0, 1, 6, 7, 9, 11, 12, len(torn) - 1):
        run(scenario(cut))


def test_a_reset_is_a_stream_that_broke() -> None:
    async def scenario() -> None:
        async with world() as w:
            _, writer = await w.raw()
            assert w.them.channel is not None
            for _ in range(50):
                w.them.channel.send(b"", bytes(MAX_CHUNK_BYTES))
            writer.transport.abort()
            await w.ended()
            assert w.them.ends == ["gone"]

    run(scenario())


async def beat(writer: asyncio.StreamWriter) -> None:
    while not writer.transport.is_closing():
        writer.write(BEAT)
        await asyncio.sleep(BEAT_S)


def test_silence_ends_it_and_beats_keep_it() -> None:
    async def scenario() -> None:
        async with world() as w:
            channel = await w.open()
            await asyncio.sleep(4 * SILENCE_S)  # nobody says anything
            assert not w.us.ends and not w.them.ends and channel.send(b"still there")
            await until(lambda: w.them.got)
            channel.close()
            await w.ended()
            w.them.ends.clear()

            _, writer = await w.raw()
            for _ in range(8):
                await asyncio.sleep(0.75 * SILENCE_S)
                writer.write(BEAT)
            assert not w.them.ends
            await w.ended()
            assert w.them.ends == ["silent"] and w.theirs.traffic.rejected == {"silent": 1}
            assert not w.theirs.traffic.refusals.by_source()

    run(scenario())


def test_a_body_under_way_is_no_silence() -> None:
    async def scenario() -> None:
        async with world() as w:
            _, writer = await w.raw()
            data = frame(b"slow", bytes(10))
            for byte in data:
                await asyncio.sleep(0.75 * SILENCE_S)
                writer.write(bytes([byte]))
            await until(lambda: w.them.got)
            assert not w.them.ends

    run(scenario())


def test_beats_do_not_cut_into_a_message() -> None:
    body = random.Random(1).randbytes(3 * MAX_CHUNK_BYTES)

    async def scenario() -> None:
        async with world() as w:
            reader, writer = await w.raw()
            writer.transport.pause_reading()
            beating = asyncio.create_task(beat(writer))
            assert w.them.channel is not None and w.them.channel.send(b"", body)
            await asyncio.sleep(20 * BEAT_S)
            writer.transport.resume_reading()
            async with asyncio.timeout(HANG_S):
                while (kind := await reader.readexactly(1)) == BEAT:
                    pass
                assert kind + await reader.readexactly(6 + len(body)) == frame(b"", body)
                assert await reader.readexactly(1) == BEAT
            beating.cancel()

    run(scenario())


def test_a_held_up_node_blames_no_peers() -> None:
    async def scenario() -> None:
        async with world() as w:
            channel = await w.open()
            await until(lambda: w.them.channel is not None)
            hold_up(5 * SILENCE_S)
            await asyncio.sleep(BEAT_S)
            assert not w.us.ends and not w.them.ends and channel.send(b"")

    run(scenario())


def test_a_peer_that_takes_nothing_is_dropped() -> None:
    async def scenario() -> None:
        async with world() as w:
            _, writer = await w.raw()
            writer.transport.pause_reading()
            beating = asyncio.create_task(beat(writer))  # alive, but does not read
            assert w.them.channel is not None and w.them.channel.send(b"", bytes(8 * MAX_CHUNK_BYTES))
            await w.ended()
            assert w.them.ends == ["slow"] and w.theirs.traffic.rejected == {"slow": 1}
            assert not w.writers[1].transport.get_write_buffer_size()  # not kept for it
            beating.cancel()

    run(scenario())


def test_a_slow_sender_is_dropped() -> None:
    async def scenario() -> None:
        async with world() as w:
            _, writer = await w.raw()
            writer.write(frame(b"", bytes(1000))[:10])
            beating = asyncio.create_task(beat(writer))
            await w.ended()
            assert w.them.ends == ["slow"] and w.theirs.traffic.rejected == {"slow": 1}
            beating.cancel()

    run(scenario())


def test_what_waits_to_leave_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "MAX_QUEUED_BYTES", 5 * MAX_CHUNK_BYTES)

    async def scenario() -> None:
        async with world() as w:
            _, writer = await w.raw()
            writer.transport.pause_reading()
            channel = w.them.channel
            assert channel is not None
            taken = [channel.send(b"", bytes(MAX_CHUNK_BYTES)) for _ in range(10)]
            assert taken == [True] * 4 + [False] * 6
            await w.ended()
            assert w.them.ends == ["slow"] and w.theirs.traffic.rejected == {"slow": 1}

    run(scenario())


# --------------------------------------------------------------------- nonsense

GOOD = b"".join((BEAT, frame(b"head", b"body"), frame(b"", bytes(50)), BEAT, frame(b"x" * 20, b"")))


@given(st.one_of(st.binary(max_size=200), mutations(OPENING + GOOD)))
@settings(max_examples=100)
def test_a_taker_survives_whatever_it_is_sent(data: bytes) -> None:
    async def scenario() -> None:
        async with world() as w:
            _, writer = await w.taker()
            writer.write(data)
            writer.write_eof()
            await w.ended()
            assert not w.said

    run(scenario())


@given(st.one_of(st.binary(max_size=200), mutations(b"\0" + GOOD)))
@settings(max_examples=100)
def test_an_opener_survives_whatever_it_is_sent(data: bytes) -> None:
    async def scenario() -> None:
        async with world() as w:
            near, (_, writer) = await w.pair()

            async def dial() -> Streams:
                return near

            w.call(w.us, "talk", dial)
            writer.write(data)
            writer.write_eof()
            await w.ended()
            assert not w.said and w.us.ends

    run(scenario())
