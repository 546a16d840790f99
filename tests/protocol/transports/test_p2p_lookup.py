"""A node's round of lookups, without a network: the steps of `Membership` on a plane that is played."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from swarm_protocol.errors import PeerUnreachable
from swarm_protocol.limits import CARD_RENEWAL_S, MAX_CLOCK_SKEW_S
from swarm_protocol.messages import PeerCard
from swarm_protocol.peers import PeerTable
from swarm_protocol.transports.dht.strangers import LAST_WAIT_S, LOOKUPS, MAX_REMEMBERED, MEMBERS, Strangers
from swarm_protocol.transports.p2p import membership
from swarm_protocol.transports.p2p.membership import GREET_AGAIN_S, Membership
from swarm_protocol.transports.p2p.relay import REACH_CHECK_S, Reach
from swarm_protocol.transports.settings import NetworkSettings
from swarm_protocol.twins import Twins


class Plane:
    """Two peers are connected; `cards` is what a lookup finds."""

    def __init__(self) -> None:
        self.cards: dict[str, PeerCard] = {}
        self.greeted: list[str] = []
        self.looked = 0
        self.connections = self

    async def connected(self) -> dict[str, list[str]]:
        return {"one": [], "two": []}

    async def connect(self, peer: str, addresses: list[str]) -> None:
        self.greeted.append(peer)

    async def get_cards(self, buckets: list[int], members: int) -> dict[str, PeerCard]:
        self.looked += 1
        return self.cards


def test_connected_peers_are_greeted_again_when_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 1000.0
    monkeypatch.setattr(membership.time, "monotonic", lambda: clock)
    plane = Plane()
    node: Any = SimpleNamespace(
        peer_id="me",
        _settings=NetworkSettings(),
        table=PeerTable("me", random.Random(0)),
        _gossip=SimpleNamespace(stat=SimpleNamespace(peers=[]), client=SimpleNamespace(gossip_id="g")),
        _wake=asyncio.Event(),
        members={},
        _newcomers=frozenset(),
        connected=set(),
        _greeted=set(),
        _greet_again_at=0.0,
        _dialling={},
        _look_at=0.0,
        _next_bucket=0,
        _strangers=Strangers(),
        _is_newcomer=lambda: False,
        _has_looked=True,
        twins=Twins(0.0),
    )
    node._dial_one = lambda *arguments: Membership._dial_one(node, *arguments)
    node._find = partial(Membership._find, node)

    async def rounds(seconds: int) -> None:
        """One each five seconds."""
        nonlocal clock
        for _ in range(seconds // 5):
            await Membership._dial(node, plane)
            await asyncio.gather(*node._dialling.values())
            await Membership._look_up(node, plane)
            clock += 5.0

    asyncio.run(rounds(5))
    assert sorted(plane.greeted) == ["one", "two"]
    asyncio.run(rounds(int(2 * GREET_AGAIN_S)))
    assert 4 <= plane.greeted.count("one") + plane.greeted.count("two") <= 8
    plane.greeted.clear()
    plane.cards = {"one": PeerCard(1, "ab" * 32, membership.time.time(), "one", [])}
    asyncio.run(rounds(5))  # may still greet for what the last round found
    plane.greeted.clear()
    asyncio.run(rounds(120))
    assert plane.greeted == []


HOUR_S = 3600


def card(role: str = "trainer") -> PeerCard:
    return PeerCard(1, "ab" * 32, membership.time.time(), "one", [role], gossip_id="g")


@pytest.mark.parametrize("fresh", [False, True], ids=["one that stays", "ever new ones"])
def test_gossip_peers_without_a_card_cause_few_lookups(monkeypatch: pytest.MonkeyPatch, fresh: bool) -> None:
    """Rounds of a second, as such a peer can cause them, for an hour."""
    clock = 1000.0
    monkeypatch.setattr(membership.time, "monotonic", lambda: clock)
    plane = Plane()
    plane.cards = {"one": card()}
    node: Any = SimpleNamespace(
        peer_id="me",
        _settings=NetworkSettings(lookup_s=HOUR_S, card_renewal_s=HOUR_S),
        table=PeerTable("me", random.Random(0)),
        _gossip=SimpleNamespace(stat=SimpleNamespace(peers=["g", "no card"]), client=SimpleNamespace(gossip_id="g")),
        members={"one": card()},
        _newcomers=frozenset(),
        _look_at=clock,
        _next_bucket=0,
        _strangers=Strangers(),
        _is_newcomer=lambda: False,
        _has_looked=True,
        twins=Twins(0.0),
    )

    node._find = partial(Membership._find, node)

    async def live() -> None:
        nonlocal clock
        for second in range(HOUR_S):
            if fresh:
                node._gossip.stat.peers = ["g", f"no card {second}"]
            await Membership._look_up(node, plane)
            clock += 1.0

    asyncio.run(live())
    most = LOOKUPS * (1 + HOUR_S / 60) if fresh else HOUR_S / LAST_WAIT_S + 10
    assert 10 < plane.looked <= most


def test_large_swarms_look_less_often() -> None:
    strangers = Strangers()
    assert [strangers.are_worth_a_lookup({"a"}, 5, 100.0 + t) for t in range(8)] == [True, False] * 2 + [False] * 2 + [
        True,
        False,
    ]
    assert strangers.are_worth_a_lookup({"a", "b"}, 5, 108.0) and not strangers.are_worth_a_lookup((), 5, 500.0)
    large = [strangers.are_worth_a_lookup({f"c{t}"}, 6 * MEMBERS, 500.0 + t) for t in range(600)]
    assert large[0] and 20 <= large.count(True) <= 22
    assert len(strangers._waits) <= 24
    for i in range(2 * MAX_REMEMBERED):
        strangers.are_worth_a_lookup({f"d{i}", f"e{i}"}, 5, 2000.0 + 10 * i)
    assert len(strangers._waits) == MAX_REMEMBERED


def test_cards_from_elsewhere_are_as_good_as_found_ones() -> None:
    gossip_id, now = "12D3KooWA5QapJCxXj1sqbLndrL9jm3UKnHvuuBprxM6pjmCh6R1", membership.time.time()
    way, gossip = "/ip4/8.8.8.8/tcp/1/p2p/one", f"/ip4/8.8.8.8/tcp/2/p2p/{gossip_id}"
    node: Any = SimpleNamespace(table=PeerTable("me", random.Random(0)), _wake=asyncio.Event())
    Membership.meet(node, {"one": replace(card(), addresses=[way], gossip=[gossip], gossip_id=gossip_id)})
    assert node._wake.is_set() and node.table.members(now).keys() == {"one"}
    assert node.table.to_dial(now) == {"one": [way]}
    assert node.table.gossip_to_dial([0], 8, [], now) == {gossip_id: [gossip]}


class Relays:
    """Two relays, connected at an address each; those in `reaches` can connect to port 5 of a node with an address."""

    def __init__(self, relays: dict[str, str], own: str, reaches: set[str]) -> None:
        self.relays, self.reaches = relays, reaches
        self.addresses = ["/dns4/own.example/tcp/4", "/ip4/10.0.0.1/tcp/4", f"/ip4/{own}/tcp/5"]
        self.asked: list[str] = []
        self.places: list[str] = []
        self.connections = self.streams = self

    async def connected(self) -> dict[str, list[str]]:
        return {peer: [f"/ip4/{ip}/tcp/1"] for peer, ip in self.relays.items()}

    async def dial_back(self, peer: str, ports: list[int]) -> list[bool]:
        self.asked.append(peer)
        assert ports == [5]
        if "busy" in self.reaches:
            raise PeerUnreachable("busy")
        return [peer in self.reaches]

    async def take_place(self, relay: str) -> None:
        self.places.append(relay)


@pytest.mark.parametrize(
    ("reaches", "own", "ip", "dial_only", "taken"),
    [
        ({"one", "two"}, "9.9.9.9", "8.8.8.8", False, []),
        ({"one"}, "9.9.9.9", "8.8.8.8", False, ["two"]),
        (set(), "9.9.9.9", "8.8.8.8", False, ["one", "two"]),
        ({"one", "two"}, "9.9.9.9", "192.168.1.7", False, ["one", "two"]),
        ({"one", "two"}, "10.0.0.9", "8.8.8.8", False, ["one", "two"]),
        ({"one", "two", "busy"}, "9.9.9.9", "8.8.8.8", False, ["one", "two"]),
        ({"one", "two"}, "9.9.9.9", "8.8.8.8", True, ["one", "two"]),
    ],
    ids=["reached", "by one", "not reached", "one network", "no public address", "no answer", "dial-only"],
)
def test_relays_that_reach_a_node_keep_their_places(
    monkeypatch: pytest.MonkeyPatch, reaches: set[str], own: str, ip: str, dial_only: bool, taken: list[str]
) -> None:
    clock = 1000.0
    monkeypatch.setattr(membership.time, "monotonic", lambda: clock)
    plane, changes = Relays({"one": ip, "two": ip}, own, reaches), 0

    def changed() -> None:
        nonlocal changes
        changes += 1

    settings = NetworkSettings(bootstrap=("/ip4/8.8.8.8/tcp/1/p2p/one", "/dns4/b/tcp/1/p2p/two"), dial_only=dial_only)
    node: Any = SimpleNamespace(
        _settings=settings,
        connected={"one", "two", "three"},
        members={"one": card("relay"), "two": card("relay"), "three": card("relay")},
        _places={},
        _reach=Reach(random.Random(0), changed),
    )

    async def rounds(times: int) -> None:
        nonlocal clock
        for _ in range(times):
            await Membership._take_places(node, plane)
            await asyncio.gather(*node._reach._asking.values())
            clock += 5.0

    async def restarted() -> None:
        """p2pd ends while relays are being asked."""
        node._reach.forget()
        await Membership._take_places(node, plane)
        node._reach.forget()
        await asyncio.gather(*node._reach._asking.values(), return_exceptions=True)

    asyncio.run(rounds(2))
    assert sorted(plane.places) == sorted(node._places) == taken
    assert changes == (0 if dial_only else 2)  # each is a reason to look again at once
    asyncio.run(rounds(int(REACH_CHECK_S / 5.0)))
    assert len(plane.asked) <= 2 * 3
    plane.reaches = {"one", "two"}  # by now a port is forwarded
    asyncio.run(restarted())
    asyncio.run(rounds(int(REACH_CHECK_S / 5.0)))
    assert sorted(node._places) == ([] if (own, ip, dial_only) == ("9.9.9.9", "8.8.8.8", False) else taken)


class Storing(Plane):
    """Keeps the cards that are stored."""

    daemon = SimpleNamespace(restarts=0)

    def __init__(self) -> None:
        super().__init__()
        self.stored: list[PeerCard] = []

    async def look_around(self) -> None:
        pass

    async def store_card(self, card: PeerCard, members: int) -> bool:
        self.stored.append(card)
        self.cards["me"] = card
        return True


def renewing(renewal_s: float) -> Any:
    """A node whose card is stored again after `renewal_s`."""
    node: Any = SimpleNamespace(
        peer_id="me",
        card=card(),
        members={},
        _settings=NetworkSettings(card_renewal_s=renewal_s),
        _gossip=SimpleNamespace(client=SimpleNamespace(gossip_id="g"), addresses=lambda addresses: []),
        own_addresses=lambda plane: [],
        _dated=lambda card: card,
        _note_ports=lambda plane: None,
        _told=(),
        _renew_at=0.0,
        _has_looked=True,
        twins=Twins(0.0),
    )
    node._find = partial(Membership._find, node)
    return node


def test_a_card_is_renewed_after_the_first_round() -> None:
    plane, node = Storing(), renewing(HOUR_S)

    async def ended_rounds(speeds: list[float]) -> None:
        for speed in speeds:
            node.card = replace(node.card, speed=speed)
            await Membership._renew(node, cast(Any, plane))

    asyncio.run(ended_rounds([0.0, 0.0, 5.0, 7.0]))
    assert [card.speed for card in plane.stored] == [0.0, 5.0]


def test_the_card_of_a_twin_is_seen_before_the_own_one_replaces_it() -> None:
    plane, node = Storing(), renewing(0.0)
    asyncio.run(Membership._renew(node, cast(Any, plane)))
    for made in (0.0, CARD_RENEWAL_S, MAX_CLOCK_SKEW_S + CARD_RENEWAL_S):
        asyncio.run(Membership._renew(node, cast(Any, plane)))
        assert plane.cards["me"].gossip_id == "g" and node.twins.found is None
        plane.cards["me"] = replace(node.card, gossip_id="twin", created=made)
    asyncio.run(Membership._renew(node, cast(Any, plane)))
    assert node.twins.found is not None and not node.twins.was_first
