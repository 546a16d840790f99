"""The search for peers, in a network that answers at once."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import pytest

from swarm_protocol.transports.dht.lookup import BEAM, BLIND, MAX_SEARCH_CALLS, SEARCH_S, SMALL_SWARM, Search, direct

RNG = random.Random(4)
PEERS = [RNG.getrandbits(160) for _ in range(500)]
KEYS = [RNG.getrandbits(160) for _ in range(16)]


class Network:
    """Peers that each know `knows` others: half of them near to itself. `dead` ones do not answer, and `liars` name
    peers that do not exist."""

    def __init__(self, peers: Sequence[int], dead: Collection[int] = (), liars: Collection[int] = ()) -> None:
        self.tables = {
            peer: [
                *heapq.nsmallest(20, peers, lambda other, peer=peer: other ^ peer),
                *RNG.sample(peers, min(20, len(peers))),
            ]
            for peer in peers
        }
        self.dead, self.liars = dead, liars
        self.asked: Counter[int] = Counter()
        self.keys: list[int] = []

    async def ask(self, peer: int, wanted: Sequence[bytes]) -> list[int] | None:
        keys = [int.from_bytes(key, "big") for key in wanted]
        self.asked[peer] += 1
        self.keys.append(len(keys))
        await asyncio.sleep(0)
        if peer in self.liars:
            return [key ^ RNG.getrandbits(20) for key in keys for _ in range(20)]
        if peer in self.dead or peer not in self.tables:
            return None
        known = self.tables[peer]
        return list({other for key in keys for other in nearest(key, known, 20)})

    def find(
        self, keys: Sequence[int], known: Sequence[int], also: dict[int, Sequence[int]] | None = None
    ) -> dict[int, list[int]]:
        return found_by(keys, known, self.ask, also or {})


def found_by(
    keys: Sequence[int], known: Sequence[int], ask: Any, also: dict[int, Sequence[int]], seconds: float = SEARCH_S
) -> dict[int, list[int]]:
    """What a search finds, with keys as numbers."""
    wanted = {peer: [key.to_bytes(20, "big") for key in numbers] for peer, numbers in also.items()}
    search = Search([key.to_bytes(20, "big") for key in keys], known, wanted, ask, lambda peer: peer)
    return {int.from_bytes(key, "big"): peers for key, peers in asyncio.run(search.run(seconds)).items()}


def nearest(key: int, among: Collection[int], count: int = BEAM) -> list[int]:
    return heapq.nsmallest(count, among, lambda peer: peer ^ key)


def test_the_nearest_of_many_are_found() -> None:
    network = Network(PEERS)
    found = network.find(KEYS, PEERS[:3])
    assert sum(len(set(found[key]) & set(nearest(key, PEERS))) for key in KEYS) > 0.95 * BEAM * len(KEYS)
    assert network.asked.total() < MAX_SEARCH_CALLS


def test_few_peers_are_asked_once_for_all_keys() -> None:
    network = Network(few := PEERS[:6])
    found = network.find(KEYS, few[:1], also={few[1]: KEYS})
    assert all(set(found[key]) == set(few) for key in KEYS)
    assert network.asked == dict.fromkeys(few, 1) and set(network.keys) == {16}


def test_peers_that_do_not_answer_are_passed_over() -> None:
    dead = {peer for key in KEYS for peer in nearest(key, PEERS, 4)}
    found = Network(PEERS, dead).find(KEYS, PEERS[:20])
    for key in KEYS:
        assert len(set(found[key]) & set(nearest(key, set(PEERS) - dead))) >= BEAM - 2 and not set(found[key]) & dead


def test_names_of_nobody_end_no_search() -> None:
    liar = nearest(KEYS[0], PEERS, 1)[0]
    network = Network(PEERS[:30], liars={liar})
    network.tables[PEERS[0]].append(liar)
    found = network.find(KEYS[:1], [liar, PEERS[0]], also={PEERS[1]: KEYS[:1]})
    assert network.asked[PEERS[1]] == 1 and network.asked.total() <= MAX_SEARCH_CALLS
    assert found[KEYS[0]] == nearest(KEYS[0], {liar, *PEERS[:30]})


def test_a_search_ends_with_what_it_has() -> None:
    async def ask(peer: int, keys: Sequence[bytes]) -> list[int]:
        if peer != PEERS[0]:
            await asyncio.sleep(3600)
        return PEERS[:5]

    found = found_by(KEYS, PEERS[:2], ask, {}, 0.2)
    assert all(found[key] == PEERS[:1] for key in KEYS)


@pytest.mark.parametrize(("members", "most"), [(0, BLIND), (3, 8), (SMALL_SWARM, 8), (SMALL_SWARM + 1, 4)])
def test_bootstrap_and_oldest_peers_are_always_dealt_with(members: int, most: int) -> None:
    connected = [f"peer {i}" for i in range(200)]
    for seed in range(20):
        chosen = direct(connected, {"peer 60", "elsewhere"}, members, random.Random(seed))
        assert len(chosen) == len(set(chosen)) == most and {"peer 0", "peer 60"} <= set(chosen)
    assert direct([], {"peer 60"}, members, RNG) == []
    assert sorted(direct(connected[:3], {"peer 1"}, members, RNG)) == connected[:3]
