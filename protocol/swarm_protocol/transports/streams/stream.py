"""One stream between two peers, within this node's limits, and what all conversations on streams are made of.

    method   length (1 byte) | method
    frame    length (8 bytes, big-endian) | sha256 (32 bytes) | payload, in pieces of at most MAX_CHUNK_BYTES
    status   1 byte, then a frame         0: the answer    1: a refusal, "reason\\ndetail"    2: not to be had, why

Streams may end early without an error (their daemon died), so only a payload of the right length and hash counts.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import Counter, deque
from dataclasses import dataclass, field

from swarm_protocol.errors import LocalProtocolError, PeerUnreachable, ProtocolError, RemoteProtocolError
from swarm_protocol.limits import MAX_CHUNK_BYTES
from swarm_protocol.transports.pacing import Bandwidth, bytes_s
from swarm_protocol.transports.refusals import Refusals
from swarm_protocol.transports.settings import NetworkSettings

PACED_BYTES = 2**14
LATENCY_S = 0.05  # nobody waits for a limit for less: it adds up until it is more
GRACE_S, MIN_BYTES_PER_S = 10.0, 2**19
"""Slowest rate at which a frame may be taken, after a grace of ten seconds: 64 MiB at 4 Mbit/s take two minutes."""
REQUEST_READ_S = 10.0  # longest time in which a request may arrive. Waits for this node's own limit do not count.
MAX_REFUSAL_CHARS = 200
MAX_REFUSAL_BYTES = 2 * MAX_REFUSAL_CHARS
ANSWER, REFUSAL, UNAVAILABLE = b"\0", b"\1", b"\2"
_REASON = re.compile(r"[a-z0-9_/-]{1,32}")


@dataclass
class Traffic:
    """Payload bytes that passed through this node's daemon, without the overhead of libp2p, limits on them, and
    refusals."""

    upload: Bandwidth = field(default_factory=Bandwidth)
    download: Bandwidth = field(default_factory=Bandwidth)
    bytes_in: int = 0
    bytes_out: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    refusals: Refusals = field(init=False)  # refusals by source; `rejected` counts them too

    def __post_init__(self) -> None:
        self.refusals = Refusals(self.rejected)

    @classmethod
    def limited(cls, settings: NetworkSettings) -> Traffic:
        return cls(Bandwidth(bytes_s(settings.max_upload_mbit)), Bandwidth(bytes_s(settings.max_download_mbit)))


class Stream:
    """A stream to or from `peer`, whose neighbourhood (`hosts`) is `address`, if that is known.

    It reads and sends no faster than the limits of `traffic`, which all streams share. To the sender, the network is
    slow. Waits for the limits extend the `deadline` of a call: they are not the other end's fault.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        traffic: Traffic,
        peer: str,
        address: str = "",
    ) -> None:
        self.reader, self.writer = reader, writer
        self.traffic, self.peer, self.address = traffic, peer, address
        self._unpaid_s = LATENCY_S
        """Seconds for the bytes read since the last wait. Small messages, such as beats, do not wait for other
        streams."""
        self.quiet = 0  # beats of its channel since anything was read
        self._queue: deque[memoryview] = deque()  # what is to be sent by `drain`
        self._owed_s = 0.0  # seconds for bytes that have left and were not waited for yet

    async def read(self, n: int, deadline: asyncio.Timeout | None = None) -> bytes:
        data = await self.reader.read(min(n, PACED_BYTES) if self.traffic.download.bytes_s else n)
        self.quiet = 0
        await self._pay(len(data), deadline)
        return data

    async def read_exactly(self, n: int, deadline: asyncio.Timeout | None = None) -> bytes:
        data = await self.reader.readexactly(n)
        await self._pay(len(data), deadline)
        return data

    async def fill(self, missing: memoryview, deadline: asyncio.Timeout) -> None:
        """Read as much as goes into `missing`. Raises EOFError if the stream ends before that."""
        while missing:
            part = await self.read(len(missing), deadline)
            if not part:
                raise EOFError(f"{len(missing)} bytes are missing")
            missing[: len(part)] = part
            missing = missing[len(part) :]

    async def _pay(self, size: int, deadline: asyncio.Timeout | None) -> None:
        limit = self.traffic.download
        if limit.bytes_s:
            wait = limit.take(size)
            self._unpaid_s += size / limit.bytes_s
            if self._unpaid_s > LATENCY_S:
                self._unpaid_s = 0.0
                await _wait(wait, deadline)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Short data leaves at once, and the next `drain` waits for it. Under a limit, the rest leaves in `drain`."""
        view = memoryview(data)
        if self.traffic.upload.bytes_s and (self._queue or len(view) > PACED_BYTES):
            self._queue += (view[start : start + PACED_BYTES] for start in range(0, len(view), PACED_BYTES))
        else:
            self._leave(view)

    async def drain(self, deadline: asyncio.Timeout | None = None) -> None:
        while True:
            await self.writer.drain()
            wait, self._owed_s = self._owed_s, 0.0
            if wait > LATENCY_S:
                await _wait(wait, deadline)
            if not self._queue:
                return
            self._leave(self._queue.popleft())

    def _leave(self, piece: memoryview) -> None:
        self._owed_s = self.traffic.upload.take(len(piece))
        self.writer.write(piece)

    def close(self) -> None:
        if self._queue:  # given up in the middle of it
            self._queue.clear()
            self.abort()
        self.writer.close()

    def abort(self) -> None:
        """End the stream; what the other end has not taken by now need not be kept."""
        self.writer.transport.abort()

    def note(self, reason: str) -> None:
        """Count something that the peer did wrong, or was refused."""
        self.traffic.refusals.note(self.peer, reason, address=self.address)

    def refuse(self, error: RemoteProtocolError) -> tuple[bytes, bytes]:
        """Status and payload of a refusal, which is counted."""
        self.note(error.reason)
        return refusal(error)

    def busy(self) -> tuple[bytes, bytes]:
        """Status and payload for a peer that finds no place, which is counted."""
        self.note("busy")
        return UNAVAILABLE, b"busy"

    def unknown(self, method: str) -> tuple[bytes, bytes]:
        """Status and payload for a peer that asks for a method that this node does not have, which is counted."""
        self.note("method")
        return UNAVAILABLE, f"does not know the method {method[:64]!r}".encode()

    def write_method(self, method: str) -> None:
        self.write(bytes([len(method.encode())]) + method.encode())

    async def read_method(self, deadline: asyncio.Timeout) -> str:
        length = (await self.read_exactly(1, deadline))[0]
        return (await self.read_exactly(length, deadline)).decode(errors="replace")

    async def answer(self, status: bytes, payload: bytes) -> None:
        self.write(status)
        await self.write_frame(payload)

    async def write_frame(self, payload: bytes) -> None:
        """Send a frame. Raises TimeoutError if the peer is too slow."""
        long = len(payload) > MAX_CHUNK_BYTES
        digest = (await asyncio.to_thread(hashlib.sha256, payload) if long else hashlib.sha256(payload)).digest()
        self.write(len(payload).to_bytes(8, "big") + digest)
        view = memoryview(payload)
        async with asyncio.timeout_at(asyncio.get_running_loop().time() + GRACE_S) as deadline:
            for start in range(0, len(payload) or 1, MAX_CHUNK_BYTES):
                self.write(view[start : start + MAX_CHUNK_BYTES])
                await self.drain(deadline)
                put_off(deadline, MAX_CHUNK_BYTES / MIN_BYTES_PER_S)
        self.traffic.bytes_out += len(payload) + 40

    async def read_frame(self, limit: int, deadline: asyncio.Timeout | None = None) -> bytes:
        """The payload of the next frame. Raises RemoteProtocolError: size (before anything is allocated), torn or
        hash."""
        head = await self.read_exactly(40, deadline)
        size, digest = int.from_bytes(head[:8], "big"), head[8:]
        if size > limit:
            raise RemoteProtocolError("size", f"{size} bytes, allowed are {limit}")
        payload, hashed = bytearray(), hashlib.sha256()
        while len(payload) < size:
            piece = await self.read(min(MAX_CHUNK_BYTES, size - len(payload)), deadline)
            if not piece:
                raise RemoteProtocolError("torn", f"{len(payload)} of {size} bytes")
            payload += piece
            hashed.update(piece)
        self.traffic.bytes_in += size + 40
        if hashed.digest() != digest:
            raise RemoteProtocolError("hash", f"{size} bytes do not match their hash")
        return bytes(payload)


async def _wait(seconds: float, deadline: asyncio.Timeout | None) -> None:
    if deadline is not None:
        put_off(deadline, seconds)
    await asyncio.sleep(seconds)


def put_off(deadline: asyncio.Timeout, seconds: float) -> None:
    if (when := deadline.when()) is not None:
        deadline.reschedule(when + seconds)


def check_method(method: str) -> None:
    """Raises LocalProtocolError for a method that no peer can know."""
    if not 0 < len(method.encode()) < 256:
        raise LocalProtocolError(f"{method!r} cannot be a method")


def refusal(error: RemoteProtocolError) -> tuple[bytes, bytes]:
    """Status and payload of a refusal."""
    return REFUSAL, f"{error.reason}\n{error.detail[:MAX_REFUSAL_CHARS]}".encode()[:MAX_REFUSAL_BYTES]


def refused(status: bytes, answer: bytes) -> ProtocolError:
    """The error that a peer's refusal stands for."""
    text = "".join(c for c in answer.decode(errors="replace") if c.isprintable() or c == "\n")
    if status == UNAVAILABLE:
        return PeerUnreachable(text)
    reason, _, detail = text.partition("\n")
    return RemoteProtocolError(reason if _REASON.fullmatch(reason) else "refused", detail)
