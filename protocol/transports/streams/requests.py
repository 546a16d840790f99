"""Requests and answers over a byte stream between two peers.

    request  = method length (1 byte) | method | frame
    answer   = status (1 byte) | frame         0: the answer    1: a refusal, "reason\\ndetail"    2: not to be had, why
    frame    = length (8 bytes, big-endian) | sha256 (32 bytes) | payload, in pieces of at most MAX_CHUNK_BYTES

Streams may end early without an error (their daemon died), so only a payload of the right length and hash counts.

A request takes a place after it was read (`stream_places`). Answers of `LARGE_METHODS` have few places of their own and
all others are short, so memory is bounded and large answers never stand in the way of short ones; the manifest has
places that no other method may take. A peer that takes an answer too slowly is dropped. Servers and long hashes run in
threads: the loop goes on.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

from protocol.errors import LocalProtocolError, PeerUnreachable, ProtocolError, RemoteProtocolError
from protocol.limits import MAX_CHUNK_BYTES, MAX_REQUEST_BYTES, MAX_RESPONSE_BYTES
from protocol.manifest import FILE_METHOD, MANIFEST_METHOD
from protocol.transports.base import Server
from protocol.transports.pacing import drain, put_off, read, read_exactly
from protocol.transports.refusals import Refusals
from protocol.transports.streams.places import Room, Shares

LARGE_METHODS = frozenset({FILE_METHOD})
"""Methods whose answers may have `MAX_RESPONSE_BYTES`; all others have `MAX_SHORT_BYTES`."""
MAX_SHORT_BYTES = 2**20  # largest answer that a caller accepts by default
PROMPT_METHODS = frozenset({MANIFEST_METHOD})
"""Methods with places of their own: their answers are small and ready, and a newcomer can do nothing without them."""
MAX_PROMPT = 32
"""Answers to `PROMPT_METHODS` at once, of 64 KiB each; one more, and the oldest of the busiest address makes room."""
MAX_UNREAD, MAX_UNREAD_PER_PEER = 128, 8
"""Requests being read, of all peers and of one: 8 MiB in memory at most. The oldest make room."""
MAX_ANSWERS, MAX_ANSWERS_PER_PEER = 64, 4
"""Requests being answered, of all peers and of one, after they were read. Others are told to come back later."""
MAX_LARGE, MAX_LARGE_PER_PEER = 4, 1  # large answers among these: 256 MiB in memory at most
ANSWER_READY_S = 180.0  # longest time until an answer is ready. `write_frame` limits the time in which it is taken.
GRACE_S, MIN_BYTES_PER_S = 10.0, 2**19
"""Slowest rate at which an answer may be taken, after a grace of ten seconds: 64 MiB at 4 Mbit/s take two minutes."""
REQUEST_READ_S = 10.0  # longest time in which a request may arrive. Waits for this node's own limit do not count.
MAX_REFUSAL_CHARS = 200
MAX_REFUSAL_BYTES = 2 * MAX_REFUSAL_CHARS
ANSWER, REFUSAL, UNAVAILABLE = b"\0", b"\1", b"\2"
_REASON = re.compile(r"[a-z0-9_/-]{1,32}")


@dataclass
class Traffic:
    """Payload bytes that passed through this node's daemon, without the overhead of libp2p, and refusals."""

    bytes_in: int = 0
    bytes_out: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    refusals: Refusals = field(init=False)  # refusals by source; `rejected` counts them too

    def __post_init__(self) -> None:
        self.refusals = Refusals(self.rejected)


def check_method(method: str) -> None:
    """Raises LocalProtocolError for a method that no peer can know."""
    if not 0 < len(method.encode()) < 256:
        raise LocalProtocolError(f"{method!r} cannot be a method")


def write_method(writer: asyncio.StreamWriter, method: str) -> None:
    """Begin a stream with the name of a method."""
    writer.write(bytes([len(method.encode())]) + method.encode())


