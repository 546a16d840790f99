"""Names in a swarm: gossip topics, DHT keys, and the task of a peer's slot.

shard  = sha256("shard" | peer) mod shards                       topic on which a peer's rollouts travel
bucket = first nibble of sha256(peer)                            DHT key under which a peer's card lies
task   = f(sha256("task" | swarm | peer | epoch | slot))         task to which a peer may publish answers
place  = frac(sha256("place" | swarm | peer | epoch) / 2^64 + slot / golden ratio)      source of that task
"""

from __future__ import annotations

import hashlib
from math import sqrt

from protocol.limits import EPOCH_SECONDS, MEMBERSHIP_BUCKETS

GOLDEN = (sqrt(5) + 1) / 2


def rollout_topic(swarm: str, shard: int) -> str:
    return f"swarm-node/{swarm[:16]}/rollouts/{shard}"


def membership_key(swarm: str, bucket: int) -> str:
    """DHT key of one bucket of cards."""
    return f"{swarm}/peers/{bucket:x}"


def shard_of(peer: str, shards: int) -> int:
    """The shard that `peer` publishes on."""
    return _number("shard", peer) % shards


def bucket_of(peer: str) -> int:
    return _number(peer) * MEMBERSHIP_BUCKETS >> 64


def epoch_at(now: float) -> int:
    """Assignment epoch at Unix time `now`."""
    return int(now // EPOCH_SECONDS)


def slot_key(swarm: str, peer: str, epoch: int, slot: int) -> str:
    """Seed of the task in that slot, as text."""
    return hashlib.sha256(f"task/{swarm}/{peer}/{epoch}/{slot}".encode()).hexdigest()


def slot_place(swarm: str, peer: str, epoch: int, slot: int) -> float:
    """The source of the task in that slot, as a point in [0, 1) on the sources' weights laid end to end. The slots of
    one epoch follow the golden-ratio sequence, so any run of slots covers the sources evenly."""
    return (_number("place", swarm, peer, str(epoch)) / 2**64 + slot / GOLDEN) % 1.0


def _number(*parts: str) -> int:
    """64 bits of a hash of `parts`."""
    return int.from_bytes(hashlib.sha256("/".join(parts).encode()).digest()[:8], "big")
