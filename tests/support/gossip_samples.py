"""Batches and peers for tests of gossip; imports neither libp2p nor hivemind."""

from __future__ import annotations

import os
import time
from functools import cache
from itertools import count

import msgspec

from swarm_protocol.codec import BATCH_TAG
from swarm_protocol.identity import Identity
from swarm_protocol.messages import PROTOCOL_VERSION, RolloutBatch, SharedGroup, SharedRollout, SharedSampling, TaskName
from swarm_protocol.topics import shard_of

_sequence = count()


def batch(swarm: str, size: int) -> RolloutBatch:
    """A batch of about `size` bytes, unlike any other."""
    groups = max(1, size // 50_000)
    texts = [os.urandom(max(8, size // (4 * groups))).hex() for _ in range(2 * groups)]
    task = TaskName("gcd", "0" * 16, "reasoning-gym 0", 0, 1)
    return RolloutBatch(
        protocol=PROTOCOL_VERSION,
        swarm=swarm,
        sequence=next(_sequence),
        created=time.time(),
        fingerprint="0" * 16,
        tokenizer="0" * 16,
        sampling=SharedSampling(16, 1.0, 1.0),
        groups=[
            SharedGroup(
                task,
                1,
                1,
                b"x" * 16,
                0,
                [SharedRollout.of(texts[2 * i], True), SharedRollout.of(texts[2 * i + 1], True)],
            )
            for i in range(groups)
        ],
    )


def seal_as(record: RolloutBatch, sender: Identity) -> bytes:
    """Sealed without the checks of `codec.sign_batch`, which refuses to send nonsense."""
    body = msgspec.msgpack.encode(record)
    return sender.public_key + sender.sign(BATCH_TAG, body) + body


@cache
def peer_on_shard(shard: int, shards: int, skip: int = 0) -> Identity:
    """A peer that publishes on `shard`; others for other `skip`."""
    found = (
        identity
        for seed in count(skip * 1000)
        if shard_of((identity := Identity.generate(seed.to_bytes(32, "big"))).peer_id, shards) == shard
    )
    return next(found)
