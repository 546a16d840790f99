"""Transfers: who is served, who is asked again when, and how long one may take."""

from __future__ import annotations

import math
from concurrent.futures import Future

import pytest

from swarm_protocol.errors import PeerUnreachable, RemoteProtocolError
from swarm_protocol.limits import MAX_CHUNK_BYTES
from swarm_protocol.transports.base import Accepted, Outgoing
from swarm_protocol.transports.transfer import (
    Donor,
    Pace,
    Retry,
    UploadSlot,
    UploadSlots,
    chunks,
    in_time,
    no_body,
    outcome,
    reason_of,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def is_busy(slots: UploadSlots, peer: str) -> bool:
    try:
        slots.leave(slots.take(peer))
    except RemoteProtocolError as error:
        assert error.reason == "busy"
        return True
    return False


def test_places_are_limited_in_all_and_for_each_peer(clock: Clock) -> None:
    slots = UploadSlots(3, 2, clock)
    first = [slots.take("a"), slots.take("a")]
    assert is_busy(slots, "a") and not is_busy(slots, "b")
    slots.take("b")
    assert is_busy(slots, "c")
    slots.leave(first[0])
    assert not is_busy(slots, "c") and not is_busy(slots, "a")


def test_waits_hold_for_one_peer_or_for_all(clock: Clock) -> None:
    slots = UploadSlots(1, 1, clock)
    slots.leave(slots.take("a"), wait_s=60.0, all_wait_s=5.0)
    assert is_busy(slots, "b")
    clock.now += 5.0
    assert not is_busy(slots, "b") and is_busy(slots, "a")
    clock.now += 55.0
    assert not is_busy(slots, "a")


def test_a_place_that_runs_out_is_free_for_others(clock: Clock) -> None:
    slots = UploadSlots(1, 1, clock)
    slow = slots.take("slow", 30.0)
    clock.now += 31.0
    assert is_busy(slots, "slow"), "it waits as long as it had the slot"
    other = slots.take("other")
    slots.leave(slow, all_wait_s=100.0)
    slots.leave(other)
    assert not is_busy(slots, "third"), "the end of a slot that had run out delays nobody"
    clock.now += 29.0
    assert not is_busy(slots, "slow")


def test_a_peer_that_yields_gets_what_others_leave(clock: Clock) -> None:
    slots = UploadSlots(2, 2, clock)
    slots.leave(slots.take("slow"), yield_s=100.0)
    clock.now += 21.0
    assert not is_busy(slots, "slow"), "no other peer asked lately"
    assert not is_busy(slots, "other") and is_busy(slots, "slow")
    clock.now += 80.0
    assert not is_busy(slots, "other") and not is_busy(slots, "slow")


def test_giving_frees_the_place_whatever_happens(clock: Clock) -> None:
    slots, ended = UploadSlots(1, 1, clock), list[tuple[int, Exception | None]]()

    def fails(slot: UploadSlot) -> Outgoing:
        raise RemoteProtocolError("gone")

    def over(slot: UploadSlot, size: int, error: Exception | None) -> None:
        ended.append((size, error))
        slots.leave(slot)

    with pytest.raises(RemoteProtocolError, match="gone"):
        slots.give("a", fails, over)
    accepted = slots.give("a", lambda slot: Outgoing(b"head", 7), over)
    assert isinstance(accepted, Accepted) and is_busy(slots, "b")
    with pytest.raises(RemoteProtocolError, match="size"):
        accepted.sink(memoryview(b"x"))
    accepted.done(None)
    assert ended == [(7, None)] and not is_busy(slots, "b")


def test_waits_are_forgotten_when_they_are_over(clock: Clock) -> None:
    slots = UploadSlots(1, 1, clock)
    for i in range(1000):
        slots.leave(slots.take(f"p{i}"), wait_s=3.0, yield_s=3.0)
        clock.now += 1.0
    assert max(len(slots._wait_until), len(slots._yield_until)) <= 4 and len(slots._asked_until) <= 21


def test_a_donor_is_asked_again_by_what_went_wrong() -> None:
    donor, retry = Donor(), Retry(busy_s=5.0, accident_s=1.0, max_accident_s=3.0, max_accidents=4, refused_s=20.0)
    pauses = []
    for reason in ("busy", "torn", "unreachable", "cohort", "slow", "torn"):
        donor.failed(reason, 100.0, retry)
        pauses.append(donor.next_at - 100.0)
    assert pauses == [5.0, 1.0, 2.0, 20.0, 3.0, math.inf]
    assert Donor().next_at == -math.inf
    donor = Donor()
    donor.accidents = 10**6
    donor.failed("torn", 0.0, Retry(busy_s=1.0, accident_s=1.0, max_accident_s=60.0))
    assert donor.next_at == 60.0


def test_a_body_that_is_taken_too_slowly_ends(clock: Clock) -> None:
    began, pace = clock.now, Pace(10.0, 2.0)
    pieces = in_time([memoryview(bytes(4))] * 3, lambda taken: began + pace.seconds(taken), clock)
    assert len(next(pieces)) == 4
    clock.now += 12.0
    assert len(next(pieces)) == 4
    clock.now += 2.1
    with pytest.raises(RemoteProtocolError, match="slow"):
        next(pieces)


def test_chunks_are_the_whole_and_small_enough() -> None:
    data = bytes(2 * MAX_CHUNK_BYTES + 3)
    assert [len(chunk) for chunk in chunks(memoryview(data))] == [MAX_CHUNK_BYTES, MAX_CHUNK_BYTES, 3]
    assert list(chunks(memoryview(b""))) == []
    no_body(memoryview(b""))


def test_an_outcome_is_a_value_or_the_error() -> None:
    done: list[Future[None]] = [Future() for _ in range(4)]
    found = [outcome(done[0], lambda: 3), outcome(done[1], lambda: 3), outcome(done[2], lambda: 3)]
    wrong = outcome(done[3], lambda: int("x"))
    done[0].set_result(None)
    done[1].set_exception(PeerUnreachable("away"))
    done[2].cancel()
    done[3].set_result(None)
    assert found[0].result(0) == 3 and isinstance(wrong.exception(0), ValueError)
    errors = [future.exception(0) for future in found[1:]]
    assert [reason_of(error)[0] for error in errors if error is not None] == ["unreachable", "torn"]
