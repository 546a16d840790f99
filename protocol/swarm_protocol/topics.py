"""Names in a swarm: shards, DHT keys and epochs. `gossip_kinds` has the topics.

shard  = sha256("shard" | peer) mod shards                       which of a kind's topics a peer publishes on
bucket = first nibble of sha256(peer)                            DHT key under which a peer's card lies
"""

from __future__ import annotations

import hashlib

from swarm_protocol.limits import EPOCH_SECONDS, MEMBERSHIP_BUCKETS


def membership_key(swarm: str, bucket: int) -> str:
    """DHT key of one bucket of cards."""
    return f"{swarm}/peers/{bucket:x}"


def shard_of(peer: str, shards: int) -> int:
    """The shard that `peer` publishes on."""
    return number("shard", peer) % shards


def bucket_of(peer: str) -> int:
    return number(peer) * MEMBERSHIP_BUCKETS >> 64


def epoch_at(now: float) -> int:
    """Assignment epoch at Unix time `now`."""
    return int(now // EPOCH_SECONDS)


def short_hash(peer: str) -> str:
    """The 16 hex digits that name a peer where its whole id would take too much room."""
    return f"{number('peer', peer):016x}"


def number(*parts: str) -> int:
    """64 bits of a hash of `parts`, as an integer."""
    return int.from_bytes(hashlib.sha256("/".join(parts).encode()).digest()[:8], "big")
