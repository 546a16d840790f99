"""Transfers: exchanges in which one side, the giver, sends a body and the other only asks for it.

    asker --(head: what it wants)--> giver        giver --(head | body)--> asker

The three transfers (a cohort's weights, a stage's weights, pieces of the base model) share what is here: how slow one
may be (`Pace`), whom a giver serves now (`UploadSlots`), and when an asker tries a giver again (`Donor`, `Retry`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from swarm_protocol.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from swarm_protocol.limits import MAX_CHUNK_BYTES
from swarm_protocol.transports.base import Accepted, Outgoing

T = TypeVar("T")
ASKED_LATELY_S = 20.0
"""A peer that asked so recently still wants an upload slot: one that was told `busy` asks again sooner."""
ACCIDENTS = frozenset({"unreachable", "torn", "slow"})
"""Reasons for which a transfer fails though both sides meant well: the same giver is worth another try."""


@dataclass(frozen=True)
class Pace:
    """The slowest transfer that is waited for."""

    grace_s: float
    bytes_per_s: float

    def seconds(self, size: int) -> float:
        """How long `size` bytes may take."""
        return self.grace_s + size / self.bytes_per_s


def expect_no_body(size: int) -> None:
    """Raise RemoteProtocolError (size) if an asker announces a body."""
    if size:
        raise RemoteProtocolError("size", f"{size} bytes where none are wanted")


def no_body(piece: memoryview) -> None:
    """The sink for the body of an asker, which has none. Raises RemoteProtocolError: size."""
    expect_no_body(len(piece))


def chunks(data: memoryview) -> Iterator[memoryview]:
    """`data` in views of at most `MAX_CHUNK_BYTES`."""
    for start in range(0, len(data), MAX_CHUNK_BYTES):
        yield data[start : start + MAX_CHUNK_BYTES]


def in_time(
    pieces: Iterable[memoryview], until: Callable[[int], float], now: Callable[[], float]
) -> Iterator[memoryview]:
    """`pieces`, while they are taken fast enough: the next one, after n bytes, before the time `until(n)`. Raises
    RemoteProtocolError: slow."""
    taken = 0
    for piece in pieces:
        if now() > until(taken):
            raise RemoteProtocolError("slow", "the weights were not taken in time")
        taken += len(piece)
        yield piece


def outcome(done: Future[None], value: Callable[[], T]) -> Future[T]:
    """A future for what `value` returns or raises once the exchange is `done`; it fails if the exchange did."""
    result: Future[T] = Future()

    def judge(future: Future[None]) -> None:
        try:
            if future.cancelled():
                raise RemoteProtocolError("torn", "given up")
            future.result()
            found = value()
        except Exception as error:
            result.set_exception(error)
        else:
            result.set_result(found)

    done.add_done_callback(judge)
    return result


def reason_of(error: BaseException) -> tuple[str, str]:
    """(reason, detail) of a failed exchange."""
    if isinstance(error, RemoteProtocolError):
        return error.reason, error.detail
    if isinstance(error, LocalProtocolError):
        return "fault", str(error)
    return ("unreachable" if isinstance(error, ProtocolError) else type(error).__name__.lower()), str(error)


@dataclass(frozen=True, eq=False)
class UploadSlot:
    """A transfer to `peer` that has been allowed."""

    peer: str
    since: float
    until: float  # then the upload slot is free for others, whether the transfer has ended or not


class UploadSlots:
    """The peers that are given weights now: `at_once` transfers, `per_peer` to each. For any thread."""

    def __init__(self, at_once: int, per_peer: int, now: Callable[[], float]) -> None:
        self.at_once = at_once
        self.per_peer = per_peer
        self._now = now
        self._guard = threading.Lock()  # guards all below
        self._held: list[UploadSlot] = []
        self._all_wait_until = -math.inf
        self._wait_until: dict[str, float] = {}  # peer -> when it may have an upload slot again
        self._yield_until: dict[str, float] = {}
        """Peer -> until when it gets an upload slot only if no other peer wants one."""
        self._asked_until: dict[str, float] = {}  # peer -> until when it counts as one that wants an upload slot

    def give(
        self,
        peer: str,
        make: Callable[[UploadSlot], Outgoing],
        over: Callable[[UploadSlot, int, Exception | None], None],
        seconds: float = math.inf,
    ) -> Accepted:
        """Give `peer` what `make` returns, within `seconds`. `over` is called once when that has left or failed, with
        its bytes and the error; it has to call `leave`. Raises RemoteProtocolError (busy), and what `make` raises."""
        slot = self.take(peer, seconds)
        try:
            ours = make(slot)
        except BaseException:
            self.leave(slot)
            raise
        return Accepted(ours, no_body, partial(over, slot, ours.size))

    def take(self, peer: str, seconds: float = math.inf) -> UploadSlot:
        """An upload slot for `peer`, for at most `seconds`. Raises RemoteProtocolError: busy."""
        now = self._now()
        with self._guard:
            self._tidy(now)
            if not self._may_have_one(peer, now):
                raise RemoteProtocolError("busy", "other peers are given weights now, or this one was a moment ago")
            slot = UploadSlot(peer, now, now + seconds)
            self._held.append(slot)
        return slot

    def leave(self, slot: UploadSlot, wait_s: float = 0.0, all_wait_s: float = 0.0, yield_s: float = 0.0) -> None:
        """The transfer is over. Its peer gets no upload slot for `wait_s`, nor does any peer for `all_wait_s`
        (unless the slot had run out), and for `yield_s` it gives way to others."""
        now = self._now()
        with self._guard:
            self._wait_until[slot.peer] = max(self._wait_until.get(slot.peer, now), now + wait_s)
            self._yield_until[slot.peer] = max(self._yield_until.get(slot.peer, now), now + yield_s)
            if slot in self._held:
                self._held.remove(slot)
                self._all_wait_until = now + all_wait_s

    def _may_have_one(self, peer: str, now: float) -> bool:
        if now < self._all_wait_until or peer in self._wait_until:
            return False
        if peer not in self._yield_until:
            self._asked_until[peer] = now + ASKED_LATELY_S
        elif self._asked_until.keys() - {peer}:
            return False
        return len(self._held) < self.at_once and sum(slot.peer == peer for slot in self._held) < self.per_peer

    def _tidy(self, now: float) -> None:
        """Free the upload slots that have run out; their peers wait as long as they had them. Forget waits that are
        over."""
        for slot in [slot for slot in self._held if slot.until <= now]:
            self._held.remove(slot)
            self._wait_until[slot.peer] = slot.until + (slot.until - slot.since)
        for times in (self._wait_until, self._yield_until, self._asked_until):
            for peer in [peer for peer, until in times.items() if until <= now]:
                del times[peer]


@dataclass(frozen=True)
class Retry:
    """How long a giver is left alone, by the reason for which it gave nothing."""

    busy_s: float
    accident_s: float  # after one of `ACCIDENTS`; each further one in a row doubles it
    max_accident_s: float = math.inf
    max_accidents: float = math.inf  # after so many in a row the giver is not asked again
    refused_s: float = math.inf  # after any other reason


@dataclass
class Donor:
    """A peer that may give weights."""

    next_at: float = -math.inf  # the time before which it is not asked
    accidents: int = 0  # how many there were in a row

    def failed(self, reason: str, now: float, retry: Retry, jitter: float = 1.0) -> None:
        """Record that it gave nothing, for `reason`. `jitter` stretches the pause after `busy`."""
        if reason in ACCIDENTS:
            self.accidents += 1
            pause = min(retry.max_accident_s, retry.accident_s * 2.0 ** min(self.accidents - 1, 30))
            pause = pause if self.accidents < retry.max_accidents else math.inf
        else:
            pause = retry.busy_s * jitter if reason == "busy" else retry.refused_s
        self.next_at = now + pause
