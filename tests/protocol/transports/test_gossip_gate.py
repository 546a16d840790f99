"""What gossip lets in."""

from __future__ import annotations

import time
from itertools import count
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_protocol.errors import LocalProtocolError, RemoteProtocolError
from swarm_protocol.gossip_kinds import ROLLOUTS, Budget, Kind
from swarm_protocol.manifest import ManifestLimits
from swarm_protocol.messages import RolloutBatch
from swarm_protocol.transports.gossip import gate as gossip_gate
from swarm_protocol.transports.gossip.gate import BLAMED_NEWCOMERS, HARMLESS, SHARD_AUTHORS, GossipGate
from swarm_protocol.transports.gossip.pipe import (
    MAX_FRAME_BYTES,
    Command,
    Dial,
    Event,
    Frames,
    GossipReady,
    GossipSettings,
    Message,
    Publish,
    Subscribe,
    frame,
    gossip_settings,
)
from swarm_protocol.transports.settings import NetworkSettings, announced
from tests.support.gossip_samples import batch, peer_on_shard, seal_as

SWARM = "ab" * 32
TOPIC = ROLLOUTS.topic(SWARM, 0)
PEER = peer_on_shard(0, 2)
NOW = time.time()


def gate(**settings: Any) -> GossipGate:
    return GossipGate(GossipSettings(SWARM, **{"shards": 2, **settings}))


def sealed(size: int = 1000, **changes: Any) -> bytes:
    return seal_as(msgspec.structs.replace(batch(SWARM, size), **{"created": NOW, **changes}), PEER)


def ask(door: GossipGate, data: bytes, origin: str = "origin", forwarder: str = "hub", now: float = NOW) -> str | None:
    return door.refusal(TOPIC, data, origin, forwarder, now)


def believe(data: bytes, swarm: str, spoken: object) -> tuple[str, RolloutBatch]:
    """Takes a message as of `plain` for what it says, which makes thousands of them cheap."""
    return data[:52].decode().strip(), RECORD


RECORD = msgspec.structs.replace(batch(SWARM, 100), created=NOW)
BELIEVED = (Kind("rollouts", believe, sharded=False),)


def trusting(**settings: Any) -> GossipGate:
    return GossipGate(GossipSettings(SWARM, **{"shards": 2, **settings}), BELIEVED)


def plain(author: str, size: int = 100) -> bytes:
    """A message of `author`, unlike any other."""
    return f"{author:52}{next(_numbers):16}".encode().ljust(size)


_numbers = count()


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
        ("version", sealed(protocol=0)),
        ("newer", sealed(protocol=7)),
        ("schema", sealed(groups=[])),
        ("swarm", sealed(swarm="cd" * 32)),
        ("shard", seal_as(batch(SWARM, 1000), peer_on_shard(1, 2))),
        ("future", sealed(created=NOW + 40)),
        ("age", sealed(created=NOW - 700)),
    ],
)
def test_reasons(reason: str | None, data: bytes) -> None:
    assert ask(gate(), data) == reason


def test_a_batch_is_let_in_once() -> None:
    door, data = gate(), sealed()
    assert ask(door, data) is None
    assert ask(door, data, "another") == "seen"


def test_messages_of_an_author_are_capped() -> None:
    door = gate(messages_per_minute=10)
    verdicts = [ask(door, sealed(), f"origin {i}") for i in range(15)]
    assert verdicts == [None] * 10 + ["rate"] * 5
    later = [ask(door, sealed(), f"origin {i}", now=NOW + 30) for i in range(7)]
    assert later == [None] * 5 + ["rate"] * 2  # half a minute: half of them
    assert ask(door, sealed(), now=NOW - 5) == "rate"  # a clock set back earns nothing
    assert ask(door, sealed(), now=NOW + 2) is None  # but is forgiven: one in six seconds, counted from then on


def test_bytes_of_an_author_are_capped() -> None:
    door = gate(bytes_per_minute=100_000)
    verdicts = [ask(door, sealed(30_000), f"origin {i}") for i in range(5)]
    assert verdicts == [None] * 3 + ["rate"] * 2


def test_rate_limited_messages_are_not_remembered() -> None:
    door = gate(messages_per_minute=2)
    early, late = sealed(), [sealed() for _ in range(5)]
    assert [ask(door, data) for data in (early, *late)] == [None, None, *["rate"] * 4]
    assert ask(door, early) == "seen"
    assert ask(door, late[-1], now=NOW + 31) is None


