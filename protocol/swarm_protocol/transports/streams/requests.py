"""Requests and answers over a byte stream between two peers.

    request = method | frame          answer = status | frame                                       as in `stream`

A request takes a place after it was read (`places`). Answers of `LARGE_METHODS` have few places of their own and all
others are short, so memory is bounded and large answers never stand in the way of short ones. The manifest, and the
cards that come with it, have places that no other method may take. A peer that takes an answer too slowly is dropped.
Servers and long hashes run in threads: the loop goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.first_cards import CARDS_METHOD
from swarm_protocol.limits import MAX_REQUEST_BYTES, MAX_RESPONSE_BYTES
from swarm_protocol.manifest import FILE_METHOD, MANIFEST_METHOD
from swarm_protocol.transports.base import Server
from swarm_protocol.transports.streams.places import Room, Shares
from swarm_protocol.transports.streams.stream import (
    ANSWER,
    MAX_REFUSAL_BYTES,
    REQUEST_READ_S,
    UNAVAILABLE,
    Stream,
    Traffic,
    refused,
)

LARGE_METHODS = frozenset({FILE_METHOD})
"""Methods whose answers may have `MAX_RESPONSE_BYTES`; all others have `MAX_SHORT_BYTES`."""
MAX_SHORT_BYTES = 2**20  # largest answer that a caller accepts by default
PROMPT_METHODS = frozenset({MANIFEST_METHOD, CARDS_METHOD})
"""Methods with places of their own: their answers are small and ready, and a newcomer can do nothing without them."""
MAX_PROMPT = 32
"""Answers to `PROMPT_METHODS` at once, of 64 KiB each; one more, and the oldest of the busiest address makes room."""
MAX_UNREAD, MAX_UNREAD_PER_PEER = 128, 8
"""Requests being read, of all peers and of one: 8 MiB in memory at most. The oldest make room."""
MAX_ANSWERS, MAX_ANSWERS_PER_PEER = 64, 4
"""Requests being answered, of all peers and of one, after they were read. Others are told to come back later."""
MAX_LARGE, MAX_LARGE_PER_PEER = 4, 1  # large answers among these: 256 MiB in memory at most
ANSWER_READY_S = 180.0  # longest time until an answer is ready. `write_frame` limits the time in which it is taken.


async def ask(stream: Stream, method: str, payload: bytes, limit: int) -> bytes:
    """The answer of the peer at the other end. Raises PeerUnreachable, or RemoteProtocolError for a refusal or an
    answer that is torn, altered or longer than `limit` bytes."""
    try:
        stream.write_method(method)
        await stream.write_frame(payload)
        status = await stream.read_exactly(1)
        answer = await stream.read_frame(limit if status == ANSWER else MAX_REFUSAL_BYTES)
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

    async def serve(self, stream: Stream) -> None:
        """Answer the one request on this stream, and close it."""
        try:
            try:
                async with asyncio.timeout(REQUEST_READ_S) as deadline:
                    with self._unread.enter(stream, deadline):
                        method = await stream.read_method(deadline)
                        payload = await stream.read_frame(MAX_REQUEST_BYTES, deadline)
            except RemoteProtocolError as error:
                if error.reason == "crowded":
                    raise
                await stream.answer(*stream.refuse(error))
                return
            async with asyncio.timeout(None) as deadline:
                with ExitStack() as places:
                    await stream.answer(*await self._answer(stream, method, payload, deadline, places))
        except RemoteProtocolError as error:  # crowded
            stream.note(error.reason)
            stream.abort()
        except (TimeoutError, EOFError, OSError):
            self._traffic.rejected["torn"] += 1
            stream.abort()
        finally:
            stream.close()

    async def _answer(
        self, stream: Stream, method: str, payload: bytes, deadline: asyncio.Timeout, places: ExitStack
    ) -> tuple[bytes, bytes]:
        """(status, answer). The places that it takes are left with `places`."""
        server, large = self.servers.get(method), method in LARGE_METHODS
        if server is None:
            return stream.unknown(method)
        if method in PROMPT_METHODS:
            places.enter_context(self._prompt.enter(stream, deadline))
        else:
            for shares in (self._running, self._large) if large else (self._running,):
                if not shares.fits(stream):
                    return stream.busy()
                places.enter_context(shares.place(stream))
        try:
            async with asyncio.timeout(ANSWER_READY_S):
                thread = self._prompt_thread if method in PROMPT_METHODS else None
                answer = await asyncio.get_running_loop().run_in_executor(thread, server, stream.peer, payload)
            if len(answer) > (MAX_RESPONSE_BYTES if large else MAX_SHORT_BYTES):
                raise ValueError(f"an answer of {len(answer)} bytes")
        except RemoteProtocolError as error:
            return stream.refuse(error)
        except TimeoutError:
            raise
        except Exception as error:  # a fault of ours: the peer gets an answer, and this node lives on
            self._traffic.rejected["handler"] += 1
            self._report(f"answering {method!r} failed: {error!r}")
            return UNAVAILABLE, b"failed"
        return ANSWER, answer
