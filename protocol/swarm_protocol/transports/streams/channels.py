"""Channels over a byte stream between two peers: messages both ways, for as long as both live.

    opener   method length (1 byte) | method
    taker    status (1 byte), and a frame if it is a refusal                                      as in `stream`
    both     0: a beat    1 | head length (2 bytes) | body size (4 bytes, big-endian) | head | body    2: goodbye

All bytes are a sign of life, also part of a body. Beats are sent when there is nothing else to send. Silence is counted
in this node's own beats, so a node that was held up does not blame its peers. A stream may end at any point (a peer was
killed, a daemon died): that ends the channel, and a message that has not arrived whole is never delivered.

Nothing is allocated for a body before the listener has judged its head and size. Bodies are not hashed: libp2p
authenticates the stream, and a stream that is cut ends.
"""

from __future__ import annotations

import asyncio
import struct
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any

from swarm_protocol.errors import LocalProtocolError, PeerUnreachable, ProtocolError, RemoteProtocolError
from swarm_protocol.limits import MAX_HEAD_BYTES, MAX_MESSAGE_BYTES
from swarm_protocol.transports.base import Channel, Listener
from swarm_protocol.transports.streams.exchanges import MAX_OPENINGS, MAX_OPENINGS_PER_PEER, PIECE_S
from swarm_protocol.transports.streams.places import Room, Running, Shares
from swarm_protocol.transports.streams.stream import (
    ANSWER,
    MAX_REFUSAL_BYTES,
    REQUEST_READ_S,
    UNAVAILABLE,
    Stream,
    Traffic,
    refused,
)
from swarm_protocol.transports.transfer import chunks

BEAT_S = 0.5
SILENT_BEATS = 8
SILENCE_S = BEAT_S * SILENT_BEATS  # a peer of which nothing was heard for so long has gone: seven beats may be late
MAX_CHANNELS, MAX_CHANNELS_PER_PEER = 64, 4
"""Channels taken at a time, from all peers and from one: room for a new one while the last is still found to be
dead."""
MAX_QUEUED_BYTES = 2 * MAX_MESSAGE_BYTES
"""Bytes that may wait to leave on one channel. If there are more, its peer is too slow. This is the sender's memory,
not a copy."""
CLOSED, GONE, SILENT, SLOW = "closed", "gone", "silent", "slow"
"""Why a channel ended: by a goodbye (either side's), without one, or ours for a peer that cannot keep up; else a fault,
or why it could not be opened, in words."""

_BEAT, _MESSAGE, _GOODBYE = b"\0", b"\1", b"\2"
_SIZES = struct.Struct(">HI")
_SMALL = 2**14  # bodies up to this leave in one piece with their heads
Opened = Callable[[Channel], Listener]