async def read_method(reader: asyncio.StreamReader, deadline: asyncio.Timeout) -> str:
    """The name of the method with which a stream begins."""
    length = (await read_exactly(reader, 1, deadline))[0]
    return (await read_exactly(reader, length, deadline)).decode(errors="replace")


def unknown(method: str) -> bytes:
    """The answer to a peer that asks for a method that this node does not have."""
    return f"does not know the method {method[:64]!r}".encode()


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
    try:
        write_method(writer, method)
        await write_frame(writer, payload, traffic)
        status = await reader.readexactly(1)
        answer = await read_frame(reader, limit if status == ANSWER else MAX_REFUSAL_BYTES, traffic)
    except (EOFError, OSError) as error:
        raise RemoteProtocolError("torn", f"answer to {method}: {error or type(error).__name__}") from error
    if status == ANSWER:
        return answer
    raise refused(status, answer)


class Answers:
    """Answers requests, a few at a time, whatever their senders do."""

    def __init__(self, traffic: Traffic, report: Callable[[str], None]) -> None:
        self.servers: dict[str, Server] = {}  # method -> server
        self._traffic = traffic
        self._report = report
        self._unread = Room(MAX_UNREAD, MAX_UNREAD_PER_PEER, report)
        self._prompt = Room(MAX_PROMPT, MAX_ANSWERS_PER_PEER, report)
        self._prompt_thread = ThreadPoolExecutor(1, "prompt")  # slow answers may hold all other threads
        self._running = Shares(MAX_ANSWERS, MAX_ANSWERS_PER_PEER)
        self._large = Shares(MAX_LARGE, MAX_LARGE_PER_PEER)

    def close(self) -> None:
        """End the thread; an answer that it works on is finished first. Nothing may be served afterwards."""
        self._prompt_thread.shutdown(wait=False, cancel_futures=True)

    async def serve(
        self, peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str = ""
    ) -> None:
        """Answer the one request on this stream, and close it. `address` = neighbourhood of `peer` (`hosts`)."""
        try:
            request = await self._read(peer, address, reader)
            async with asyncio.timeout(None) as deadline:
                with ExitStack() as places:
                    status, answer = await self._answer(peer, address, *request, deadline, places)
                    writer.write(status)
                    await write_frame(writer, answer, self._traffic)
        except RemoteProtocolError as error:
            self._note(peer, address, error.reason)
            if error.reason == "crowded":
                writer.transport.abort()
        except (TimeoutError, EOFError, OSError):
            self._traffic.rejected["torn"] += 1
            writer.transport.abort()  # what is not taken by now need not be kept
        finally:
            writer.close()

    async def _read(
        self, peer: str, address: str, reader: asyncio.StreamReader
    ) -> tuple[str, bytes | RemoteProtocolError]:
        """(method, payload, or why it cannot be read). Raises RemoteProtocolError: crowded."""
        async with asyncio.timeout(REQUEST_READ_S) as deadline:
            with self._unread.enter(peer, address, deadline):
                method = await read_method(reader, deadline)
                try:
                    return method, await read_frame(reader, MAX_REQUEST_BYTES, self._traffic, deadline)
                except RemoteProtocolError as error:
                    return method, error

    async def _answer(
        self,
        peer: str,
        address: str,
        method: str,
        payload: bytes | RemoteProtocolError,
        deadline: asyncio.Timeout,
        places: ExitStack,
    ) -> tuple[bytes, bytes]:
        """(status, answer). The places that it takes are left with `places`."""
        if isinstance(payload, RemoteProtocolError):
            return self._refuse(peer, address, payload)
        server, large = self.servers.get(method), method in LARGE_METHODS
        if server is None:
            self._note(peer, address, "method")
            return UNAVAILABLE, unknown(method)
        if method in PROMPT_METHODS:
            places.enter_context(self._prompt.enter(peer, address, deadline))
        else:
            for shares in (self._running, self._large) if large else (self._running,):
                if not shares.fits(peer, address):
                    self._note(peer, address, "busy")
                    return UNAVAILABLE, b"busy"
                places.enter_context(shares.place(peer, address))
        try:
            async with asyncio.timeout(ANSWER_READY_S):
                thread = self._prompt_thread if method in PROMPT_METHODS else None
                answer = await asyncio.get_running_loop().run_in_executor(thread, server, peer, payload)
            if len(answer) > (MAX_RESPONSE_BYTES if large else MAX_SHORT_BYTES):
                raise ValueError(f"an answer of {len(answer)} bytes")
        except RemoteProtocolError as error:
            return self._refuse(peer, address, error)
        except TimeoutError:
            raise
        except Exception as error:  # a fault of ours: the peer gets an answer, and this node lives on
            self._traffic.rejected["handler"] += 1
            self._report(f"answering {method!r} failed: {error!r}")
            return UNAVAILABLE, b"failed"
        return ANSWER, answer

    def _note(self, peer: str, address: str, reason: str) -> None:
        self._traffic.refusals.note(peer, reason, address=address)

    def _refuse(self, peer: str, address: str, error: RemoteProtocolError) -> tuple[bytes, bytes]:
        self._note(peer, address, error.reason)
        return REFUSAL, refusal(error)


