"""A kind of message beside rollouts, as somebody adds one."""

from __future__ import annotations

from typing import Annotated

import msgspec

from swarm_protocol.codec import SignedCodec
from swarm_protocol.gossip_kinds import Budget, Kind
from swarm_protocol.messages import Time


class Note(msgspec.Struct, frozen=True):
    protocol: int
    swarm: str
    created: Time
    text: Annotated[str, msgspec.Meta(max_length=200)]


NOTES = SignedCodec(Note, limit=1024, tag=b"swarm-node/note/1\0")
BUDGET = Budget(messages_per_minute=60, bytes_per_minute=60_000, max_age_s=60.0)
KIND = Kind("notes", NOTES.verify, BUDGET, sharded=False)
ADD = """
from swarm_protocol import gossip_kinds
from tests.support.notes import KIND

gossip_kinds.KINDS = (*gossip_kinds.KINDS, KIND)
"""
"""A program to run first, in a process that is to know the kind."""
