"""Who may stay when a gossip process has more connections than places: no sockets, a clock by hand."""

from __future__ import annotations

import pytest

from swarm_protocol.transports.gossip.places import (
    HANDSHAKE_S,
    MAX_ARRIVING,
    PATIENCE_S,
    PLACE_TURN_S,
    SETTLED_S,
    STAY_S,
    ConnectionPlaces,
    Link,
)

MOST = 16


def arrived(
    places: ConnectionPlaces, address: str, now: float, inbound: bool = True, valid: bool = False
) -> tuple[Link, bool]:
    """A connection that has finished its handshake; whether it got a place."""
    link = Link(address, inbound, now, valid=valid)
    return link, places.take(link, now) is not link


def full(addresses: list[str], valid: bool = False, now: float = 0.0) -> tuple[ConnectionPlaces, list[Link]]:
    """All places that strangers can have are taken by connections from `addresses` in turn."""
    places, links = ConnectionPlaces(MOST), []
    while places.has_room(inbound=True):
        links.append(arrived(places, addresses[len(links) % len(addresses)], now + len(links) / 1e6, valid=valid)[0])
    return places, links


def test_no_address_is_limited_while_places_are_free() -> None:
    places, links = full(["one"])
    assert len(links) == MOST - 1 and places.seated == set(links)
    assert places.has_room(inbound=False)  # the last is for those that this node dials


@pytest.mark.parametrize(
    ("addresses", "valid", "address", "after", "loser"),
    [
        (["crowd"], False, "elsewhere", 0.0, "crowd"),
        (["crowd"], True, "elsewhere", 0.0, "crowd"),
        (["crowd"], False, "crowd", 0.0, "crowd"),
        (["crowd"], True, "crowd", PLACE_TURN_S - 1, None),
        (["crowd"], True, "crowd", PLACE_TURN_S + 1, "crowd"),
        ([f"a{i}" for i in range(5)], True, "elsewhere", 0.0, "a0"),  # each has three
        ([f"a{i}" for i in range(5)], True, "a4", 0.0, None),
        ([f"a{i}" for i in range(MOST)], False, "elsewhere", STAY_S - 1, None),
        ([f"a{i}" for i in range(MOST)], False, "elsewhere", STAY_S + 1, "a0"),
        ([f"a{i}" for i in range(MOST)], False, "elsewhere", SETTLED_S + 1, None),
        ([f"a{i}" for i in range(MOST)], True, "elsewhere", STAY_S + 1, None),
    ],
)
def test_who_gives_way_when_all_places_are_taken(
    addresses: list[str], valid: bool, address: str, after: float, loser: str | None
) -> None:
    places, links = full(addresses, valid)
    newcomer, got_in = arrived(places, address, after)
    assert got_in == (loser is not None) == (newcomer in places.seated)
    assert [link.address for link in links if link not in places.seated] == ([loser] if loser else [])
    assert len(places.seated) == MOST - 1


def test_a_lone_listener_outlasts_busy_addresses_that_speak() -> None:
    places, links = full([f"a{i}" for i in range(4)], valid=True)
    listener, got_in = arrived(places, "listener", 1.0)
    assert got_in
    for i in range(200):
        arrived(places, f"a{i % 4}", 1.0 + i / 10, valid=True)
    assert listener in places.seated


def test_dialled_connections_never_give_way() -> None:
    places = ConnectionPlaces(MOST)
    dialled = [arrived(places, "far", 0.0, inbound=False)[0] for _ in range(MOST)]
    assert not arrived(places, "far", SETTLED_S)[1] and not arrived(places, "near", SETTLED_S, inbound=False)[1]
    assert places.seated == set(dialled)


def test_the_busiest_address_s_oldest_handshake_gives_way() -> None:
    places = ConnectionPlaces(MOST)
    honest = Link("honest", True, 0.0)
    assert places.arrive(honest) is None
    stalled = [Link("crowd", True, 0.1, heard=0.2) for _ in range(MAX_ARRIVING - 1)]
    assert [places.arrive(link) for link in stalled] == [None] * len(stalled)
    talking = Link("crowd", True, 0.1, heard=0.3)
    assert places.arrive(talking) in stalled
    assert {honest, talking} <= places.arriving and len(places.arriving) == MAX_ARRIVING


def test_many_handshakes_have_less_time_each() -> None:
    places = ConnectionPlaces(MOST)
    for _ in range(MAX_ARRIVING // 2):
        places.arrive(Link("slow", True, 0.0))
    assert places.late(HANDSHAKE_S + 0.1) == [] and len(places.late(PATIENCE_S + 0.1)) == MAX_ARRIVING // 2
    places.arrive(Link("late", True, HANDSHAKE_S))
    assert len(places.late(HANDSHAKE_S + 0.1)) == MAX_ARRIVING // 2
