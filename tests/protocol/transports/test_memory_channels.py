"""Channels in memory: order, turns on the uplink, ends, and equal seeds that give equal events."""

from __future__ import annotations

import pytest

from swarm_protocol.errors import LocalProtocolError, RemoteProtocolError
from swarm_protocol.limits import MAX_HEAD_BYTES
from swarm_protocol.transports.base import Channel, Listener
from swarm_protocol.transports.memory import LinkModel
from swarm_protocol.transports.streams import channels
from swarm_protocol.transports.streams.channels import MAX_CHANNELS_PER_PEER
from tests.protocol.transports.memory_world import UP, World


class Talk:
    """Channels of `talk` from `a` to `b`: what each end was told, and when."""

    def __init__(self, a: LinkModel | None = None, b: LinkModel | None = None) -> None:
        self.world = World()
        self.a, self.b = self.world.join("a", link=a), self.world.join("b", "a", link=b)
        self.events: list[tuple[float, str, object]] = []
        self.ends: dict[str, Channel] = {}
        self.b.listen("talk", lambda channel: self.opened("b", channel))
        self.world.clock.run_until(UP)

    def connect(self, peer: str = "b", method: str = "talk") -> Channel:
        return self.a.connect(peer, method, lambda channel: self.opened("a", channel))

    def opened(self, who: str, channel: Channel) -> Listener:
        self.ends[who] = channel
        return Listener(
            lambda head, size: self.note(who, (head, size)),
            lambda head, body: self.note(who, bytes(body)),
            lambda why: self.note(who, why),
        )

    def note(self, who: str, what: object) -> None:
        self.events.append((round(self.world.clock.now() - UP, 6), who, what))

    def told(self) -> list[tuple[float, str, object]]:
        """Since this was last asked."""
        events, self.events = self.events, []
        return events


def test_channel_messages_take_turns_on_the_uplink() -> None:
    talk = Talk(LinkModel(0.1, bandwidth_bytes_s=1000.0), LinkModel(0.2))
    before = talk.a.stats()["bytes_out"]
    channel = talk.connect()
    assert channel.peer == "b"
    body = bytearray(b"12")
    assert channel.send(b"x" * 400, memoryview(body)[:1], memoryview(body)[1:]) and channel.send(b"y" * 98)
    talk.world.run(0.29)
    assert not talk.ends.keys() - {"a"}
    talk.world.run(0.02)
    assert talk.ends["b"].peer == "a" and talk.ends["b"].send(b"z", b"back")
    talk.world.run(5.0)
    assert talk.told() == [
        (0.61, "a", (b"z", 4)),  # it began when it was sent, not when a was told that the channel is open
        (0.61, "a", b"back"),
        (1.302, "b", (b"x" * 400, 2)),
        (1.302, "b", b"12"),
        (1.4, "b", (b"y" * 98, 0)),
        (1.4, "b", b""),
    ]
    assert talk.a.stats()["bytes_out"] - before == 500

    talk.a.publish("t", bytes(1000))
    assert channel.send(b"", bytes(1000)) and channel.send(b"", b"")
    talk.world.run(0.5)
    channel.close()
    talk.world.run(5.0)
    assert [(who, what) for _, who, what in talk.told()] == [
        ("a", "closed"),
        ("b", "closed"),
    ]  # the rest is lost
    assert not channel.send(b"") and not talk.ends["b"].send(b"")


def test_nothing_overtakes_and_a_goodbye_comes_last() -> None:
    talk = Talk(LinkModel(0.0, jitter_s=5.0), LinkModel(0.0))
    channel = talk.connect()
    talk.world.run(20.0)
    for i in range(50):
        channel.send(b"%d" % i)
    talk.world.run(0.001)
    channel.close()
    talk.world.run(20.0)
    assert [what[0] for _, _, what in talk.told() if isinstance(what, tuple)] == [b"%d" % i for i in range(50)]


@pytest.mark.parametrize("what", ["kill", "partition", "close", "hang up"])
@pytest.mark.parametrize("who", ["a", "b"])
def test_ends_find_out_that_a_channel_is_over(what: str, who: str) -> None:
    talk = Talk()
    talk.connect()
    talk.world.run(1.0)
    survivor = "ab".replace(who, "")
    if what == "kill":
        talk.ends[who].send(b"in flight")
        talk.world.network.kill(who)
        expected = {"a": (5.0, "silent"), "b": (5.0, "silent")}
    elif what == "partition":
        talk.ends[who].send(b"in flight")
        talk.world.network.partition([who])
        talk.world.network.heal()
        expected = {"a": (5.0, "silent"), "b": (5.0, "silent")}
    else:
        (getattr(talk, who) if what == "close" else talk.ends[who]).close()
        assert not talk.told()  # never from within a call
        expected = {who: (1.0, "closed"), survivor: (1.04, "closed")}
    talk.world.run(10.0)
    assert {end: (at, why) for at, end, why in talk.told()} == expected
    assert talk.world.network.faults["cut"] == (what in ("kill", "partition"))
    assert not talk.ends["a"].send(b"") and not talk.ends["b"].send(b"")
    assert not talk.a.channels and not talk.b.channels
    if what == "hang up" or what == "partition":
        talk.world.run(30.0)
        channel = talk.connect()
        channel.send(b"again")
        talk.world.run(1.0)
        assert [event[1:] for event in talk.told()] == [("b", (b"again", 0)), ("b", b"")]


