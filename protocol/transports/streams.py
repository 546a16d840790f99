"""Requests and answers over a byte stream between two peers.

    request  = method length (1 byte) | method | frame
    answer   = status (1 byte) | frame         0: the answer    1: a refusal, "reason\\ndetail"    2: not to be had, why
    frame    = length (8 bytes, big-endian) | sha256 (32 bytes) | payload, in pieces of at most MAX_CHUNK_BYTES

Streams may end early without an error (their daemon died), so only a payload of the right length and hash counts.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from protocol.errors import PeerUnreachable, RemoteProtocolError
from protocol.limits import MAX_CHUNK_BYTES, MAX_REQUEST_BYTES, MAX_RESPONSE_BYTES
from protocol.transports.base import Server

MAX_ANSWERS = 16
"""Requests answered at once; more are told to come back later."""
MAX_ANSWERS_PER_PEER = 4
"""Of which for one peer."""
ANSWER_S = 120.0
"""Longest that one request may occupy a place: 64 MiB at 5 Mbit/s."""
REQUEST_S = 10.0
"""Longest that a request may take to arrive."""
MAX_DETAIL_CHARS = 200
_REASON = re.compile(r"[a-z0-9_/-]{1,32}")
_ANSWER, _REFUSAL, _UNAVAILABLE = b"\0", b"\1", b"\2"


@dataclass
class Traffic:
    """Payload bytes that passed through this node's daemon, without the overhead of libp2p, and what was refused."""

    bytes_in: int = 0
    bytes_out: int = 0
    rejected: Counter[str] = field(default_factory=Counter)


async def ask(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    method: str,
    payload: bytes,
    limit: int,
    traffic: Traffic,
) -> bytes:
    """The answer of the peer at the other end. Raises PeerUnreachable, or RemoteProtocolError for a refusal or an
    answer that is torn, altered or longer than `limit` bytes."""
    name = method.encode()
    try:
        writer.write(bytes([len(name)]) + name)
        await _write_frame(writer, payload, traffic)
        status = await reader.readexactly(1)
        answer = await _read_frame(reader, limit if status == _ANSWER else 2 * MAX_DETAIL_CHARS, traffic)
    except (EOFError, OSError) as error:
        raise RemoteProtocolError("torn", f"answer to {method}: {error or type(error).__name__}") from error
    if status == _ANSWER:
        return answer
    text = "".join(c for c in answer.decode(errors="replace") if c.isprintable() or c == "\n")
    if status == _UNAVAILABLE:
        raise PeerUnreachable(text)
    reason, _, detail = text.partition("\n")
    raise RemoteProtocolError(reason if _REASON.fullmatch(reason) else "refused", detail)


class Answers:
    """Answers requests, few at a time, whatever their senders do."""

    def __init__(self, traffic: Traffic, report: Callable[[str], None]) -> None:
        self.servers: dict[str, Server] = {}
        """Method -> who answers it."""
        self._traffic = traffic
        self._report = report
        self._running: Counter[str] = Counter()

    async def serve(self, peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the one request on this stream, and close it."""
        self._running[peer] += 1
        try:
            async with asyncio.timeout(ANSWER_S):
                status, answer = await self._answer(peer, reader)
                writer.write(status)
                await _write_frame(writer, answer, self._traffic)
        except RemoteProtocolError as error:
            self._traffic.rejected[error.reason] += 1
        except (TimeoutError, EOFError, OSError):
            self._traffic.rejected["torn"] += 1
        finally:
            self._running[peer] -= 1
            self._running += Counter()  # forgets zeros
            writer.close()

    async def _answer(self, peer: str, reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
        """(status, answer). Raises RemoteProtocolError for a request that cannot be read."""
        if self._running.total() > MAX_ANSWERS or self._running[peer] > MAX_ANSWERS_PER_PEER:
            self._traffic.rejected["busy"] += 1
            return _UNAVAILABLE, b"busy"
        async with asyncio.timeout(REQUEST_S):
            length = (await reader.readexactly(1))[0]
            method = (await reader.readexactly(length)).decode(errors="replace")
            server = self.servers.get(method)
            try:
                payload = await _read_frame(reader, MAX_REQUEST_BYTES, self._traffic)
            except RemoteProtocolError as error:
                self._traffic.rejected[error.reason] += 1
                return _REFUSAL, _refusal(error)
        if server is None:
            self._traffic.rejected["method"] += 1
            return _UNAVAILABLE, f"does not know the method {method[:64]!r}".encode()
        try:
            answer = server(peer, payload)
            if len(answer) > MAX_RESPONSE_BYTES:
                raise ValueError(f"an answer of {len(answer)} bytes")
        except RemoteProtocolError as error:
            self._traffic.rejected[error.reason] += 1
            return _REFUSAL, _refusal(error)
        except Exception as error:  # a fault of ours: the peer gets an answer, and this node lives on
            self._traffic.rejected["handler"] += 1
            self._report(f"answering {method!r} failed: {error!r}")
            return _UNAVAILABLE, b"failed"
        return _ANSWER, answer


def _refusal(error: RemoteProtocolError) -> bytes:
    return f"{error.reason}\n{error.detail[:MAX_DETAIL_CHARS]}".encode()[: 2 * MAX_DETAIL_CHARS]


async def _write_frame(writer: asyncio.StreamWriter, payload: bytes, traffic: Traffic) -> None:
    writer.write(len(payload).to_bytes(8, "big") + hashlib.sha256(payload).digest())
    view = memoryview(payload)
    for start in range(0, len(payload), MAX_CHUNK_BYTES):
        writer.write(view[start : start + MAX_CHUNK_BYTES])
        await writer.drain()
    await writer.drain()
    traffic.bytes_out += len(payload) + 40


async def _read_frame(reader: asyncio.StreamReader, limit: int, traffic: Traffic) -> bytes:
    """Raises RemoteProtocolError: size (before anything is allocated), torn or hash."""
    head = await reader.readexactly(40)
    size, digest = int.from_bytes(head[:8], "big"), head[8:]
    if size > limit:
        raise RemoteProtocolError("size", f"{size} bytes, allowed are {limit}")
    payload, hashed = bytearray(), hashlib.sha256()
    while len(payload) < size:
        piece = await reader.read(min(MAX_CHUNK_BYTES, size - len(payload)))
        if not piece:
            raise RemoteProtocolError("torn", f"{len(payload)} of {size} bytes")
        payload += piece
        hashed.update(piece)
    traffic.bytes_in += size + 40
    if hashed.digest() != digest:
        raise RemoteProtocolError("hash", f"{size} bytes that are not what their hash says")
    return bytes(payload)
