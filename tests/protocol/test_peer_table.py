"""The peer table: whom to dial when, who is a member, which gossip connections to keep, and the cache file."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_protocol.dials import INHABITED_WAIT_S, UNPROVEN_WAIT_S, Dials
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.limits import CARD_RENEWAL_S, CARD_TTL_S, MAX_ADDRESSES, MAX_CLOCK_SKEW_S
from swarm_protocol.messages import PROTOCOL_VERSION, PeerCard
from swarm_protocol.peers import (
    BOOTSTRAP_WAIT_S,
    FEW_WAIT_S,
    FIRST_DIAL_WAIT_S,
    GHOST_S,
    HUBS,
    MAX_CACHE_BYTES,
    MAX_CARDS,
    MAX_DHT_DIALS,
    MAX_KNOWN_PEERS,
    OTHER_WAIT_S,
    UNREACHABLE_TRIES,
    WANTED,
    PeerTable,
    parse_cache,
    peer_of,
)
from tests.support.wire import SWARM, mutations, refused

NOW = 1_800_000_000.0


def address(peer: str, port: int = 1) -> str:
    return f"/ip4/192.0.2.1/tcp/{port}/p2p/{peer}"


def card(
    peer: str,
    created: float = NOW,
    roles: Iterable[str] = ("trainer",),
    shards: Iterable[int] = (0,),
    listens: bool = True,
    gossip_id: str | None = None,
) -> PeerCard:
    gossip_id = f"g{peer}" if gossip_id is None else gossip_id
    return PeerCard(
        protocol=PROTOCOL_VERSION,
        swarm=SWARM,
        created=created,
        name="n",
        roles=list(roles),  # type: ignore[arg-type]
        addresses=[address(peer)] if listens else [],
        gossip=[address(gossip_id, 2)] if listens else [],
        gossip_id=gossip_id,
        shards=list(shards),
    )


def table(*bootstrap: str, me: str = "me", seed: int = 0) -> PeerTable:
    made = PeerTable(me, random.Random(seed))
    assert made.learn([address(peer) for peer in bootstrap], NOW, bootstrap=True) == []
    return made


def dials(peers: PeerTable, peer: str, seconds: float, tick: float = 0.25) -> list[float]:
    """When `peer` is dialled, in seconds from now, if nobody ever answers."""
    times = [i * tick for i in range(int(seconds / tick))]
    return [t for t in times if peer in peers.to_dial(NOW + t)]


# --------------------------------------------------------------------- whom to dial when


def test_a_bootstrap_is_dialled_for_ever() -> None:
    times = dials(table("boot"), "boot", 3600.0)
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    assert times[0] == 0.0
    assert gaps[0] <= FIRST_DIAL_WAIT_S + 0.25
    assert max(gaps) <= BOOTSTRAP_WAIT_S + 0.25
    assert len(times) < 3600 / (BOOTSTRAP_WAIT_S / 2)  # and not like a fool
    assert max(gaps[-20:]) - min(gaps[-20:]) > 1.0  # jitter: nodes that lost it together do not come back together
    assert dials(table("boot"), "boot", 600.0) == times[: len(dials(table("boot"), "boot", 600.0))]  # equal seeds
    assert dials(table("boot", seed=1), "boot", 600.0) != dials(table("boot"), "boot", 600.0)


def test_others_are_dialled_ever_more_rarely() -> None:
    peers = table()
    peers.learn([address("old")], NOW)
    peers.set_connected([f"c{i}" for i in range(WANTED)], NOW)
    times = dials(peers, "old", 7200.0)
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    assert gaps[0] <= FIRST_DIAL_WAIT_S + 0.25
    assert OTHER_WAIT_S / 2 <= gaps[-1] <= OTHER_WAIT_S + 0.25


@pytest.mark.parametrize("proven", [False, True])
@pytest.mark.parametrize("connected", range(WANTED + 1))
def test_who_has_few_connections_tries_everybody_again_within_a_minute(connected: int, proven: bool) -> None:
    """Also where nobody has proved a key: the first try may have failed by accident."""
    limits, known = Dials(), "/ip4/192.0.2.1/tcp/1"
    peers = PeerTable("me", random.Random(0), dials=limits)
    peers.see("lost", card("lost"), NOW)
    if proven:
        limits.prove("lost", [known], NOW)
        peers.set_connected(["lost"], NOW)
    tries = []
    for second in range(1, 7200):
        peers.set_connected([f"c{i}" for i in range(connected)], NOW + second)
        wanted = peers.to_dial(NOW + second).get("lost", [])
        if any([limits.take(way, NOW + second) for way in wanted]):
            tries.append(second)
    longest = max(b - a for a, b in zip([0, *tries], [*tries, 7199], strict=True))
    most = FEW_WAIT_S if proven or not connected else INHABITED_WAIT_S + FEW_WAIT_S
    if connected == WANTED:
        most = OTHER_WAIT_S if proven else UNPROVEN_WAIT_S + OTHER_WAIT_S
    assert most / 3 < longest <= most + 1


def test_lost_connections_are_redialled_at_once() -> None:
    peers = table("boot")
    dials(peers, "boot", 600.0)
    peers.set_connected(["boot"], NOW + 600)
    assert "boot" not in peers.to_dial(NOW + 700)
    peers.set_connected([], NOW + 800)
    assert "boot" in peers.to_dial(NOW + 800)
    assert "boot" in peers.to_dial(NOW + 800 + FIRST_DIAL_WAIT_S)


def test_strangers_are_dialled_members_until_enough_are_connected() -> None:
    peers = table()
    peers.see("member", card("member"), NOW)
    peers.learn([address("lost")], NOW)  # its card is missing: perhaps it is in another part of the swarm
    peers.set_connected([f"c{i}" for i in range(WANTED)], NOW)
    assert set(peers.to_dial(NOW)) == {"lost"}
    peers.set_connected([f"c{i}" for i in range(WANTED - 1)], NOW)
    assert set(peers.to_dial(NOW)) == {"member"}  # the other one was tried just now
    assert set(peers.to_dial(NOW + CARD_TTL_S)) == {"member", "lost"}


def test_untried_and_fresh_peers_are_dialled_first() -> None:
    peers = table("a", "b", "c")
    peers.learn([address("stale")], NOW - 100)
    for i in range(10):
        peers.learn([address(f"p{i}")], NOW + i)
    first, second, third = (list(peers.to_dial(NOW + 20 + FIRST_DIAL_WAIT_S * i)) for i in range(3))
    assert first == ["a", "b", "c", "p9", "p8", "p7", "p6"]
    assert second[-MAX_DHT_DIALS:] == ["p5", "p4", "p3", "p2"]
    assert third[-MAX_DHT_DIALS:-1] == ["p1", "p0", "stale"]


def test_who_is_heard_of_is_dialled_until_its_card_is_here() -> None:
    peers = table("boot")
    peers.set_connected(["boot"], NOW)
    told = [address("heard", 1), address("heard", 2), address("bystander", 3)]
    assert peers.hear("heard", told, NOW)
    assert not peers.hear("heard", told, NOW + 1)  # that is no news
    assert peers.to_dial(NOW) == {"heard": told[:2]}
    assert peers.hear("heard", [address("heard", 4)], NOW + 2)  # it has moved
    peers.see("heard", card("heard", NOW + 3), NOW + 3)
    assert not peers.hear("heard", [address("heard", 5)], NOW + 4)
    assert peers.addresses_of("heard") == [address("heard")]
    assert not peers.hear("me", [address("me")], NOW)
    assert not peers.hear("nowhere", [], NOW) and not peers.hear("liar", [address("bystander")], NOW)
    assert peers.hear("heard", [address("heard", 6)], NOW + 3 + CARD_TTL_S)  # its card has run out


def test_a_flood_of_names_pushes_out_nobody_with_a_card() -> None:
    peers = table("boot")
    peers.see("member", card("member"), NOW)
    for i in range(3 * MAX_KNOWN_PEERS):
        assert peers.hear(f"x{i}", [address(f"x{i}")], NOW + i / 100)
    assert len(peers) == MAX_KNOWN_PEERS
    assert peers.addresses_of("member") and peers.addresses_of("boot")


def test_fresh_names_do_not_hold_up_who_worked() -> None:
    peers, tried = table(), []
    peers.learn([address("friend")], NOW)
    peers.set_connected(["friend"], NOW)
    peers.set_connected([], NOW)
    for second in range(120):
        for i in range(2 * MAX_DHT_DIALS):
            peers.hear(f"x{second}-{i}", [address(f"x{second}-{i}")], NOW + second)
        if "friend" in peers.to_dial(NOW + second):
            tried.append(second)
    assert tried[0] == 0 and max(b - a for a, b in pairwise([*tried, 120])) <= FEW_WAIT_S + 1


def test_who_hangs_up_on_each_dial_holds_up_nobody() -> None:
    peers, liars, tried, dialled = table(), [f"liar{i}" for i in range(2 * MAX_DHT_DIALS)], [0], dict[str, list[str]]()
    peers.learn(map(address, ["friend", *liars]), NOW)
    peers.set_connected(["friend", *liars], NOW)
    for second in range(1, 600):
        peers.set_connected(dialled.keys() & set(liars), NOW + second)  # the friend is away, and others take each dial
        peers.set_connected([], NOW + second)
        peers.hear(f"x{second}", [address(f"x{second}")], NOW + second)
        dialled = peers.to_dial(NOW + second)
        assert f"x{second}" in dialled
        if "friend" in dialled:
            tried.append(second)
    assert max(b - a for a, b in pairwise([*tried, 600])) <= FEW_WAIT_S + 2 * len(liars) / MAX_DHT_DIALS


def test_those_who_worked_do_not_hold_up_fresh_names() -> None:
    peers, gone = table(), [f"gone{i}" for i in range(50)]
    peers.learn(map(address, gone), NOW)
    peers.set_connected(gone, NOW)
    peers.set_connected([], NOW)
    for second in range(1, 120):
        peers.hear(f"x{second}", [address(f"x{second}")], NOW + second)
        assert f"x{second}" in peers.to_dial(NOW + second)


def test_a_peer_s_own_addresses_come_first() -> None:
    peers = table("boot")
    peers.learn([address("boot", 7)], NOW, bootstrap=True)
    peers.see("boot", msgspec.structs.replace(card("boot"), addresses=[address("boot", 9), address("boot", 7)]), NOW)
    assert peers.to_dial(NOW) == {"boot": [address("boot", 9), address("boot", 7), address("boot")]}
    assert peers.addresses_of("nobody") == []


def test_others_are_told_what_a_card_says_alone() -> None:
    peers = table("boot", "silent")
    peers.learn([address("boot", 7)], NOW)
    peers.see("boot", card("boot", listens=False), NOW)
    assert peers.told_by("boot") == peers.told_by("silent") == peers.told_by("nobody") == []
    peers.see("boot", msgspec.structs.replace(card("boot", NOW + 1), addresses=[address("boot", 9)]), NOW + 1)
    assert peers.told_by("boot") == [address("boot", 9)]


def test_a_peer_has_so_many_addresses() -> None:
    peers = table()
    peers.learn([address("a", port) for port in range(20)], NOW)
    assert len(peers.addresses_of("a")) == MAX_ADDRESSES


def test_useless_addresses_are_told() -> None:
    peers = table()
    useless = ["", "/ip4/1.2.3.4/tcp/1", "/p2p/", "/ip4/1.2.3.4/p2p/x/tcp/1", address("x" * 200)]
    assert peers.learn([*useless, address("x")], NOW, bootstrap=True) == useless
    assert list(peers.to_dial(NOW)) == ["x"]
    assert peer_of("/ip4/1.2.3.4/tcp/1/p2p/relay/p2p-circuit/p2p/x") == "x"


def test_oneself_is_not_dialled() -> None:
    peers = table("me")
    peers.see("me", card("me"), NOW)
    assert peers.to_dial(NOW) == {} and peers.members(NOW) == {}


def test_a_clock_set_back_stops_no_dialling() -> None:
    peers = table("boot")
    peers.to_dial(NOW)
    assert "boot" in peers.to_dial(NOW - 86_400)


def test_a_small_step_back_stops_no_dialling() -> None:
    peers = table()
    peers.learn([address("old")], NOW)
    dials(peers, "old", 3600.0)
    assert "old" not in peers.to_dial(NOW + 3600.0)
    assert "old" in peers.to_dial(NOW + 3600.0 - OTHER_WAIT_S)


# --------------------------------------------------------------------- members


def test_cards_run_out_and_newer_ones_win() -> None:
    peers = table()
    peers.see("a", card("a", NOW), NOW + 5)
    peers.see("a", card("a", NOW + 15, shards=(7,)), NOW + 15)
    peers.see("a", card("a", NOW + 5, shards=(8,)), NOW + 16)  # from a slow replica
    assert peers.members(NOW + 15 + CARD_TTL_S - 1)["a"].shards == [7]
    assert peers.members(NOW + 15 + CARD_TTL_S) == {}
    peers.see("a", card("a", NOW + 15), NOW + 100)
    assert peers.members(NOW + 100) == {}


def test_future_cards_live_no_longer_than_others() -> None:
    peers = table()
    peers.see("fast", card("fast", NOW + MAX_CLOCK_SKEW_S), NOW)
    peers.see("liar", card("liar", NOW + MAX_CLOCK_SKEW_S + 1), NOW)
    assert set(peers.members(NOW)) == {"fast"}
    assert peers.members(NOW + CARD_TTL_S) == {}


def test_new_cards_win_after_a_clock_set_back() -> None:
    peers, back = table(), NOW - 3600.0
    for peer in ("a", "gone"):
        peers.see(peer, card(peer), NOW)
    assert set(peers.members(NOW)) == {"a", "gone"}
    peers.see("a", card("a", back, shards=[7]), back)
    assert set(peers.members(back)) == {"a"}
    assert peers.members(back)["a"].shards == [7]


def test_a_goodbye_ends_membership_until_a_newer_card() -> None:
    peers = table()
    peers.see("a", card("a", NOW), NOW)
    peers.see("a", card("a", NOW + 1, listens=False, gossip_id=""), NOW + 1)
    peers.see("a", card("a", NOW), NOW + 2)  # from a replica that missed it
    assert peers.members(NOW + 2) == {} and set(peers.left()) == {"a"}
    peers.see("a", card("a", NOW + 3), NOW + 3)
    assert set(peers.members(NOW + 3)) == {"a"} and peers.left() == {}


def test_nobody_gives_addresses_for_others() -> None:
    peers = table("victim")
    peers.see("liar", msgspec.structs.replace(card("liar"), addresses=[address("victim", 666), address("x", 666)]), NOW)
    assert peers.addresses_of("victim") == [address("victim")]
    assert peers.addresses_of("x") == peers.addresses_of("liar") == []


def test_floods_push_out_no_proven_peers() -> None:
    peers = table("boot")
    peers.see("proven", card("proven"), NOW)
    peers.set_connected(["proven"], NOW)
    peers.set_connected([], NOW)
    for i in range(MAX_CARDS + 100):
        peers.see(f"p{i}", card(f"p{i}", NOW + 1), NOW + 1)
    for i in range(2 * MAX_KNOWN_PEERS):
        peers.learn([address(f"q{i}", port) for port in range(20)], NOW + 2)
    assert len(peers.members(NOW + 2)) == MAX_CARDS and "proven" in peers.members(NOW + 2)
    assert peers.addresses_of("boot")
    assert len(peers) == MAX_KNOWN_PEERS and peers.addresses_of("proven")
    assert len(parse_cache(peers.write_cache())) <= MAX_KNOWN_PEERS
    flood = table()
    for i in range(2 * MAX_KNOWN_PEERS):
        flood.see(f"p{i}", card(f"p{i}", NOW + 5), NOW + 5)
    assert len(flood.to_dial(NOW + 5)) == MAX_DHT_DIALS
    assert len(flood) == MAX_KNOWN_PEERS
    flood.learn([address("rumour")], NOW + 9)  # later, but without a card
    assert not flood.addresses_of("rumour")
    assert all(flood.addresses_of(f"p{i}") for i in range(2 * MAX_KNOWN_PEERS))  # by their cards


# --------------------------------------------------------------------- gossip


def swarm(n: int, shards: int = 1, hubs: Iterable[int] = (), me: str = "me") -> PeerTable:
    peers = table(me=me)
    for i in range(n):
        roles = ["bootstrap"] if i in set(hubs) else ["trainer"]
        peers.see(f"p{i}", card(f"p{i}", roles=roles, shards=[] if i in set(hubs) else [i % shards]), NOW)
    return peers


def test_a_small_swarm_is_kept_whole() -> None:
    assert set(swarm(6).gossip_to_keep([0], 64, NOW)) == {f"gp{i}" for i in range(6)}


def test_hubs_come_first_then_shards_in_turn() -> None:
    peers = swarm(400, shards=10, hubs=(5, 17))
    keep = peers.gossip_to_keep([3, 4], 13, NOW)
    assert set(keep[:2]) == {"gp5", "gp17"}
    assert len(keep) == len(set(keep)) == 13
    counts = Counter(int(gossip_id[2:]) % 10 for gossip_id in keep[2:])
    assert set(counts) == {3, 4} and abs(counts[3] - counts[4]) <= 1
    assert keep == peers.gossip_to_keep([3, 4], 13, NOW)
    assert keep[2:] != swarm(400, shards=10, hubs=(5, 17), me="you").gossip_to_keep([3, 4], 13, NOW)[2:]


def test_own_bootstrap_peers_come_before_claimed_ones() -> None:
    peers = swarm(50, hubs=range(40))
    peers.learn([address("p49")], NOW, bootstrap=True)
    assert peers.gossip_to_keep([0], 64, NOW)[0] == "gp49"


def test_listening_members_are_hubs() -> None:
    peers = table()
    peers.see("open", card("open", shards=[9]), NOW)
    peers.see("closed", card("closed", listens=False), NOW)
    assert peers.gossip_to_keep([8, 9], 8, NOW) == ["gopen"]
    assert peers.gossip_to_dial([8, 9], 8, [], NOW) == {"gopen": [address("gopen", 2)]}
    assert peers.gossip_to_dial([8], 8, [], NOW) == {}  # forwards only what it listens to


def test_peers_that_never_answer_are_no_hubs() -> None:
    peers = swarm(40, hubs=(0,))
    others = [f"gp{i}" for i in range(1, 40)]
    assert peers.gossip_to_keep([0], 40, NOW)[0] == "gp0"
    tries = [t / 10 for t in range(200) if peers.gossip_to_dial([0], 40, others, NOW + t / 10)]
    assert len(tries) > UNREACHABLE_TRIES
    late = NOW + 20
    assert "gp0" not in peers.gossip_to_keep([0], 39, late)
    assert peers.gossip_to_keep([0], 40, late)[-1] == "gp0"
    peers.gossip_to_dial([0], 4, ["gp0"], late)  # it called us
    assert peers.gossip_to_keep([0], 40, late)[0] == "gp0"


def test_connected_ones_are_not_dialled() -> None:
    peers = swarm(6)
    assert set(peers.gossip_to_dial([0], 4, ["gp1", "gp2"], NOW)) <= {"gp0", "gp3", "gp4", "gp5"}
    keep = peers.gossip_to_keep([0], 4, NOW)
    assert peers.gossip_to_dial([0], 4, keep, NOW + 60) == {}


def test_lying_cards_hide_no_hub() -> None:
    peers = swarm(1)
    lie = msgspec.structs.replace(card("liar", gossip_id="gp0"), gossip=[address("gp0", 666)])
    peers.see("liar", lie, NOW)
    peers.see("fool", msgspec.structs.replace(card("fool"), gossip=[address("gp0", 667)]), NOW)  # not its own id
    dials = peers.gossip_to_dial([0], 8, [], NOW)
    assert dials.keys() == {"gp0"} and set(dials["gp0"]) == {address("gp0", 2), address("gp0", 666)}


def test_unclaimed_connections_become_ghosts() -> None:
    peers = swarm(2)
    assert peers.ghosts(["gp0", "old"], NOW) == []
    assert peers.ghosts(["gp0", "old"], NOW + GHOST_S) == []
    assert peers.ghosts(["gp0", "old"], NOW + GHOST_S + 1) == ["old"]
    assert peers.ghosts(["gp0", "old"], NOW + GHOST_S + 1, turn_s=10.0) == []
    assert peers.ghosts(["gp0"], NOW + 10) == []
    assert peers.ghosts(["gp0", "old"], NOW + 11) == []  # came back: counts anew


def test_a_peer_s_old_process_becomes_a_ghost() -> None:
    peers = swarm(1)
    peers.see("p0", card("p0", NOW + 1, gossip_id="new"), NOW + 1)
    assert peers.ghosts(["gp0", "new"], NOW + 1) == []
    assert peers.ghosts(["gp0", "new"], NOW + 2 + GHOST_S) == ["gp0"]


def test_nobody_is_a_ghost_while_lookups_fail() -> None:
    peers = swarm(3)
    silent = NOW + 2 * CARD_RENEWAL_S
    peers.see("p0", card("p0", NOW), silent)  # the same card again is no news
    assert peers.ghosts(["gp0", "old"], silent + 1) == []
    assert peers.ghosts(["gp0", "old"], silent + 2 + GHOST_S) == []
    assert peers.ghosts(["gp0", "old"], silent + CARD_TTL_S) == []  # all cards have run out: gossip goes on
    peers.see("p0", card("p0", silent + 100), silent + 100)
    assert peers.ghosts(["gp0", "old"], silent + 100) == []
    assert peers.ghosts(["gp0", "old"], silent + 101 + GHOST_S) == ["old"]


def test_ghosts_are_known_after_a_clock_set_back() -> None:
    peers, back = swarm(2), NOW - 3600.0
    assert peers.ghosts(["gp0", "old"], NOW) == []
    assert peers.ghosts(["gp0", "old"], back) == []
    assert peers.ghosts(["gp0", "old"], back + GHOST_S + 1) == []  # no news since: gossip goes on
    peers.see("p0", card("p0", back + 20), back + 20)
    assert peers.ghosts(["gp0", "old"], back + 20) == []
    assert peers.ghosts(["gp0", "old"], back + 21 + GHOST_S) == ["old"]


def test_ghosts_go_despite_a_small_step_back() -> None:
    peers = swarm(1)
    peers.ghosts(["gp0", "old"], NOW + 20)
    assert peers.ghosts(["gp0", "old"], NOW) == []
    assert peers.ghosts(["gp0", "old"], NOW + 1 + GHOST_S) == ["old"]


# --------------------------------------------------------------------- the cache file


def test_the_cache_finds_peers_again_after_a_restart() -> None:
    peers = table("boot", "dead")
    peers.see("a", card("a"), NOW + 1)
    peers.set_connected(["boot"], NOW + 2)
    data = peers.write_cache()
    assert [record["addresses"] for record in json.loads(data)] == [[address("boot")], [address("a")]]  # freshest first
    again = table()
    again.read_cache(data, NOW + 1000)
    assert list(again.to_dial(NOW + 1000)) == again.worth_finding() == ["boot", "a"]
    assert again.write_cache() == data


def test_a_future_cache_counts_as_from_now() -> None:
    peers = table()
    peers.read_cache(json.dumps([{"addresses": [address("a")], "seen": NOW + 1e9}]).encode(), NOW)
    assert parse_cache(peers.write_cache())[0].seen == NOW


def test_a_full_table_fits_into_the_file() -> None:
    peers = table()
    for i in range(MAX_KNOWN_PEERS):
        longest = [f"/{'a' * 120}{port}/p2p/{i:052d}" for port in range(8)]
        peers.learn(longest, NOW)
        peers.learn([f"{item[:-60]}b/p2p/{i:052d}" for item in longest], NOW, bootstrap=True)
    assert len(parse_cache(peers.write_cache())) == MAX_KNOWN_PEERS


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[",
        b"{}",
        b"null",
        b'[{"addresses":["/a/p2p/x"]}]',
        b'[{"addresses":[],"seen":1}]',
        b'[{"addresses":["a/p2p/x"],"seen":1}]',
        b'[{"addresses":["/a/p2p/x"],"seen":NaN}]',
        b'[{"addresses":["/a/p2p/x"],"seen":1e999}]',
        b'[{"addresses":["/a/p2p/x"],"seen":-1}]',
        b'[{"addresses":["/a/p2p/\xff"],"seen":1}]',
        b'[{"addresses":["/a/p2p/\\ud800"],"seen":1}]',
        b"[" * 100_000,
        b'[{"seen":' * 100_000,
        json.dumps([{"addresses": ["/a/p2p/x"], "seen": 1}] * (MAX_KNOWN_PEERS + 1)).encode(),
    ],
)
def test_a_damaged_cache_is_refused_whole(data: bytes) -> None:
    peers = table()
    with pytest.raises(RemoteProtocolError) as caught:
        peers.read_cache(data, NOW)
    assert caught.value.reason == "schema"
    assert peers.to_dial(NOW) == {}


def test_an_oversized_cache_is_refused_unread() -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        parse_cache(b" " * MAX_CACHE_BYTES + b"[]")
    assert caught.value.reason == "size"


CACHE = json.dumps([{"addresses": [address("a"), address("a", 2)], "seen": NOW}, {"addresses": ["/b"], "seen": 0}])


@given(st.binary(max_size=200) | mutations(CACHE.encode()) | st.text(max_size=100).map(lambda text: text.encode()))
def test_any_bytes_are_a_cache_or_refused(data: bytes) -> None:
    peers = table()
    if refused(lambda: peers.read_cache(data, NOW), {"size", "schema"}) is None:
        for addresses in peers.to_dial(NOW).values():
            assert all(peer_of(item) for item in addresses)


# --------------------------------------------------------------------- floods of cards


def test_a_full_table_shows_newcomers_and_keeps_members() -> None:
    peers = table("boot")
    settled = [f"m{i}" for i in range(200)]
    for peer in settled:
        peers.see(peer, card(peer), NOW)
    late, shown = [f"late{i}" for i in range(20)], Counter[str]()
    peers.see("friend", card("friend", NOW + 1), NOW + 1)
    peers.set_connected(["friend"], NOW + 1)
    for turn in range(1, 41):
        now = NOW + turn * 15
        crowd = [*settled, *late, *(f"x{turn // 4}/{i}" for i in range(5000))]  # renewed each minute
        random.Random(turn).shuffle(crowd)
        for peer in ["friend", *crowd]:
            peers.see(peer, card(peer, now), now)
        members = peers.members(now)
        assert len(members) <= MAX_CARDS and members.keys() >= {"friend", *settled}
        shown.update(members.keys() & set(late))
    assert min(shown[peer] for peer in late) > 0


def test_a_flood_hardly_dials_a_bystander() -> None:
    dials = Dials()
    peers = PeerTable("me", random.Random(0), dials=dials)
    peers.learn([address("boot")], NOW, bootstrap=True)
    hits, place = Counter[str](), "/ip4/203.0.113.1/tcp/80"
    reached = {f"m{i}": f"/ip4/10.1.0.{i}/tcp/1" for i in range(200)}
    connected: set[str] = set()
    for second in range(0, 600, 10):
        now = NOW + second
        for peer, way in reached.items() if second % 20 == 0 else ():
            honest = msgspec.structs.replace(
                card(peer, now), addresses=[f"{way}/p2p/{peer}"], gossip=[f"{way}1/p2p/g{peer}"]
            )
            peers.see(peer, honest, now)
        for i in range(2000) if second % 40 == 0 else ():
            lie = msgspec.structs.replace(
                card(f"x{i}", now, roles=["relay"]),
                addresses=[f"{place}/p2p/x{i}", f"/ip4/10.1.0.{i % 200}/tcp/1/p2p/x{i}"],
                gossip=[f"{place}/p2p/gx{i}", f"/ip4/10.1.0.{i % 200}/tcp/11/p2p/gx{i}"],
            )
            peers.see(f"x{i}", lie, now)
        dialled = [(peer, way) for peer, ways in peers.to_dial(now).items() for way in ways if dials.take(way, now)]
        dialled += [
            (gossip_id, way)
            for gossip_id, ways in peers.gossip_to_dial([0], 64, sorted(connected), now).items()
            for way in ways
        ]
        for id, way in dialled:
            head = way.rpartition("/p2p/")[0]
            hits[head] += 1
            if reached.get(id.removeprefix("g"), "-") + "1" * id.startswith("g") == head:
                connected.add(id)
                dials.prove(id, [head], now)
            elif head in reached.values():
                dials.hint(way, next(peer for peer, at in reached.items() if at == head), now)
        peers.set_connected([id for id in connected if not id.startswith("g")], now)
    assert hits[place] == 1
    assert len([id for id in connected if not id.startswith("g")]) >= WANTED
    assert len([id for id in connected if id.startswith("g")]) >= HUBS
    del hits[address("boot").rpartition("/p2p/")[0]]
    assert max(hits.values()) <= 600 / INHABITED_WAIT_S + 5


def test_liars_push_out_no_honest_gossip_address() -> None:
    dials = Dials()
    peers = PeerTable("me", random.Random(0), dials=dials)
    peers.see("p0", card("p0"), NOW)
    for i in range(30):
        lies = [f"/ip4/198.51.{i}.{k}/tcp/1/p2p/gp0" for k in range(MAX_ADDRESSES)]
        peers.see(f"x{i}", msgspec.structs.replace(card(f"x{i}", roles=["relay"], gossip_id="gp0"), gossip=lies), NOW)
    dialled = [
        way for t in range(0, 50, 5) for ways in peers.gossip_to_dial([0], 8, [], NOW + t).values() for way in ways
    ]
    assert address("gp0", 2) in dialled
    peers.set_connected(["p0"], NOW)
    dials.prove("p0", [address("p0").rpartition("/p2p/")[0]], NOW)
    peers._gossip.clear()
    assert peers.gossip_to_dial([0], 8, [], NOW + 55)["gp0"][0] == address("gp0", 2)


def test_unreachable_gossip_ids_leave_their_places() -> None:
    dials = Dials()
    peers = PeerTable("me", random.Random(0), dials=dials)
    for i in range(100):
        at = f"/ip4/203.0.113.1/tcp/80/p2p/gx{i}"
        peers.see(f"x{i}", msgspec.structs.replace(card(f"x{i}", roles=["relay"]), gossip=[at]), NOW)
    peers.see("honest", card("honest"), NOW)
    assert len(peers.gossip_to_dial([0], 8, [], NOW)) == 1  # one endpoint
    assert "ghonest" in peers.gossip_to_dial([0], 8, [], NOW + 5)
    assert "ghonest" in peers.gossip_to_keep([0], 8, NOW + 30)
