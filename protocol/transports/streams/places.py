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

from protocol.errors import RemoteProtocolError


@dataclass(eq=False)
class _Guest:
    peer: str
    address: str
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

    def __len__(self) -> int:
        return len(self._guests)

    def held_by(self, peer: str) -> int:
        return sum(guest.peer == peer for guest in self._guests)

    @contextmanager
    def enter(self, peer: str, address: str, deadline: asyncio.Timeout) -> Iterator[None]:
        """Inside `deadline`, which is over at once for a stream that makes room: RemoteProtocolError, crowded."""
        guest = _Guest(peer, address, deadline)
        if self.held_by(peer) >= self.of_peer:
            self._end(next(other for other in self._guests if other.peer == peer))
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
        addresses = Counter(guest.address for guest in self._guests)
        peers = Counter(guest.peer for guest in self._guests)
        return max(self._guests, key=lambda guest: (addresses[guest.address], peers[guest.peer]))

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
        self.quarter = max(1, most // 4)
        self.peers: Counter[str] = Counter()
        self._addresses: Counter[str] = Counter()

    def __len__(self) -> int:
        return self.peers.total()

    def fits(self, peer: str, address: str) -> bool:
        """Whether there is a place for another stream of `peer`, at `address` ("" = unknown)."""
        modest = not address or self._addresses[address] < self.quarter
        return self.peers[peer] < self.of_peer and len(self) < self.most - (0 if modest else self.quarter)

    @contextmanager
    def place(self, peer: str, address: str) -> Iterator[None]:
        """Hold one, whether it fits or not."""
        for places, name in ((self.peers, peer), (self._addresses, address)):
            places[name] += 1
        try:
            yield
        finally:
            for places, name in ((self.peers, peer), (self._addresses, address)):
                places[name] -= 1
                if not places[name]:
                    del places[name]


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