def test_excess_is_blamed_on_its_signer() -> None:
    """`flood` counts against the forwarder, `rate` does not."""
    assert "rate" in HARMLESS and "flood" not in HARMLESS
    door = gate(messages_per_minute=3)
    assert [ask(door, sealed(), "flooder", "flooder") for _ in range(5)] == [None] * 3 + ["flood"] * 2
    door = gate(messages_per_minute=3)
    assert [ask(door, sealed(), "flooder", "hub") for _ in range(5)] == [None] * 3 + ["rate"] * 2
    assert ask(door, sealed(), "flooder", "flooder") == "rate"  # all of it came from the hub, perhaps a replay


def test_one_process_cannot_speak_for_many_authors() -> None:
    door = trusting(messages_per_minute=3)
    assert [ask(door, plain(f"author {i}"), "it", "it") for i in range(5)] == [None] * 3 + ["flood"] * 2


def test_fresh_keys_of_one_connection_are_bounded() -> None:
    door = trusting(shards=1)
    verdicts = [ask(door, plain(f"author {i}"), f"origin {i}", now=NOW + i / 100) for i in range(3000)]  # half a minute
    assert SHARD_AUTHORS <= verdicts.count(None) <= 1.5 * SHARD_AUTHORS + 1
    assert verdicts[:SHARD_AUTHORS] == [None] * SHARD_AUTHORS
    first = verdicts.index("flood")
    assert BLAMED_NEWCOMERS * SHARD_AUTHORS <= first < 800
    assert "newcomers" in HARMLESS and verdicts[first:].count("flood") > 1000
    # Whoever was known meanwhile is heard, over the same connection too; and new ones over others.
    assert ask(door, plain("author 0"), now=NOW + 30) is None
    assert [ask(door, plain(f"late {i}"), forwarder="another", now=NOW + 30) for i in range(30)] == [None] * 30


def test_a_flooded_hub_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gossip_gate, "SHARD_AUTHORS", 8)
    hub, leaf, passed_on = trusting(shards=1), trusting(shards=1), []
    for i in range(12_000):  # over twenty connections, for two minutes
        data, now = plain(f"author {i}"), NOW + i / 100
        if ask(hub, data, f"origin {i}", f"flooder {i % 20}", now) is None:
            passed_on.append(ask(leaf, data, f"origin {i}", "hub", now))
    assert len(passed_on) >= 64 and set(passed_on) <= {None, "newcomers"}


def test_a_hub_may_speak_for_a_shard() -> None:
    door = trusting(shards=1)
    for second in range(90):
        for i in range(SHARD_AUTHORS):
            assert ask(door, plain(f"author {i}", 60_000), f"origin {i}", now=NOW + second) is None


def test_a_connection_brings_no_more_than_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gossip_gate, "CONNECTION_MESSAGES", 100)
    monkeypatch.setattr(gossip_gate, "CONNECTION_BYTES", 300_000)
    door = trusting(messages_per_minute=20, bytes_per_minute=100_000)
    verdicts = [ask(door, plain(f"author {i % 10}"), f"origin {i}") for i in range(150)]
    assert verdicts == [None] * 100 + ["flood"] * 50
    seen = plain("author 0")
    assert [ask(door, seen, forwarder="x") for _ in range(150)].count("flood") == 50  # what is refused counts as well
    sizes = [ask(door, plain(f"author {i}", 50_000), f"origin {i}", "another") for i in range(8)]
    assert sizes == [None] * 6 + ["flood"] * 2
    assert ask(door, plain("author 0"), now=NOW + 6) is None  # a tenth of it is back
    assert ask(trusting(messages_per_minute=500), plain("author 0"), "a", "a") is None


def test_peers_within_the_limits_are_not_refused() -> None:
    """Small groups, each a message of its own: a minute's worth at once, then evenly, half of a minute held up."""
    for limits in (ManifestLimits(), ManifestLimits(groups_per_minute=1), ManifestLimits(groups_per_minute=4096)):
        door = GossipGate(gossip_settings(SWARM, 1, limits, NetworkSettings()), BELIEVED)
        n = limits.groups_per_minute
        times = [NOW] * n + [NOW + 60 * (i + 1) / n for i in range(3 * n)]
        arrivals = [max(at, NOW + 90) if NOW + 60 < at else at for at in times]
        assert {ask(door, plain("author"), "it", "it", at) for at in arrivals} == {None}
    limits = ManifestLimits(bytes_per_minute=2**21)
    door = GossipGate(gossip_settings(SWARM, 1, limits, NetworkSettings()), BELIEVED)
    assert {ask(door, plain("author", 2**19), "it", "it", NOW + max(0, i - 3) * 15) for i in range(20)} == {None}