@pytest.mark.parametrize("what", ["kill", "partition", "close", "blip"])
def test_a_peer_may_vanish_during_opening(what: str) -> None:
    for delay in (0.01, 0.05):
        talk = Talk()
        talk.connect()
        talk.world.run(delay)
        if what == "kill":
            talk.world.network.kill("b")
        elif what == "close":
            talk.b.close()
        else:
            talk.world.network.partition(["b"])
            if what == "blip":
                talk.world.network.heal()
        talk.world.run(20.0)
        ends = [(who, why) for _, who, why in talk.told()]
        assert sorted(who for who, _ in ends) == sorted(talk.ends) and not talk.a.channels and not talk.b.channels


def test_channels_are_refused_and_counted() -> None:
    talk = Talk()

    def refuse(channel: Channel) -> Listener:
        raise RemoteProtocolError("crew", "not one of us")

    talk.b.listen("closed", refuse)
    for peer, method in (("b", "closed"), ("b", "unknown"), ("c", "talk"), ("a", "talk")):
        channel = talk.connect(peer, method)
        channel.send(b"unheard")
        talk.world.run(1.0)
        assert not channel.send(b"late")
    assert [why for _, _, why in talk.told()] == [
        "refused: crew: not one of us",
        "refused: does not know the method 'unknown'",
        "c cannot be reached",
        "a cannot be reached",
    ]
    for _ in range(MAX_CHANNELS_PER_PEER):
        last = talk.connect()
    talk.connect()
    talk.world.run(1.0)
    assert [why for _, _, why in talk.told()] == ["refused: busy"]
    last.close()
    talk.world.run(1.0)
    talk.told()
    talk.connect()
    talk.world.run(1.0)
    assert not talk.told()
    assert talk.b.rejected == {"crew": 1, "method": 1, "busy": 1}


def test_queues_of_channels_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(head: bytes, size: int) -> None:
        raise RemoteProtocolError("shape", f"{size} bytes")

    talk = Talk(LinkModel(0.0, bandwidth_bytes_s=1000.0))
    heard: list[object] = []
    talk.b.listen("judged", lambda channel: Listener(judge, lambda head, body: heard.append(body), heard.append))
    channel = talk.connect(method="judged")
    channel.send(b"1", b"x")
    channel.send(b"2", b"x")
    talk.world.run(1.0)
    assert heard == ["shape: 1 bytes"] and [why for _, _, why in talk.told()] == ["closed"]
    assert talk.b.rejected == {"shape": 1}

    monkeypatch.setattr(channels, "MAX_QUEUED_BYTES", 5000)
    channel = talk.connect()
    assert [channel.send(b"", bytes(2000)) for _ in range(4)] == [True, True, False, False]
    talk.world.run(1.0)
    assert [why for _, _, why in talk.told()] == ["slow"] and talk.a.rejected == {"slow": 1}
    with pytest.raises(LocalProtocolError, match="cannot be sent"):
        channel.send(bytes(MAX_HEAD_BYTES + 1))
    with pytest.raises(LocalProtocolError, match="cannot be a method"):
        talk.connect(method="")


def test_a_bug_in_a_listener_is_not_hidden() -> None:
    talk = Talk()
    talk.b.listen("buggy", lambda channel: Listener(lambda h, n: None, lambda h, b: [][1], lambda why: None))
    talk.connect(method="buggy").send(b"")
    with pytest.raises(IndexError):
        talk.world.run(1.0)


def test_equal_seeds_give_equal_channels() -> None:
    def talked(seed: int) -> list[object]:
        world, events = World(seed), []
        link = LinkModel(0.05, jitter_s=0.5, bandwidth_bytes_s=1e5)
        nodes = [world.join(f"n{i}", *(["n0"] if i else []), link=link) for i in range(4)]

        def opened(channel: Channel) -> Listener:
            def note(what: object) -> None:
                events.append((world.clock.now(), channel.peer, what))

            return Listener(lambda head, size: None, lambda head, body: note(head), note)

        for node in nodes:
            node.listen("talk", opened)
        world.clock.run_until(UP)
        channels = [node.connect(f"n{(i + 1) % 4}", "talk", opened) for i, node in enumerate(nodes)]
        for turn in range(20):
            for channel in channels:
                channel.send(b"%d" % turn, bytes(10_000))
            if turn == 10:
                world.network.kill("n2")
            world.run(0.5)
        world.run(20.0)
        assert world.network.faults["cut"] and sum(what == "silent" for _, _, what in events) == 4
        return events

    assert talked(1) == talked(1) != talked(2)
