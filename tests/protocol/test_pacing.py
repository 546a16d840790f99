"""Bounds on bytes a second: counted on a clock of the test's, and kept on a real socket without a byte lost."""

from __future__ import annotations

import asyncio
import socket

import pytest

from protocol.limits import MAX_CHUNK_BYTES
from protocol.transports.pacing import BURST_S, PIECE_BYTES, Pace, PacedReader, PacedWriter, Paces, bytes_s
from protocol.transports.streams import Traffic, read_frame, write_frame


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_bytes_are_spread_and_rest_is_made_up_for_a_little() -> None:
    clock = Clock()
    pace = Pace(1000.0, clock)
    assert pace.take(500) == pytest.approx(0.5)
    assert pace.take(500) == pytest.approx(1.0), "whoever comes next waits for those before"
    clock.now += 1.5
    assert pace.take(1000) == pytest.approx(1.0 - BURST_S)
    clock.now += 3600.0
    assert pace.take(1000) == pytest.approx(1.0 - BURST_S)


def test_no_limit_is_no_limit() -> None:
    assert Pace(0.0).take(2**40) == 0.0
    paces = Paces(0.0, 0.0)
    reader, writer = object(), object()
    assert paces.of(reader, writer) == (reader, writer)  # type: ignore[arg-type, comparison-overlap]
    assert bytes_s(0.0) == 0.0 < bytes_s(8.0) < 500_000


class Slept:
    """What was waited for, at no cost."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        self.clock = Clock()
        monkeypatch.setattr("protocol.transports.pacing.asyncio.sleep", self.sleep)

    async def sleep(self, seconds: float, really=asyncio.sleep) -> None:
        self.seconds += seconds
        self.clock.now += seconds
        await really(0)


async def streams() -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    return [await asyncio.open_connection(sock=end) for end in socket.socketpair()]


@pytest.mark.parametrize("paced", ["writer", "reader"])
def test_a_frame_arrives_whole_in_the_time_it_may_take(monkeypatch: pytest.MonkeyPatch, paced: str) -> None:
    payload = bytes(range(256)) * (3 * MAX_CHUNK_BYTES // 512)
    slept = Slept(monkeypatch)
    pace = Pace(float(len(payload)), slept.clock)

    async def go() -> bytes:
        (_, writer), (reader, other) = await streams()
        ends = (PacedWriter(writer, pace), reader) if paced == "writer" else (writer, PacedReader(reader, pace))
        sent = asyncio.create_task(write_frame(ends[0], payload, Traffic()))  # type: ignore[arg-type]
        got = await read_frame(ends[1], 2**23, Traffic())  # type: ignore[arg-type]
        await sent
        for each in (writer, other):
            each.close()
            await each.wait_closed()
        return got

    assert asyncio.run(go()) == payload
    assert slept.seconds == pytest.approx(1.0, abs=BURST_S + PIECE_BYTES / len(payload))


def test_what_is_given_up_in_the_middle_does_not_leave_at_once() -> None:
    async def go() -> int:
        (_, writer), (reader, other) = await streams()
        paced = PacedWriter(writer, Pace(1000.0))
        paced.write(b"x" * 100)
        paced.write(b"y" * 100 * PIECE_BYTES)
        drain = asyncio.create_task(paced.drain())
        got = await reader.read(100)
        drain.cancel()
        paced.close()
        while data := await reader.read(2**20):
            got += data
        other.close()
        return len(got)

    assert asyncio.run(go()) <= 100 + PIECE_BYTES
