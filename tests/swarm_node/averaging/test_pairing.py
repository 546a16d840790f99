"""Pairs that each peer computes alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import pytest

from swarm_node.averaging.pairing import BUCKET, partner


def peers(n: int) -> list[str]:
    return [f"12D3KooW{i}" for i in range(n)]


def pairs(everyone: Collection[str], round: int, seed: str = "swarm") -> set[frozenset[str]]:
    """The pairs of a round, computed by every peer."""
    found = {peer: partner(peer, everyone, round, seed) for peer in everyone}
    assert all(other is None or found[other] == peer for peer, other in found.items())
    return {frozenset((peer, other)) for peer, other in found.items() if other is not None}


@pytest.mark.parametrize("n", [2, 3, 8, 17, 64])
def test_all_but_an_odd_one_are_paired(n):
    for round in range(20):
        assert len(pairs(peers(n), round)) == n // 2


def test_nobody_is_paired_with_itself():
    assert partner("a", [], 0, "s") is None
    assert partner("a", ["a"], 0, "s") is None
    assert partner("a", ["b"], 0, "s") == "b"


def test_only_peers_that_are_there_count():
    everyone = peers(9)
    for me in everyone:
        others = [peer for peer in everyone if peer != me]
        assert partner(me, everyone, 5, "s") == partner(me, others[::-1] + others, 5, "s")


def test_rounds_and_seeds_pair_anew():
    everyone = peers(64)
    first = pairs(everyone, 1)
    assert len(first & pairs(everyone, 2)) < 6  # half a pair is usual
    assert len(first & pairs(everyone, 1, "other")) < 6


def test_every_partner_is_equally_likely():
    """Chi-square of each peer's partners over 700 rounds, 6 degrees of freedom: 27.9 is the 99.99 % point."""
    everyone, rounds = peers(8), 700
    counts = Counter(pair for round in range(rounds) for pair in pairs(everyone, round))
    expected = rounds / 7
    for me in everyone:
        of_mine = [counts[frozenset((me, other))] for other in everyone if other != me]
        assert sum(of_mine) == rounds
        assert sum((count - expected) ** 2 / expected for count in of_mine) < 27.9


def test_one_more_peer_changes_few_pairs():
    everyone, rounds = peers(64), 30
    broken = [len(pairs(everyone, r) - pairs([*everyone, "new"], r)) for r in range(rounds)]
    assert 1 <= sum(broken) / rounds < 3  # 2.2 of 32, measured over 200 rounds
    assert max(broken) <= 6


def test_an_unequal_view_costs_at_most_one_pair():
    """Only pairs that both peers see count. A peer that knows one peer more mostly has the same partner."""
    everyone, rounds = peers(64), 200
    me = everyone[0]
    changed = sum(partner(me, everyone, r, "s") != partner(me, [*everyone, "new"], r, "s") for r in range(rounds))
    assert 1 <= changed <= 40  # of 200; 14 are expected: 2.2 pairs of 32


def test_large_swarms_are_paired_in_groups():
    everyone = peers(BUCKET + 500)
    sample = everyone[::50]
    found = {me: partner(me, everyone, 3, "s") for me in sample}
    assert sum(other is None for other in found.values()) <= 2
    for me, other in found.items():
        assert other is None or partner(other, everyone, 3, "s") == me
    assert found != {me: partner(me, everyone, 4, "s") for me in sample}


def test_dial_only_peers_meet_as_a_last_resort():
    everyone = peers(12)
    for hidden in (everyone[:5], everyone[:6], everyone[:9], everyone):
        for r in range(20):
            found = {me: partner(me, everyone, r, "s", hidden) for me in everyone}
            assert all(other is not None and found[other] == me for me, other in found.items())
            both = sum(me in hidden and other in hidden for me, other in found.items())
            assert both == max(0, 2 * len(hidden) - 12)
