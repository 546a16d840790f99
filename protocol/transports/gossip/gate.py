"""Which gossip messages are let in and passed on. All apply the same rules, so that bad ones die at their source.

budget of the connection -> size -> signature -> version -> schema -> swarm -> shard -> clock -> seen before
-> rate of its author -> authors never heard before

Authors and origins are names that a sender may make up, a connection is not: what it brings is counted whether it is
let in or not, and what exceeds its budgets (`flood`) is blamed on it. An honest hub passes on only what it lets in, and
each budget is more than a hub can let in through all its connections: it is not blamed for the floods of others.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from protocol import codec, topics
from protocol.budgets import Budgets
from protocol.errors import RemoteProtocolError
from protocol.transports.gossip.pipe import GossipSettings

AUTHORS = 4096
"""Authors whose rate is remembered; those heard of longest ago are forgotten first."""
CONNECTIONS = 1024
"""Connections likewise: twice as many as there can be at a time."""
SEEN = 65_536
"""Digests of messages let in that are remembered (16 bytes each)."""

SHARD_AUTHORS = 64
"""Twice as many as a shard should have."""
CONNECTION_MESSAGES = 4 * SHARD_AUTHORS * 60
"""A minute: four times what a shard of authors who speak every second needs, and more than a Python process passes on
(7 ms of CPU a message, measured at 5 KB)."""
CONNECTION_BYTES = 60_000 * CONNECTION_MESSAGES
"""A minute, 15 MB a second: likewise, at 60 KB a message."""
MAX_NEWCOMERS = AUTHORS // 4
"""A minute over one connection, however many shards there are: else `AUTHORS` would be forgotten at once."""
GATE_NEWCOMERS, BLAMED_NEWCOMERS = 4, 8
"""Times what one connection may bring: new authors let in over all of them; new authors that one may offer without
blame. The first is the smaller one, so that a hub which several flooders use is not blamed for them."""

HARMLESS = frozenset({"version", "newer", "age", "future", "seen", "rate", "newcomers"})
"""Reasons that do not count against the forwarder: it may be older than us, its clock or counters may differ."""


class Gate:
    """Decides message by message; memory is bounded by `AUTHORS`, `CONNECTIONS` and `SEEN`."""

    def __init__(self, limits: GossipSettings) -> None:
        self.limits = limits
        self._spoken = limits.spoken or codec.SPOKEN
        messages, size = limits.messages_per_minute, limits.bytes_per_minute
        newcomers = min(SHARD_AUTHORS * limits.shards, MAX_NEWCOMERS)
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._authors = Budgets(AUTHORS, messages, size)
        self._brought = Budgets(CONNECTIONS, max(CONNECTION_MESSAGES, 2 * messages), max(CONNECTION_BYTES, 2 * size))
        """All that comes over a connection."""
        self._said = Budgets(CONNECTIONS, messages, size)
        """What the process at its other end signed itself."""
        self._offered = Budgets(CONNECTIONS, BLAMED_NEWCOMERS * newcomers)
        self._introduced = Budgets(CONNECTIONS, newcomers)
        """New authors over a connection: all, and those let in."""
        self._met = Budgets(1, GATE_NEWCOMERS * newcomers)
        """New authors let in over any."""

    def refusal(self, topic: str, data: bytes, origin: str, forwarder: str, now: float) -> str | None:
        """Why `data`, signed by gossip process `origin` and brought by `forwarder`, is refused at Unix time `now`;
        None = it is let in. Never raises."""
        cost = 1, len(data)
        if not self._brought.take(forwarder, now, *cost):
            return "flood"
        if origin == forwarder and not self._said.take(forwarder, now, *cost):
            return "flood"
        try:
            author, batch = codec.verify_batch(data, self.limits.swarm, self._spoken)
        except RemoteProtocolError as error:
            return error.reason
        if topics.rollout_topic(self.limits.swarm, topics.shard_of(author, self.limits.shards)) != topic:
            return "shard"
        if batch.created > now + self.limits.max_skew_s:
            return "future"
        if batch.created < now - self.limits.max_age_s:
            return "age"
        digest = hashlib.sha256(data).digest()[:16]
        if digest in self._seen:  # the same batch, wrapped anew by somebody else
            return "seen"
        reason = self._newcomer(forwarder, now) if author not in self._authors else None
        if reason is None and not self._authors.take(author, now, *cost):
            reason = "rate"
        if reason is None:
            self._seen[digest] = None
            if len(self._seen) > SEEN:
                self._seen.popitem(last=False)
        return reason

    def _newcomer(self, forwarder: str, now: float) -> str | None:
        """Why an author never heard before is not let in, if so."""
        if not self._offered.take(forwarder, now, 1):
            return "flood"
        if not self._introduced.take(forwarder, now, 1) or not self._met.take("", now, 1):
            return "newcomers"
        return None
