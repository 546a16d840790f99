"""Exchanges over a byte stream between two peers: a body each way, both at once, and either may be large.

    caller      method length (1 byte) | method | frame of its head | size of its body (8 bytes, big-endian)
    acceptor    status (1 byte) | frame of its head | size of its body                  frames and refusals: `stream`
    both        sha256 of its body (32 bytes), if bodies are promised  ||  what follows, when the other's is here
    both        body | sha256 of it (32 bytes)  ||  "arrived" (1 byte), after the other's body has, whole

    pieces --next, sha256--> piece --write--> stream --read--> piece --sha256, sink-->              each way, at once
          worker thread              loop                loop         worker thread

While a piece leaves, the next one is made; while one is taken, the next one is read. So a few pieces of MAX_CHUNK_BYTES
are in memory, however large the bodies are. An exchange has succeeded for a peer that has the other's body and its
"arrived"; streams may end early without an error, so nothing less counts. If the very last byte is lost, one side
succeeds and the other does not: no protocol can exclude that.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from traceback import clear_frames
from typing import Any, TypeVar

from swarm_protocol.errors import LocalProtocolError, PeerUnreachable, ProtocolError, RemoteProtocolError, in_seconds
from swarm_protocol.limits import MAX_BODY_BYTES, MAX_CHUNK_BYTES, MAX_HEAD_BYTES
from swarm_protocol.transports.base import Accepted, Acceptor, Outgoing, Sink
from swarm_protocol.transports.streams.places import Room, Running, Shares
from swarm_protocol.transports.streams.stream import (
    ANSWER,
    MAX_REFUSAL_BYTES,
    REQUEST_READ_S,
    UNAVAILABLE,
    Stream,
    Traffic,
    check_method,
    refusal,
    refused,
)

MAX_EXCHANGES, MAX_EXCHANGES_PER_PEER = 16, 2
"""Accepted at once, from all and from one peer: room for a new one while the peer's last is still found to be dead.
With five pieces each they take 80 MiB at most."""
MAX_OPENINGS, MAX_OPENINGS_PER_PEER = 64, 8
"""Streams on which an exchange is only being asked for; one more, and the oldest of the busiest address makes room."""
PIECE_S = 60.0
"""Longest time for MAX_CHUNK_BYTES before the exchange is given up. That is 140 kbit/s: a seventh of a home uplink of 1
Mbit/s, which gossip and another exchange may share, on a machine that is busy training. Waits for this node's own
limits do not count."""
MAX_IN_FLIGHT = 16
"""Pieces that may have left here and not have arrived there: as much as a stream's window (yamux) can grow."""
EXCHANGE_S = 7200.0
"""Longest that one accepted may take: 500 MB at 1 Mbit/s take more than an hour. Callers have their own time limit."""
_ARRIVED = b"\6"
T = TypeVar("T")
U = TypeVar("U")


