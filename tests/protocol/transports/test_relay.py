"""A place at a relay: what is asked, and what counts as an answer."""

from __future__ import annotations

import asyncio

import pytest

from swarm_protocol.errors import PeerUnreachable
from swarm_protocol.transports.p2p.relay import MAX_RELAY_ANSWER_BYTES, reserve

RESERVATION = b"\x1a\xc8\x01" + bytes(200)
"""Field 3, of 200 bytes: until when, where, and a voucher."""


def answered(answer: bytes) -> bytes:
    """What `reserve` sends to a relay that answers so, and hangs up."""
    sent = bytearray()

    class Writer:
        write = staticmethod(sent.extend)

    async def ask() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(answer)
        reader.feed_eof()
        await reserve(reader, Writer())  # type: ignore[arg-type]

    asyncio.run(ask())
    return bytes(sent)


def frame_around(message: bytes) -> bytes:
    size = len(message)
    return (bytes([size]) if size < 128 else bytes([size % 128 + 128, size // 128])) + message


@pytest.mark.parametrize("body", [b"", RESERVATION, RESERVATION + b"\x22\x09\x08\x88\x0e\x10\x80\x80\x80\x80\x10"])
def test_a_place_that_is_granted(body: bytes) -> None:
    assert answered(frame_around(b"\x08\x02" + body + b"\x28\x64")) == b"\x02\x08\x00"


@pytest.mark.parametrize(
    "answer",
    [
        frame_around(b"\x08\x02\x28\xc8\x01"),  # refused
        frame_around(b"\x08\x02\x28\xcc\x01"),  # no reservation
        frame_around(b""),
        b"\x80" + bytes([MAX_RELAY_ANSWER_BYTES // 128]) + bytes(MAX_RELAY_ANSWER_BYTES),
        b"\xff\xff\xff\xff",
    ],
)
def test_answers_that_grant_nothing(answer: bytes) -> None:
    with pytest.raises(PeerUnreachable):
        answered(answer)


@pytest.mark.parametrize("answer", [b"", b"\xd0", frame_around(b"\x08\x02" + RESERVATION + b"\x28\x64")[:-1]])
def test_answers_that_end_early(answer: bytes) -> None:
    with pytest.raises(EOFError):
        answered(answer)
