"""What gossip lets in."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import topics
from protocol.errors import RemoteProtocolError
from protocol.transports import gossip_gate
from protocol.transports.gossip_gate import Gate
from protocol.transports.gossip_pipe import (
    MAX_FRAME_BYTES,
    Command,
    Dial,
    Event,
    Frames,
    GossipSettings,
    Message,
    Publish,
    Subscribe,
    frame,
)
from tests.integration.gossip_samples import batch, peer_on_shard, seal_as

SWARM = "ab" * 32
TOPIC = topics.rollout_topic(SWARM, 0)
PEER = peer_on_shard(0, 2)
NOW = time.time()


def gate(**settings: Any) -> Gate:
    return Gate(GossipSettings(SWARM, shards=2, **settings))


def sealed(size: int = 1000, **changes: Any) -> bytes:
    return seal_as(msgspec.structs.replace(batch(SWARM, size), **{"created": NOW, **changes}), PEER)


@pytest.mark.parametrize(
    ("reason", "data"),
    [
        (None, sealed()),
        (None, sealed(created=NOW - 500)),
        (None, sealed(created=NOW + 20)),
        ("size", bytes(600_000)),
        ("size", b""),
        ("signature", bytes(1000)),
        ("signature", sealed()[:-1]),
        ("version", sealed(protocol=7)),
        ("schema", sealed(groups=[])),
        ("swarm", sealed(swarm="cd" * 32)),
        ("shard", seal_as(batch(SWARM, 1000), peer_on_shard(1, 2))),
        ("future", sealed(created=NOW + 40)),
        ("age", sealed(created=NOW - 700)),
    ],
)
def test_reasons(reason: str | None, data: bytes) -> None:
    assert gate().refusal(TOPIC, data, "origin", NOW) == reason


def test_a_batch_is_let_in_once_whoever_wraps_it() -> None:
    door, data = gate(), sealed()
    assert door.refusal(TOPIC, data, "origin", NOW) is None
    assert door.refusal(TOPIC, data, "another", NOW) == "seen"


def test_messages_of_an_author_are_capped_and_the_cap_refills() -> None:
    door = gate(messages_per_minute=10)
    verdicts = [door.refusal(TOPIC, sealed(), f"origin {i}", NOW) for i in range(15)]
    assert verdicts == [None] * 10 + ["rate"] * 5
    later = [door.refusal(TOPIC, sealed(), f"origin {i}", NOW + 30) for i in range(7)]
    assert later == [None] * 5 + ["rate"] * 2  # half a minute: half of them
    assert door.refusal(TOPIC, sealed(), "origin", NOW - 5) == "rate"  # a clock set back earns nothing


def test_bytes_of_an_author_are_capped() -> None:
    door = gate(bytes_per_minute=100_000)
    verdicts = [door.refusal(TOPIC, sealed(30_000), f"origin {i}", NOW) for i in range(5)]
    assert verdicts == [None] * 3 + ["rate"] * 2


def test_one_process_cannot_speak_for_many_authors() -> None:
    door = gate(messages_per_minute=3)
    authors = [peer_on_shard(0, 2, skip=i) for i in range(5)]
    verdicts = [door.refusal(TOPIC, seal_as(batch(SWARM, 500), author), "origin", time.time()) for author in authors]
    assert verdicts == [None] * 3 + ["rate"] * 2


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gossip_gate, "AUTHORS", 8)
    monkeypatch.setattr(gossip_gate, "SEEN", 16)
    door = gate()
    for i in range(40):
        assert door.refusal(TOPIC, sealed(), f"origin {i}", NOW) is None
    assert (len(door._rates), len(door._seen)) == (8, 16)


@given(st.binary(max_size=2000))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    assert gate().refusal(TOPIC, data, "origin", NOW) in ("size", "signature")


# ---------------------------------------------------------------- the pipe

COMMANDS = [
    GossipSettings(SWARM, announce=["example.org"]),
    Subscribe(TOPIC),
    Publish(TOPIC, bytes(5000)),
    Dial("/ip4/127.0.0.1/tcp/1/p2p/x"),
]


@given(st.lists(st.integers(1, 6000), max_size=20))
def test_frames_survive_any_cut(cuts: list[int]) -> None:
    stream = b"".join(map(frame, COMMANDS))
    frames: Frames[Command] = Frames(Command)
    records = []
    for cut in cuts:
        records += frames.feed(stream[:cut])
        stream = stream[cut:]
    assert records + frames.feed(stream) == COMMANDS


@pytest.mark.parametrize(
    ("reason", "data"),
    [
        ("size", (MAX_FRAME_BYTES + 1).to_bytes(4, "big")),
        ("schema", frame(["Nothing", 1])),
        ("schema", frame(Subscribe(TOPIC))),  # a command, from the wrong side
        ("schema", frame(Message(TOPIC, bytes(530_000)))),
        ("schema", frame(Message("x" * 200, b""))),
        ("schema", b"\0\0\0\0"),
    ],
)
def test_frames_that_are_no_events(reason: str, data: bytes) -> None:
    frames: Frames[Event] = Frames(Event)
    with pytest.raises(RemoteProtocolError) as refusal:
        frames.feed(data)
    assert refusal.value.reason == reason


@given(st.binary(max_size=200))
def test_arbitrary_bytes_from_the_pipe(data: bytes) -> None:
    frames: Frames[Event] = Frames(Event)
    try:
        frames.feed(data)
    except RemoteProtocolError as error:
        assert error.reason in ("size", "schema")
