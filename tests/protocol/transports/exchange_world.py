"""Two nodes that exchange bodies over real sockets, for the tests of exchanges."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

from swarm_protocol.errors import PeerUnreachable, RemoteProtocolError
from swarm_protocol.limits import MAX_CHUNK_BYTES
from swarm_protocol.transports.base import Accepted, Outgoing
from swarm_protocol.transports.streams.exchanges import Exchanges
from swarm_protocol.transports.streams.stream import Stream, Traffic
from tests.support.clocks import HANG_S, Loop

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Tap = Callable[[str, int, bytes], Awaitable[bytes | None]]
"""(who sends, bytes before, bytes) -> what goes on; None = both ends see the stream end."""
TO_ACCEPTOR, TO_CALLER = "caller", "acceptor"


class Held(bytes):
    """What goes on, and nothing after it, although the stream stays open."""


def body(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


class Side:
    """What one peer sends and gets."""

    def __init__(self, size: int = 0, seed: int = 0, piece: int = MAX_CHUNK_BYTES) -> None:
        self.body = body(size, seed)
        self.piece = piece
        self.head = b"head %d" % seed
        self.claims = size
        self.promises: bytes | None = None
        """The sha256 that it promises; None = it promises nothing."""
        self.got = bytearray()
        self.taken: list[int] = []
        """Sizes of the pieces that its sink was given."""
        self.made = 0
        self.told: list[tuple[bytes, int]] = []
        """Head and size of the other."""
        self.threads: set[int] = set()
        self.outcomes: list[Exception | None] = []

    def pieces(self) -> Iterator[memoryview]:
        for start in range(0, len(self.body), self.piece):
            self.threads.add(threading.get_ident())
            self.made += 1
            yield memoryview(self.body)[start : start + self.piece]

    @property
    def outgoing(self) -> Outgoing:
        promise = None if self.promises is None else lambda: self.promises
        return Outgoing(self.head, self.claims, self.pieces, promise)

    def sink(self, piece: memoryview) -> None:
        self.threads.add(threading.get_ident())
        self.taken.append(len(piece))
        self.got += piece

    def answered(self, head: bytes, size: int) -> Callable[[memoryview], None]:
        self.threads.add(threading.get_ident())
        self.told.append((head, size))
        return self.sink

    def accept(self, peer: str, head: bytes, size: int) -> Accepted:
        self.answered(head, size)
        return Accepted(self.outgoing, self.sink, self.done)

    def done(self, error: Exception | None) -> None:
        self.threads.add(threading.get_ident())
        self.outcomes.append(error)

    def check(self, other: Side) -> None:
        """Whoever was told of success has everything."""
        assert len(self.outcomes) <= 1
        if self.outcomes == [None]:
            assert self.got == other.body and self.told == [(other.head, len(other.body))]


class Node:
    """Accepts, over streams that can be tapped; `said` = what it reported."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.traffic, self.callers = Traffic(), Traffic()
        self.exchanges = Exchanges(self.traffic, self.said.append)
        self.mine = Exchanges(self.callers, self.said.append)
        """The callers'."""
        self.tasks: list[asyncio.Task[None]] = []
        self.pumps: list[asyncio.Task[None]] = []
        self.writers: list[asyncio.StreamWriter] = []

    async def dial(self, peer: str = "peer", tap: Tap | None = None) -> Streams:
        """A stream to here."""
        near, far = await self.pair() if tap is None else await self._tapped(tap)
        self.tasks.append(asyncio.create_task(self.exchanges.serve(Stream(*far, self.traffic, peer))))
        return near

    async def pair(self) -> tuple[Streams, Streams]:
        one, other = [await asyncio.open_connection(sock=end) for end in socket.socketpair()]
        self.writers += [one[1], other[1]]
        return one, other

    async def _tapped(self, tap: Tap) -> tuple[Streams, Streams]:
        (caller, ours), (theirs, acceptor) = await self.pair(), await self.pair()

        async def pump(who: str, source: Streams, target: Streams) -> None:
            passed = 0
            try:
                while data := await source[0].read(2**16):
                    changed = await tap(who, passed, data)
                    target[1].write(data if changed is None else changed)
                    passed += len(data)
                    await target[1].drain()
                    if isinstance(changed, Held):
                        await asyncio.Event().wait()
                    if changed is not None and len(changed) < len(data):
                        break
            except OSError:
                pass
            for _, writer in (ours, theirs):
                writer.close()

        self.pumps += [
            asyncio.create_task(pump(TO_ACCEPTOR, ours, theirs)),
            asyncio.create_task(pump(TO_CALLER, theirs, ours)),
        ]
        return caller, acceptor

    async def call(self, us: Side, peer: str = "peer", method: str = "swap", tap: Tap | None = None) -> None:
        """Exchange, and note how it went."""
        reader, writer = await self.dial(peer, tap)
        try:
            await self.mine.call(Stream(reader, writer, self.callers, peer), method, us.outgoing, us.answered)
        except Exception as error:
            us.outcomes.append(error)
        else:
            us.outcomes.append(None)

    async def run(self, us: Side, them: Side, tap: Tap | None = None) -> tuple[Exception | None, Exception | None]:
        """One exchange: how it ended for the caller and for the acceptor."""
        self.exchanges.acceptors["swap"] = them.accept
        async with asyncio.timeout(HANG_S):
            await self.call(us, tap=tap)
            await asyncio.gather(*self.tasks)
        us.check(them)
        them.check(us)
        assert len(them.outcomes) == len(them.told)
        return us.outcomes[0], them.outcomes[0] if them.outcomes else PeerUnreachable("was not asked")


@asynccontextmanager
async def node() -> AsyncIterator[Node]:
    node = Node()
    try:
        yield node
    finally:
        for pump in node.pumps:
            pump.cancel()
        for writer in node.writers:
            writer.transport.abort()
        await asyncio.wait_for(asyncio.gather(*node.tasks), HANG_S)
        await asyncio.gather(*node.pumps, return_exceptions=True)
        await asyncio.sleep(0)  # for sockets to be closed
        assert not node.exchanges.cancel()


async def until_still(busy: int) -> None:
    """Until so many threads work, and nothing else can happen before one of them is done."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Loop)
    turns = 0
    async with asyncio.timeout(HANG_S):
        while turns < 100:
            still = loop.clock.working == busy
            turns = turns + 1 if still else 0
            await asyncio.sleep(0 if still else 0.01)


def reason(error: Exception | None) -> str:
    return error.reason if isinstance(error, RemoteProtocolError) else type(error).__name__


HEAD = (
    (4).to_bytes(8, "big") + bytes.fromhex("9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08") + b"test"
)
