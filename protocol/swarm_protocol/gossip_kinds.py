"""What is gossiped: `KINDS`, with one row for each kind of message.

    kind -> a topic for each of its shards       swarm-node/<start of the swarm's id>/<name of the kind>/<shard>

The gossip process, its gate, the transport and the bootstrap read the table, and know no kind by its name. A new kind
takes three files: its record with its codec and its row, the code that sends and hears it, and its metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from swarm_protocol.codec import verify_batch
from swarm_protocol.limits import MAX_SHARDS
from swarm_protocol.topics import shard_of

Verify = Callable[[bytes, str, Collection[int]], tuple[str, Any]]
"""(message, swarm, protocol versions spoken) -> (author, record with a `created`); `SignedCodec.verify` is one. Raises
RemoteProtocolError."""


class Budget(NamedTuple):
    """What the gate lets one author send."""

    messages_per_minute: int
    bytes_per_minute: int
    max_age_s: float  # older messages are refused


@dataclass(frozen=True)
class Kind:
    """A kind of message. The gate verifies each message; one takes at most `MAX_BATCH_BYTES`."""

    name: str
    verify: Verify
    budget: Budget | None = None  # None: as the swarm's manifest limits rollouts
    sharded: bool = True  # on as many topics as the swarm has shards, by author; else all on one

    def topic(self, swarm: str, shard: int = 0) -> str:
        return f"swarm-node/{swarm[:16]}/{self.name}/{shard}"

    def topics(self, swarm: str, shards: int) -> list[str]:
        """All topics of this kind, by shard."""
        return [self.topic(swarm, shard) for shard in range(shards if self.sharded else 1)]

    def topic_of(self, author: str, swarm: str, shards: int) -> str:
        """The topic that `author` publishes on."""
        return self.topic(swarm, shard_of(author, shards) if self.sharded else 0)


ROLLOUTS: Final = Kind("rollouts", verify_batch)
KINDS: Final[tuple[Kind, ...]] = (ROLLOUTS,)
MAX_TOPICS: Final = MAX_SHARDS * len(KINDS)
