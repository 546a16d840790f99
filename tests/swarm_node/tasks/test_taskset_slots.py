"""Which task a slot of a peer has."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_node.tasks.taskset import slot_key, slot_place
from tests.support.wire import IDENTITY, SWARM

PEERS = [f"peer-{i}" for i in range(4000)]


def spread(counts: Counter[int], places: int = 16) -> float:
    """Chi-square over `places` per degree of freedom: 1 is what chance does."""
    expected = counts.total() / places
    return sum((counts[i] - expected) ** 2 / expected for i in range(places)) / (places - 1)


def test_golden_slot() -> None:
    slot = SWARM, IDENTITY.peer_id, 30_000_000, 17
    assert slot_key(*slot) == "a86764725279abb2e5bcc2652ba041b40c88588666987fccb793715e3a29285f"
    assert slot_place(*slot) == pytest.approx(0.33292088478, abs=1e-9)


@pytest.mark.parametrize(("first", "n"), [(0, 8), (0, 64), (1000, 64), (0, 4096)])
def test_any_run_of_slots_covers_the_sources_evenly(first: int, n: int) -> None:
    places = sorted(slot_place(SWARM, IDENTITY.peer_id, 30_000_000, first + i) for i in range(n))
    gaps = [b - a for a, b in zip(places, places[1:] + [places[0] + 1], strict=True)]
    assert max(gaps) < 2.7 / n  # three-distance theorem for the golden ratio; random points leave gaps of log(n) / n
    assert min(gaps) > 0.3 / n


@given(st.integers(0, 2**40), st.integers(0, 4095), st.text(max_size=20))
def test_places_lie_in_the_unit_interval(epoch: int, slot: int, peer: str) -> None:
    assert 0.0 <= slot_place(SWARM, peer, epoch, slot) < 1.0


def test_first_slots_differ_between_peers_and_epochs() -> None:
    by_peer = Counter(int(16 * slot_place(SWARM, peer, 1, 0)) for peer in PEERS)
    by_epoch = Counter(int(16 * slot_place(SWARM, IDENTITY.peer_id, epoch, 0)) for epoch in range(4000))
    assert max(spread(by_peer), spread(by_epoch)) < 2.5


def test_no_two_slots_share_a_task() -> None:
    keys = {
        slot_key(swarm, peer, epoch, slot)
        for swarm in (SWARM, "5b" * 32)
        for peer in ("a", "b")
        for epoch in (1, 11)
        for slot in (1, 11, 111)
    }
    assert len(keys) == 24