def refusal(error: RemoteProtocolError) -> bytes:
    """A refusal as the payload of an answer."""
    return f"{error.reason}\n{error.detail[:MAX_REFUSAL_CHARS]}".encode()[:MAX_REFUSAL_BYTES]


def refused(status: bytes, answer: bytes) -> ProtocolError:
    """The error that a peer's refusal stands for."""
    text = "".join(c for c in answer.decode(errors="replace") if c.isprintable() or c == "\n")
    if status == UNAVAILABLE:
        return PeerUnreachable(text)
    reason, _, detail = text.partition("\n")
    return RemoteProtocolError(reason if _REASON.fullmatch(reason) else "refused", detail)


async def write_frame(writer: asyncio.StreamWriter, payload: bytes, traffic: Traffic) -> None:
    """Send a frame. Raises TimeoutError if the peer is too slow. Waits for this node's own limit do not count."""
    long = len(payload) > MAX_CHUNK_BYTES
    digest = (await asyncio.to_thread(hashlib.sha256, payload) if long else hashlib.sha256(payload)).digest()
    writer.write(len(payload).to_bytes(8, "big") + digest)
    view = memoryview(payload)
    async with asyncio.timeout_at(asyncio.get_running_loop().time() + GRACE_S) as deadline:
        for start in range(0, len(payload) or 1, MAX_CHUNK_BYTES):
            writer.write(view[start : start + MAX_CHUNK_BYTES])
            await drain(writer, deadline)
            put_off(deadline, MAX_CHUNK_BYTES / MIN_BYTES_PER_S)
    traffic.bytes_out += len(payload) + 40


async def read_frame(
    reader: asyncio.StreamReader, limit: int, traffic: Traffic, deadline: asyncio.Timeout | None = None
) -> bytes:
    """The payload of the next frame. Raises RemoteProtocolError: size (before anything is allocated), torn or hash.
    Waits for this node's own limit extend `deadline`."""
    head = await read_exactly(reader, 40, deadline)
    size, digest = int.from_bytes(head[:8], "big"), head[8:]
    if size > limit:
        raise RemoteProtocolError("size", f"{size} bytes, allowed are {limit}")
    payload, hashed = bytearray(), hashlib.sha256()
    while len(payload) < size:
        piece = await read(reader, min(MAX_CHUNK_BYTES, size - len(payload)), deadline)
        if not piece:
            raise RemoteProtocolError("torn", f"{len(payload)} of {size} bytes")
        payload += piece
        hashed.update(piece)
    traffic.bytes_in += size + 40
    if hashed.digest() != digest:
        raise RemoteProtocolError("hash", f"{size} bytes do not match their hash")
    return bytes(payload)
