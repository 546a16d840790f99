"""Limits on the bytes a second that a node sends and receives.

    half of each limit    the streams: exchanges, requests, channels         here, before p2pd
    the other half        gossip                                             at its TCP connections, in its process

DHT traffic is counted against the streams' half and never delayed. Streams that p2pd relays for others (`--relay`) do
not pass through here, so the limits do not include them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from protocol.budgets import TokenBucket

BANDWIDTH_BURST_S = 0.25  # unused bandwidth of this time may be made up for
PACED_BYTES = 2**14
OVERHEAD = 1.08  # bytes on the wire for one of ours: libp2p's encryption and multiplexing, TCP and IP
LATENCY_S = 0.05  # nobody waits for less: it adds up until it is more


def bytes_s(mbit: float) -> float:
    """Bytes a second of half of a limit in Mbit/s, in bytes of ours."""
    return mbit * 125_000 / 2 / OVERHEAD


class Bandwidth:
    """A limit in bytes a second that streams share; 0 = no limit. All calls come from one thread."""

    def __init__(self, bytes_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.bytes_s = bytes_s
        self._clock = clock
        self._bucket = TokenBucket(bytes_s, BANDWIDTH_BURST_S * bytes_s, clock(), level=0.0)

    def take(self, size: int) -> float:
        """Count `size` bytes. Returns the seconds until the next may follow."""
        return self._bucket.take(size, self._clock()) if self.bytes_s else 0.0


class PacedReader:
    """An `asyncio.StreamReader` that reads no faster than `limit` allows; to the sender, the network is slow. All
    streams share `limit`. A read extends its `deadline` by its wait."""

    def __init__(self, reader: asyncio.StreamReader, limit: Bandwidth) -> None:
        self._reader, self._limit = reader, limit
        self._unpaid_s = LATENCY_S
        """Seconds for the bytes of this stream since its last wait. Small messages, such as beats, do not wait for
        other streams."""

    async def read(self, n: int = -1, deadline: asyncio.Timeout | None = None) -> bytes:
        data = await self._reader.read(min(n, PACED_BYTES) if n >= 0 else PACED_BYTES)
        await self._wait(len(data), deadline)
        return data

    async def readexactly(self, n: int, deadline: asyncio.Timeout | None = None) -> bytes:
        data = await self._reader.readexactly(n)
        await self._wait(len(data), deadline)
        return data

    async def _wait(self, size: int, deadline: asyncio.Timeout | None) -> None:
        wait = self._limit.take(size)
        self._unpaid_s += size / self._limit.bytes_s
        if self._unpaid_s > LATENCY_S:
            self._unpaid_s = 0.0
            put_off(deadline, wait)
            await asyncio.sleep(wait)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)


class PacedWriter:
    """An `asyncio.StreamWriter` whose `drain` sends no faster than `limit` allows. Short data leaves at once, and the
    next `drain` waits for it."""

    def __init__(self, writer: asyncio.StreamWriter, limit: Bandwidth) -> None:
        self._writer, self._limit = writer, limit
        self._queue: deque[memoryview] = deque()
        self._owed_s = 0.0  # seconds for bytes that have left and were not waited for yet

    def write(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        if self._queue or len(view) > PACED_BYTES:
            self._queue += (view[start : start + PACED_BYTES] for start in range(0, len(view), PACED_BYTES))
        else:
            self._owed_s = self._limit.take(len(view))
            self._writer.write(view)

    async def drain(self, deadline: asyncio.Timeout | None = None) -> None:
        """Send what is queued. All streams share the limit, so `deadline` is extended by the wait for it."""
        await self._send(deadline)
        while self._queue:
            piece = self._queue.popleft()
            self._owed_s = self._limit.take(len(piece))
            self._writer.write(piece)
            await self._send(deadline)

    async def _send(self, deadline: asyncio.Timeout | None) -> None:
        await self._writer.drain()
        wait, self._owed_s = self._owed_s, 0.0
        if wait > LATENCY_S:
            put_off(deadline, wait)
            await asyncio.sleep(wait)

    def close(self) -> None:
        if self._queue:  # given up in the middle of it
            self._queue.clear()
            self._writer.transport.abort()
        self._writer.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)


async def drain(writer: asyncio.StreamWriter, deadline: asyncio.Timeout) -> None:
    """`writer.drain()`, where a limit of this node's own is not the other end's fault."""
    paced: Any = writer
    await (paced.drain(deadline) if isinstance(paced, PacedWriter) else paced.drain())


async def read(reader: asyncio.StreamReader, n: int, deadline: asyncio.Timeout | None) -> bytes:
    """`reader.read(n)`; waits for this node's own limit extend `deadline`."""
    paced: Any = reader
    data: bytes = await (paced.read(n, deadline) if isinstance(paced, PacedReader) else paced.read(n))
    return data


async def read_exactly(reader: asyncio.StreamReader, n: int, deadline: asyncio.Timeout | None) -> bytes:
    """`reader.readexactly(n)`; waits for this node's own limit extend `deadline`."""
    paced: Any = reader
    data: bytes = await (paced.readexactly(n, deadline) if isinstance(paced, PacedReader) else paced.readexactly(n))
    return data


def put_off(deadline: asyncio.Timeout | None, seconds: float) -> None:
    if deadline is not None and (when := deadline.when()) is not None:
        deadline.reschedule(when + seconds)


class Paces:
    """The limits for the streams of one node."""

    def __init__(self, upload_mbit: float, download_mbit: float) -> None:
        """0 = no limit."""
        self.upload, self.download = Bandwidth(bytes_s(upload_mbit)), Bandwidth(bytes_s(download_mbit))

    def of(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The same stream, within the limits."""
        paced: Any = reader, writer
        if self.download.bytes_s:
            paced = PacedReader(reader, self.download), paced[1]
        if self.upload.bytes_s:
            paced = paced[0], PacedWriter(writer, self.upload)
        return paced  # type: ignore[no-any-return]