def test_each_kind_has_its_own_topics_budget_and_age() -> None:
    rare = Kind("rare", believe, Budget(messages_per_minute=1, bytes_per_minute=1000, max_age_s=5.0), sharded=False)
    door = GossipGate(GossipSettings(SWARM, messages_per_minute=3), (*BELIEVED, rare))

    def rarely(size: int = 100, now: float = NOW) -> str | None:
        return door.refusal(rare.topic(SWARM), plain("author", size), "origin", "hub", now)

    assert [ask(door, plain("author")) for _ in range(4)] == [None] * 3 + ["rate"]
    assert [rarely(size) for size in (2000, 100, 100)] == ["rate", None, "rate"]
    assert rarely(now=NOW + 6) == "age" and ask(door, plain("author"), now=NOW + 20) is None
    assert door.refusal(rare.topic(SWARM, 1), plain("author"), "origin", "hub", NOW) == "shard"  # it has one topic


def test_refused_authors_pay_nothing() -> None:
    door = trusting(messages_per_minute=2)
    for _ in range(2):
        assert ask(door, plain("noisy"), "it", "it") is None
    assert [ask(door, plain("victim"), "it", "it") for _ in range(5)] == ["flood"] * 5
    assert [ask(door, plain("victim")) for _ in range(2)] == [None, None]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, most in {"BUDGETED_AUTHORS": 8, "SEEN": 16, "BUDGETED_CONNECTIONS": 4, "MAX_NEWCOMERS": 100}.items():
        monkeypatch.setattr(gossip_gate, name, most)
    door = trusting()
    for i in range(40):
        assert ask(door, plain(f"author {i}"), f"it {i}", f"it {i}") is None
    tables = door._authors["rollouts"], door._seen, door._brought, door._said, door._offered, door._introduced
    assert [len(table) for table in tables] == [8, 16, 4, 4, 4, 4]


@given(st.binary(max_size=2000))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    assert ask(gate(), data) in ("size", "signature")


# ---------------------------------------------------------------- the pipe

COMMANDS = [
    GossipSettings(SWARM, announce=["example.org"]),
    Subscribe(TOPIC),
    Publish(TOPIC, bytes(5000)),
    Dial("/ip4/127.0.0.1/tcp/1/p2p/x"),
]


@pytest.mark.parametrize(
    "network",
    [
        {"max_connections": 513},
        {"max_connections": 0},
        {"announce": ("a.example",) * 9},
        {"announce": ("a" * 120,)},
        {"announce": ("a b",)},
        {"listen": "x" * 65},
        {"gossip_port": 65_536},
    ],
)
def test_bad_settings_never_reach_the_process(network: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError, match="gossip"):
        gossip_settings(SWARM, 1, ManifestLimits(), NetworkSettings(**network))


def test_settings_at_their_bounds_are_taken() -> None:
    host, whole = "a" * 113 + ".local", "/ip4/203.0.113.7/tcp/1"
    network = NetworkSettings(announce=(host, *["b.example"] * 7, whole), max_connections=512)
    limits = ManifestLimits(groups_per_minute=4096, bytes_per_minute=2**30)
    settings = gossip_settings(SWARM, 1024, limits, network)
    assert Frames[Command](Command).feed(frame(settings)) == [settings]
    assert (len(settings.announce), settings.messages_per_minute) == (8, 8192)
    told = f"{announced(network.announce, 65_535)[0]}/p2p/{'1' * 52}"
    assert Frames[Event](Event).feed(frame(GossipReady("1" * 52, [told], 65_535)))


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


@pytest.mark.parametrize(("spoken", "reason"), [((5, 6), None), ((6, 7), "version"), ((3, 4), "newer")])
def test_the_node_says_which_versions_it_speaks(spoken: tuple[int, ...], reason: str | None) -> None:
    assert ask(gate(spoken=spoken), sealed(protocol=5)) == reason