class StreamChannel:
    """One end of a channel. `listener` is to be set before it is run."""

    def __init__(
        self,
        peer: str,
        loop: asyncio.AbstractEventLoop,
        traffic: Traffic,
        report: Callable[[str], None],
        address: str = "",
    ) -> None:
        self.peer, self.address = peer, address
        self.listener: Listener | None = None
        self._loop = loop
        self._traffic = traffic
        self._report = report
        self._task: asyncio.Task[Any] | None = None  # the task in which the channel lives
        self._why = ""  # why it is closed, if it is, or about to be
        self._lock = threading.Lock()  # guards the attributes that follow
        self._told = False
        self._queue: deque[tuple[memoryview, ...]] = deque()  # frames that have not begun to leave
        self._queued = 0  # bytes of those that have not left
        self._wake = asyncio.Event()
        self._between = True  # whether no message is on its way out

    # ---------------------------------------------------------------- any thread

    def send(self, head: bytes, *body: bytes | memoryview) -> bool:
        """See `Channel.send`. Raises LocalProtocolError for a message that peers would refuse."""
        parts = parts_of(head, body)
        size = sum(map(len, parts))
        start = _MESSAGE + _SIZES.pack(len(head), size) + head
        frame = (memoryview(b"".join((start, *parts))),) if size <= _SMALL else (memoryview(start), *parts)
        with self._lock:
            if self._why:
                return False
            self._queued += sum(map(len, frame))
            if self._queued <= MAX_QUEUED_BYTES:
                self._queue.append(frame)
                self._soon(self._wake.set)
                return True
        self._stop(SLOW)
        return False

    def close(self) -> None:
        self._stop(CLOSED)

    def _stop(self, why: str) -> None:
        self._why = self._why or why
        self._soon(self._cancel)

    def _soon(self, function: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed, and this channel has been told
            self._loop.call_soon_threadsafe(function)

    # ---------------------------------------------------------------- the loop's thread

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def run(self, life: Coroutine[Any, Any, str]) -> None:
        """Run the channel, and tell the listener why it ended: the result or the error of `life`."""
        self._task = asyncio.current_task()
        assert self._task is not None
        if self._why:  # closed before it began
            self._task.cancel()
        try:
            why = await life
        except asyncio.CancelledError:
            why = CLOSED
        except RemoteProtocolError as error:
            why = str(error)
            if error.reason != SILENT:
                self._traffic.refusals.note(self.peer, error.reason, address=self.address)
        except ProtocolError as error:
            why = str(error)
        except TimeoutError:
            why = SLOW
        except (EOFError, OSError):
            why = GONE
        finally:
            self._task = None
        why = self._why or why
        if why in (SILENT, SLOW):  # counted without blaming the peer
            self._traffic.rejected[why] += 1
        self.end(why)

    def end(self, why: str) -> None:
        """Tell the listener that the channel has ended, once."""
        with self._lock:
            self._why = self._why or why
            told, self._told = self._told, True
            self._queue.clear()
        if not told and self.listener is not None:
            with suppress(LocalProtocolError, RemoteProtocolError):
                self._tell(self.listener.closed, why)

    def _tell(self, callback: Callable[..., None], *arguments: object) -> None:
        """Call a callback. Raises its RemoteProtocolError, and LocalProtocolError for any other error."""
        try:
            callback(*arguments)
        except RemoteProtocolError:
            raise
        except Exception as error:  # a fault of ours: the channel ends, this node lives on
            self._traffic.rejected["handler"] += 1
            self._report(f"a channel with {self.peer} failed: {error!r}")
            raise LocalProtocolError("failed") from error

    async def live(self, stream: Stream) -> str:
        """Carry messages until it is over; why it is. Raises RemoteProtocolError, LocalProtocolError for a fault in a
        callback, TimeoutError for a peer that is too slow, EOFError or OSError for a stream that broke."""
        halves = asyncio.create_task(self._receive(stream)), asyncio.create_task(self._transmit(stream))
        try:
            while True:
                done, _ = await asyncio.wait(halves, timeout=BEAT_S, return_when=asyncio.FIRST_COMPLETED)
                if done:
                    return next(half for half in halves if half in done).result()
                stream.quiet += 1
                if stream.quiet >= SILENT_BEATS:
                    raise RemoteProtocolError(SILENT)
                if self._between:
                    stream.write(_BEAT)
        finally:
            for half in halves:
                half.cancel()
            await asyncio.gather(*halves, return_exceptions=True)
            if self._between:
                stream.write(_GOODBYE)
            if stream.writer.transport.get_write_buffer_size():
                stream.abort()

    async def _receive(self, stream: Stream) -> str:
        while (kind := await stream.read(1)) and not self._why:
            if kind == _MESSAGE:
                await self._take_message(stream)
            elif kind == _GOODBYE:
                return CLOSED
            elif kind != _BEAT:
                raise RemoteProtocolError("schema", f"a frame of kind {kind[0]}")
        return GONE

    async def _take_message(self, stream: Stream) -> None:
        assert self.listener is not None
        length, size = _SIZES.unpack(await self._take(stream, _SIZES.size))
        if length > MAX_HEAD_BYTES or size > MAX_MESSAGE_BYTES:
            raise RemoteProtocolError("size", f"a head of {length} and a body of {size} bytes")
        head = bytes(await self._take(stream, length))
        self._tell(self.listener.judge, head, size)
        self._tell(self.listener.received, head, await self._take(stream, size))

    async def _take(self, stream: Stream, size: int) -> bytearray:
        """The next `size` bytes. Raises TimeoutError if they come too slowly, EOFError if the stream ends. Waits for
        this node's own limit do not count."""
        taken = bytearray(size)
        try:
            for piece in chunks(memoryview(taken)):
                async with asyncio.timeout(PIECE_S) as deadline:
                    await stream.fill(piece, deadline)
                self._traffic.bytes_in += len(piece)
        except EOFError:
            self._traffic.rejected["torn"] += 1
            raise
        return taken

    async def _transmit(self, stream: Stream) -> str:
        while True:
            self._wake.clear()
            while self._queue:
                self._between = False
                sent = await self._send_frame(stream, self._queue.popleft())
                self._between = True
                with self._lock:
                    self._queued -= sent
            await self._wake.wait()

    async def _send_frame(self, stream: Stream, frame: tuple[memoryview, ...]) -> int:
        """Send a frame; returns its bytes. Raises TimeoutError if the peer is too slow. Waits for this node's own limit
        do not count."""
        for part in frame:
            for piece in chunks(part):
                stream.write(piece)
                async with asyncio.timeout(PIECE_S) as deadline:
                    await stream.drain(deadline)
                self._traffic.bytes_out += len(piece)
        return sum(map(len, frame))


class Channels:
    """All channels of one node, its own and those that others open."""

    def __init__(self, traffic: Traffic, report: Callable[[str], None]) -> None:
        self.openings: dict[str, Opened] = {}  # method -> function that takes channels of the method
        self.traffic = traffic
        self._report = report
        self._openings = Room(MAX_OPENINGS, MAX_OPENINGS_PER_PEER, report)
        self._taken = Shares(MAX_CHANNELS, MAX_CHANNELS_PER_PEER)
        self._tasks = Running()

    def cancel(self) -> set[asyncio.Task[Any]]:
        """Close all channels, and take no more. Returns the tasks that end when the listeners are told."""
        self.openings.clear()
        return self._tasks.cancel()

    def new(self, peer: str, loop: asyncio.AbstractEventLoop, address: str = "") -> StreamChannel:
        """A channel that is to live in `loop`. `address` = neighbourhood of `peer`."""
        return StreamChannel(peer, loop, self.traffic, self._report, address)

    async def call(self, channel: StreamChannel, method: str, dial: Callable[[], Awaitable[Stream]]) -> None:
        """Open `channel` over the stream that `dial` gets, and live through it. Raises nothing that `dial` may not."""

        async def life() -> str:
            stream = await dial()
            try:
                async with asyncio.timeout(REQUEST_READ_S) as deadline:
                    stream.write_method(method)
                    status = await stream.read_exactly(1, deadline)
                    if status != ANSWER:
                        why = refused(status, await stream.read_frame(MAX_REFUSAL_BYTES, deadline))
                        raise PeerUnreachable(f"refused: {why}")
                return await channel.live(stream)
            finally:
                stream.close()

        with self._tasks.enter():
            await channel.run(life())

    async def serve(self, stream: Stream) -> None:
        """Take the channel that is opened on this stream, if there is room and somebody for it, and live through it."""
        channel = self.new(stream.peer, asyncio.get_running_loop(), stream.address)

        async def life() -> str:
            async with asyncio.timeout(REQUEST_READ_S) as deadline:
                with self._openings.enter(stream, deadline):
                    method = await stream.read_method(deadline)
            if self._taken.fits(stream):
                with self._taken.place(stream):
                    refusal = self._open(channel, method, stream)
                    if refusal is None:
                        stream.write(ANSWER)
                        return await channel.live(stream)
            else:
                refusal = stream.busy()
            await stream.answer(*refusal)
            return CLOSED

        try:
            with self._tasks.enter():
                await channel.run(life())
        finally:
            stream.close()

    def _open(self, channel: StreamChannel, method: str, stream: Stream) -> tuple[bytes, bytes] | None:
        """Status and reason if it is refused."""
        opened = self.openings.get(method)
        if opened is None:
            return stream.unknown(method)
        try:
            channel.listener = opened(channel)
        except RemoteProtocolError as error:
            return stream.refuse(error)
        except Exception as error:  # a fault of ours: the peer gets an answer, and this node lives on
            self.traffic.rejected["handler"] += 1
            self._report(f"taking a channel of {method!r} failed: {error!r}")
            return UNAVAILABLE, b"failed"
        return None


def parts_of(head: bytes, body: Iterable[bytes | memoryview]) -> list[memoryview]:
    """The body, as bytes. Raises LocalProtocolError for a message that no peer would take."""
    parts = [view.cast("B") for part in body if (view := memoryview(part)).nbytes]
    size = sum(map(len, parts))
    if len(head) > MAX_HEAD_BYTES or size > MAX_MESSAGE_BYTES:
        raise LocalProtocolError(f"a head of {len(head)} and a body of {size} bytes cannot be sent")
    return parts
