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

    def __init__(self, bytes_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.bytes_s = bytes_s
        self._clock = clock
        self._bucket = TokenBucket(bytes_s, BANDWIDTH_BURST_S * bytes_s, clock(), level=0.0)

    def take(self, size: int) -> float:
        """Count `size` bytes. Returns the seconds until the next may follow."""
        return self._bucket.take(size, self._clock()) if self.bytes_s else 0.0


class PacedStream:
    """A stream that reads and sends no faster than limits allow, which all streams share. To the sender, the network is
    slow. Waits for the limits extend the `deadline` of the call, since they are not the other end's fault."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, upload: Bandwidth, download: Bandwidth
    ) -> None:
        self.reader, self.writer = reader, writer
        self._upload, self._download = upload, download
        self._unpaid_s = LATENCY_S
        """Seconds for the bytes read since the last wait. Small messages, such as beats, do not wait for other
        streams."""
        self._queue: deque[memoryview] = deque()  # what is to be sent by `drain`
        self._owed_s = 0.0  # seconds for bytes that have left and were not waited for yet

    async def read(self, n: int, deadline: asyncio.Timeout | None = None) -> bytes:
        data = await self.reader.read(min(n, PACED_BYTES) if self._download.bytes_s else n)
        await self._pay(len(data), deadline)
        return data

    async def read_exactly(self, n: int, deadline: asyncio.Timeout | None = None) -> bytes:
        data = await self.reader.readexactly(n)
        await self._pay(len(data), deadline)
        return data

    async def _pay(self, size: int, deadline: asyncio.Timeout | None) -> None:
        if not self._download.bytes_s:
            return
        wait = self._download.take(size)
        self._unpaid_s += size / self._download.bytes_s
        if self._unpaid_s > LATENCY_S:
            self._unpaid_s = 0.0
            await _wait(wait, deadline)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Short data leaves at once, and the next `drain` waits for it; the rest leaves in `drain`."""
        view = memoryview(data)
        if self._upload.bytes_s and (self._queue or len(view) > PACED_BYTES):
            self._queue += (view[start : start + PACED_BYTES] for start in range(0, len(view), PACED_BYTES))
        else:
            self._owed_s = self._upload.take(len(view))
            self.writer.write(view)

    async def drain(self, deadline: asyncio.Timeout | None = None) -> None:
        await self._send(deadline)
        while self._queue:
            piece = self._queue.popleft()
            self._owed_s = self._upload.take(len(piece))
            self.writer.write(piece)
            await self._send(deadline)

    async def _send(self, deadline: asyncio.Timeout | None) -> None:
        await self.writer.drain()
        wait, self._owed_s = self._owed_s, 0.0
        if wait > LATENCY_S:
            await _wait(wait, deadline)

    def close(self) -> None:
        if self._queue:  # given up in the middle of it
            self._queue.clear()
            self.abort()
        self.writer.close()

    def abort(self) -> None:
        """End the stream; what the other end has not taken by now need not be kept."""
        self.writer.transport.abort()


async def _wait(seconds: float, deadline: asyncio.Timeout | None) -> None:
    if deadline is not None:
        put_off(deadline, seconds)
    await asyncio.sleep(seconds)


def put_off(deadline: asyncio.Timeout, seconds: float) -> None:
    if (when := deadline.when()) is not None:
        deadline.reschedule(when + seconds)
