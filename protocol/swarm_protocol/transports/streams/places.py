"""Places for the streams that others open to this node's daemon.

A stream is in a `Room` while its first bytes are read, and takes a place in `Shares` after that. When a room is full,
the oldest stream of the busiest address makes room for the next one: addresses count before peers, because keys are
free. An honest request arrives within one round trip, so a full room is full of others. A stream with a place was read
whole and stays. The last quarter of the places is for addresses that hold less than a quarter themselves.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.transports.streams.stream import Stream


@dataclass(eq=False)
class _Guest:
    stream: Stream
    deadline: asyncio.Timeout
    must_go: bool = False


class Room:
    """At most `most` streams at a time, `of_peer` of one peer. The next one ends another."""

    def __init__(self, most: int, of_peer: int, report: Callable[[str], None]) -> None:
        """`report` is called once, when streams first had to make room."""
        self.most, self.of_peer = most, of_peer
        self._report = report
        self._reported = False
        self._guests: dict[_Guest, None] = {}  # the oldest first

    @contextmanager
    def enter(self, stream: Stream, deadline: asyncio.Timeout) -> Iterator[None]:
        """Inside `deadline`, which is over at once for a stream that makes room: RemoteProtocolError, crowded."""
        guest = _Guest(stream, deadline)
        siblings = [other for other in self._guests if other.stream.peer == stream.peer]
        if len(siblings) >= self.of_peer:
            self._end(siblings[0])
        elif len(self._guests) >= self.most:
            self._end(self._loser())
        self._guests[guest] = None
        try:
            yield
        except asyncio.CancelledError:
            if guest.must_go:
                raise RemoteProtocolError("crowded", "too many streams from there") from None
            raise
        finally:
            self._guests.pop(guest, None)

    def _loser(self) -> _Guest:
        addresses = Counter(guest.stream.address for guest in self._guests)
        peers = Counter(guest.stream.peer for guest in self._guests)
        return max(self._guests, key=lambda guest: (addresses[guest.stream.address], peers[guest.stream.peer]))

    def _end(self, guest: _Guest) -> None:
        del self._guests[guest]
        guest.must_go = True
        if not self._reported:
            self._reported = True
            self._report("more streams are opened than can be read: the oldest of the busiest address make room")
        guest.deadline.reschedule(asyncio.get_running_loop().time())


class Shares:
    """At most `most` places, `of_peer` for one peer. A stream keeps its place."""

    def __init__(self, most: int, of_peer: int) -> None:
        self.most, self.of_peer = most, of_peer
        self._quarter = max(1, most // 4)
        self._held: list[Stream] = []

    def fits(self, stream: Stream) -> bool:
        """Whether there is a place for another stream."""
        of_peer = sum(one.peer == stream.peer for one in self._held)
        of_address = sum(one.address == stream.address for one in self._held) if stream.address else 0
        places = self.most if of_address < self._quarter else self.most - self._quarter
        return of_peer < self.of_peer and len(self._held) < places

    @contextmanager
    def place(self, stream: Stream) -> Iterator[None]:
        """Hold one, whether it fits or not."""
        self._held.append(stream)
        try:
            yield
        finally:
            self._held.remove(stream)


class Running:
    """The tasks in which exchanges or channels of one node live."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Count the current task as running."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            yield
        finally:
            self._tasks.discard(task)

    def cancel(self) -> set[asyncio.Task[Any]]:
        """Cancel all tasks. Returns those that will end."""
        for task in self._tasks:
            task.cancel()
        return set(self._tasks)