class Exchanges:
    """All exchanges of one node, its own and those that others ask for."""

    def __init__(self, traffic: Traffic, report: Callable[[str], None]) -> None:
        self.acceptors: dict[str, Acceptor] = {}  # method -> acceptor
        self.piece_s = PIECE_S  # see `PIECE_S`
        self._traffic = traffic
        self._report = report
        self._openings = Room(MAX_OPENINGS, MAX_OPENINGS_PER_PEER, report)
        self._running = Shares(MAX_EXCHANGES, MAX_EXCHANGES_PER_PEER)
        self._tasks = Running()

    def cancel(self) -> set[asyncio.Task[Any]]:
        """End all that are under way, and accept no more; the tasks that will have ended when their callbacks have."""
        self.acceptors.clear()
        return self._tasks.cancel()

    # ---------------------------------------------------------------- the caller's side

    async def call(self, stream: Stream, method: str, ours: Outgoing, answered: Callable[[bytes, int], Sink]) -> None:
        """Exchange with the peer at the other end, and close the stream. Raises PeerUnreachable, RemoteProtocolError,
        or LocalProtocolError for a fault in `ours` or `answered`."""
        try:
            with self._tasks.enter():
                await self._call(stream, method, ours, answered)
        except BaseException as error:
            stream.abort()
            let_go(error)
            raise
        finally:
            stream.close()

    async def _call(self, stream: Stream, method: str, ours: Outgoing, answered: Callable[[bytes, int], Sink]) -> None:
        check_call(method, ours)
        with self._judged(method, stream):
            stream.write_method(method)
            await self._write_head(stream, ours)
            status = await stream.read_exactly(1)
            head = await stream.read_frame(MAX_HEAD_BYTES if status == ANSWER else MAX_REFUSAL_BYTES)
        if status != ANSWER:
            raise refused(status, head)
        with self._judged(method, stream):
            size = await self._read_size(stream)
            sink = await self._in_thread(method, answered, head, size)
            await self._swap(stream, method, ours, size, sink)

    # ---------------------------------------------------------------- the acceptor's side

    async def serve(self, stream: Stream) -> None:
        """Take part in the one exchange on this stream, and close it."""
        try:
            with self._tasks.enter():
                failed = await self._serve(stream)
                if failed is not None:
                    await stream.answer(*failed)
        except (ProtocolError, EOFError, OSError, asyncio.CancelledError):  # by `cancel`: this was all there was to do
            stream.abort()
        finally:
            stream.close()

    async def _serve(self, stream: Stream) -> tuple[bytes, bytes] | None:
        """Status and reason if the peer is to be told that there is no exchange. Later failures are raised."""
        try:
            with self._judged("a call", stream):
                async with _within(REQUEST_READ_S) as deadline:
                    with self._openings.enter(stream, deadline):
                        method = await stream.read_method(deadline)
                        head = await stream.read_frame(MAX_HEAD_BYTES, deadline)
                        size = await self._read_size(stream, deadline)
        except RemoteProtocolError as error:
            return refusal(error)
        acceptor = self.acceptors.get(method)
        if acceptor is None:
            return stream.unknown(method)
        if not self._running.fits(stream):
            return stream.busy()
        with self._running.place(stream):
            return await self._accept(stream, method, acceptor, head, size)

    async def _accept(
        self, stream: Stream, method: str, acceptor: Acceptor, head: bytes, size: int
    ) -> tuple[bytes, bytes] | None:
        accepted: list[Accepted] = []
        outcome: Exception | None = PeerUnreachable("this node ended the exchange")

        def accept() -> Accepted:
            accepted.append(acceptor(stream.peer, head, size))  # known, and told the outcome, even if nobody waits
            check_call(method, accepted[0].ours)
            return accepted[0]

        try:
            try:
                with self._judged(method, stream):
                    theirs = await self._in_thread(method, accept)
            except RemoteProtocolError as error:
                outcome = error
                return refusal(error)
            except LocalProtocolError as error:
                outcome = error
                return UNAVAILABLE, b"failed"
            with self._judged(method, stream):
                async with _within(EXCHANGE_S):
                    stream.write(ANSWER)
                    await self._write_head(stream, theirs.ours)
                    await self._swap(stream, method, theirs.ours, size, theirs.sink)
            outcome = None
            return None
        except ProtocolError as error:
            outcome = error
            raise
        finally:
            let_go(outcome)
            for one in accepted:
                with suppress(ProtocolError):
                    await self._in_thread(method, one.done, outcome)

    # ---------------------------------------------------------------- both

    async def _write_head(self, stream: Stream, ours: Outgoing) -> None:
        await stream.write_frame(ours.head)
        stream.write(ours.size.to_bytes(8, "big"))

    async def _read_size(self, stream: Stream, deadline: asyncio.Timeout | None = None) -> int:
        size = int.from_bytes(await stream.read_exactly(8, deadline), "big")
        if size > MAX_BODY_BYTES:
            raise RemoteProtocolError("size", f"{size} bytes, allowed are {MAX_BODY_BYTES}")
        return size

    async def _swap(self, stream: Stream, method: str, ours: Outgoing, size: int, sink: Sink) -> None:
        """Swap the bodies. Raises the errors of `call`, and EOFError or OSError for a stream that broke."""
        promised = None if ours.promise is None else await self._promise(stream, method, ours.promise, size)
        await _both(self._receive(stream, method, size, sink, promised), self._send(stream, method, ours))
        stream.write(_ARRIVED)
        async with _within(self._whole_s(ours.size)) as deadline:
            # no drain: whoever has said the last word may have left
            if await stream.read_exactly(1, deadline) != _ARRIVED:
                raise RemoteProtocolError("schema", f"{method}: an unexpected byte after the body")

    async def _promise(self, stream: Stream, method: str, promise: Callable[[], bytes], size: int) -> bytes:
        """Promise this node's body. Returns the sha256 of the `size` bytes that the peer promises."""
        stream.write(await self._in_thread(method, promise))
        stream.traffic.bytes_out += 32
        async with _within(self._whole_s(size)) as deadline:  # the peer makes all of its body first
            promised = await stream.read_exactly(32, deadline)
        stream.traffic.bytes_in += 32
        return promised

    def _whole_s(self, size: int) -> float:
        """Longest wait for a peer that has so many bytes to make, or to take."""
        return self.piece_s * (1 + min(size // MAX_CHUNK_BYTES, MAX_IN_FLIGHT))

    async def _send(self, stream: Stream, method: str, ours: Outgoing) -> None:
        hashed, pieces = hashlib.sha256(), body_pieces(ours)

        def make() -> memoryview | None:
            piece = next(pieces, None)
            if piece is not None:
                hashed.update(piece)
            return piece

        piece = await self._in_thread(method, make)
        while piece is not None:
            stream.write(piece)
            stream.traffic.bytes_out += len(piece)
            _, piece = await _both(self._drain(stream), self._in_thread(method, make))
        stream.write(hashed.digest())
        await self._drain(stream)
        stream.traffic.bytes_out += 32

    async def _drain(self, stream: Stream) -> None:
        async with _within(self.piece_s) as deadline:
            await stream.drain(deadline)

    async def _receive(self, stream: Stream, method: str, size: int, sink: Sink, promised: bytes | None = None) -> None:
        hashed = hashlib.sha256()
        taken, next_ = (bytearray(min(size, MAX_CHUNK_BYTES)) for _ in range(2))

        def take(piece: memoryview) -> None:
            hashed.update(piece)
            sink(piece)

        piece = await self._read(stream, size, taken)
        left = size - len(piece)
        while piece:
            _, piece = await _both(self._in_thread(method, take, piece), self._read(stream, left, next_))
            left -= len(piece)
            taken, next_ = next_, taken
        async with _within(self.piece_s) as deadline:
            digest = await stream.read_exactly(32, deadline)
        stream.traffic.bytes_in += 32
        if digest != hashed.digest():
            raise RemoteProtocolError("hash", f"{method}: {size} bytes do not match their hash")
        if promised is not None and digest != promised:
            raise RemoteProtocolError("hash", f"{method}: {size} bytes other than those that were promised")

    async def _read(self, stream: Stream, left: int, buffer: bytearray) -> memoryview:
        """The next piece of a body of which `left` bytes are missing, in `buffer`."""
        piece = memoryview(buffer)[:left]
        async with _within(self.piece_s) as deadline:
            await stream.fill(piece, deadline)
        stream.traffic.bytes_in += len(piece)
        return piece

    async def _in_thread(self, method: str, callback: Callable[..., T], *arguments: object) -> T:
        """The result of a callback. A caller that cancels this waits for the callback, so none runs after the end of
        its exchange. Raises its RemoteProtocolError, and LocalProtocolError for any other error."""
        job = asyncio.get_running_loop().run_in_executor(None, callback, *arguments)
        cancelled = None
        while not job.done():
            try:
                await asyncio.wait({job})
            except asyncio.CancelledError as error:
                cancelled = error
        try:
            result = job.result()
        except RemoteProtocolError:
            if cancelled is None:
                raise
        except (Exception, asyncio.CancelledError) as error:  # a fault of ours: the exchange ends, this node lives on
            self._traffic.rejected["handler"] += 1
            self._report(f"exchanging {method!r} failed: {error!r}")
            if cancelled is None:
                raise LocalProtocolError(f"exchanging {method!r} failed: {error!r}") from error
        if cancelled is not None:
            try:
                raise cancelled
            finally:
                del job, cancelled, callback, arguments  # or its traceback, and so itself, would hold them
        return result

    @contextmanager
    def _judged(self, what: str, stream: Stream) -> Iterator[None]:
        """Turns errors of streams into RemoteProtocolError, and counts why an exchange failed: against the peer, unless
        the stream broke or was slow, which is nobody's fault."""
        try:
            try:
                yield
            except (EOFError, OSError) as error:
                raise RemoteProtocolError("torn", f"{what}: {error or type(error).__name__}") from error
        except RemoteProtocolError as error:
            if error.reason == "torn":
                stream.traffic.rejected["torn"] += 1
            else:
                stream.note(error.reason)
            raise
        except PeerUnreachable:
            stream.traffic.rejected["slow"] += 1
            raise


def check_call(method: str, ours: Outgoing) -> None:
    """Raises LocalProtocolError for a call that no peer would accept."""
    check_method(method)
    if len(ours.head) > MAX_HEAD_BYTES or not 0 <= ours.size <= MAX_BODY_BYTES:
        raise LocalProtocolError(f"a head of {len(ours.head)} and a body of {ours.size} bytes cannot be sent")


def body_pieces(ours: Outgoing) -> Iterator[memoryview]:
    """The pieces of a body, as bytes. Raises LocalProtocolError if they are too long or do not add up."""
    made = 0
    for piece in ours.pieces():
        view = memoryview(piece)
        if view.nbytes:
            made += view.nbytes
            if view.nbytes > MAX_CHUNK_BYTES or made > ours.size:
                raise LocalProtocolError(f"a piece of {view.nbytes} bytes, {made} so far of {ours.size}")
            yield view.cast("B")
    if made != ours.size:
        raise LocalProtocolError(f"pieces of {made} bytes together, where {ours.size} were promised")


def let_go(error: BaseException | None) -> None:
    """Release the buffers of the calls that led to an error: an error that is kept would keep them."""
    while error is not None:
        clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


async def _both(one: Coroutine[Any, Any, T], other: Coroutine[Any, Any, U]) -> tuple[T, U]:
    """The results of both. If one fails, the other is cancelled, and the error is raised when both have ended."""
    try:
        async with asyncio.TaskGroup() as group:
            first, second = group.create_task(one), group.create_task(other)
    except BaseExceptionGroup as failures:
        failure = failures.exceptions[0]
    else:
        return first.result(), second.result()
    try:
        raise failure
    finally:
        del failure, first, second, group  # or its traceback, and so itself, would hold them


@asynccontextmanager
async def _within(seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """Raises PeerUnreachable if the body of this block takes longer."""
    try:
        async with asyncio.timeout(seconds) as deadline:
            yield deadline
    except TimeoutError as error:
        raise PeerUnreachable(f"took longer than {in_seconds(seconds)}") from error
