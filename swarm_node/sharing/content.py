"""What two nodes must say of a group in the same way."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from protocol.messages import SharedGroup
from swarm_node.types import Rollout


def slot_id(peer: str, group: SharedGroup) -> bytes:
    """16 bytes that tell the slots of all peers apart."""
    return hashlib.sha256(f"{peer}/{group.epoch}/{group.slot}".encode()).digest()[:16]


def content_id(peer: str, group: SharedGroup) -> bytes:
    """16 bytes that tell a group apart by its sender, its slot, its task and its texts, whatever batch it came in."""
    digest = hashlib.sha256(f"{peer}/{group.epoch}/{group.slot}/{group.task}".encode())
    for rollout in group.rollouts:
        text = rollout.text.encode()
        digest.update(len(text).to_bytes(4, "big") + text)
    return digest.digest()[:16]


def has_signal(rollouts: Sequence[Rollout]) -> bool:
    """Whether any reward differs: without that there is nothing to learn from."""
    return len({(r.reward, *r.rewards.items()) for r in rollouts}) > 1
