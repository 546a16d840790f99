"""Names of topics and of keys in the DHT, and how evenly they spread."""

from __future__ import annotations

from collections import Counter

import pytest

from swarm_protocol.gossip_kinds import ROLLOUTS
from swarm_protocol.limits import EPOCH_SECONDS, MEMBERSHIP_BUCKETS
from swarm_protocol.topics import bucket_of, epoch_at, membership_key, shard_of
from tests.support.wire import IDENTITY, SWARM

PEERS = [f"peer-{i}" for i in range(4000)]


def spread(counts: Counter[int], places: int) -> float:
    """Chi-square over `places` per degree of freedom: 1 is what chance does."""
    expected = counts.total() / places
    return sum((counts[i] - expected) ** 2 / expected for i in range(places)) / (places - 1)


def test_golden_names() -> None:
    peer = IDENTITY.peer_id
    assert ROLLOUTS.topic(SWARM, 3) == "swarm-node/5a5a5a5a5a5a5a5a/rollouts/3"
    assert membership_key(SWARM, 10) == f"{SWARM}/peers/a"
    assert (shard_of(peer, 32), bucket_of(peer)) == (8, 11)


@pytest.mark.parametrize("shards", [1, 2, 7, 32])
def test_shards_are_filled_evenly(shards: int) -> None:
    counts = Counter(shard_of(peer, shards) for peer in PEERS)
    assert set(counts) == set(range(shards))
    assert shards == 1 or spread(counts, shards) < 2.5


def test_buckets_are_filled_evenly() -> None:
    counts = Counter(bucket_of(peer) for peer in PEERS)
    assert set(counts) == set(range(MEMBERSHIP_BUCKETS))
    assert spread(counts, MEMBERSHIP_BUCKETS) < 2.5


def test_shard_and_bucket_are_independent() -> None:
    counts = Counter(shard_of(peer, 4) * 4 + bucket_of(peer) // 4 for peer in PEERS)
    assert spread(counts, 16) < 2.5


def test_epochs() -> None:
    assert epoch_at(0.0) == 0
    assert epoch_at(EPOCH_SECONDS - 0.001) == 0
    assert epoch_at(EPOCH_SECONDS) == 1
