"""Decides which gossip messages are accepted and forwarded. All nodes apply the same rules, so bad messages stop early.

budget of the connection -> kind of its topic -> size -> signature -> version -> schema -> swarm -> shard -> clock
-> seen before -> rate of its author -> authors never heard before

Authors and origins are names that a sender may make up; a connection is not. So everything that a connection brings is
counted, accepted or not, and a connection that exceeds its budgets is blamed (`flood`). An honest hub forwards only
what it accepts, and each budget is more than a hub can accept through all its connections: it is not blamed for floods
of others.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from swarm_protocol.budgets import Budgets
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.gossip_kinds import KINDS, Budget, Kind
from swarm_protocol.transports.gossip.pipe import GossipSettings

BUDGETED_AUTHORS = 4096  # authors of one kind of message whose rate is remembered: those heard of last
BUDGETED_CONNECTIONS = 1024  # connections whose budgets are remembered: twice as many as there can be at a time
SEEN = 65_536  # digests of messages let in that are remembered (16 bytes each)

SHARD_AUTHORS = 64  # twice as many as a shard should have
CONNECTION_MESSAGES = 4 * SHARD_AUTHORS * 60
"""Messages a minute over one connection: four times the need of a shard whose authors speak every second, and more than
a Python process forwards (7 ms of CPU a message, measured at 5 KB)."""
CONNECTION_BYTES = 60_000 * CONNECTION_MESSAGES
"""Bytes a minute over one connection, 15 MB a second: as many messages of 60 KB."""
MAX_NEWCOMERS = BUDGETED_AUTHORS // 4
"""A minute over one connection, however many shards there are: else `BUDGETED_AUTHORS` would be forgotten at once."""
GATE_NEWCOMERS, BLAMED_NEWCOMERS = 4, 8
"""Multiples of the newcomers of one connection: new authors accepted over all connections; new authors that one may
offer without blame. The first is smaller, so that a hub that several flooders use is not blamed for them."""

HARMLESS = frozenset({"version", "newer", "age", "future", "seen", "rate", "newcomers"})
"""Reasons that do not count against the forwarder: it may be older than us, its clock or counters may differ."""


class GossipGate:
    """Decides message by message; memory is bounded by `BUDGETED_AUTHORS`, `BUDGETED_CONNECTIONS` and `SEEN`."""

    def __init__(self, limits: GossipSettings, kinds: Sequence[Kind] = KINDS) -> None:
        self.limits = limits
        usual = Budget(limits.messages_per_minute, limits.bytes_per_minute, limits.max_age_s)
        self._kinds = {topic: kind for kind in kinds for topic in kind.topics(limits.swarm, limits.shards)}
        self._budgets = {kind.name: kind.budget or usual for kind in kinds}
        messages = sum(budget.messages_per_minute for budget in self._budgets.values())
        size = sum(budget.bytes_per_minute for budget in self._budgets.values())
        newcomers = min(SHARD_AUTHORS * limits.shards, MAX_NEWCOMERS)
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._authors = {
            name: Budgets(BUDGETED_AUTHORS, budget.messages_per_minute, budget.bytes_per_minute)
            for name, budget in self._budgets.items()
        }
        self._brought = Budgets(
            BUDGETED_CONNECTIONS, max(CONNECTION_MESSAGES, 2 * messages), max(CONNECTION_BYTES, 2 * size)
        )
        """All that comes over a connection."""
        self._said = Budgets(BUDGETED_CONNECTIONS, messages, size)
        """Messages that the process at the connection's other end signed itself."""
        self._offered = Budgets(BUDGETED_CONNECTIONS, BLAMED_NEWCOMERS * newcomers)
        self._introduced = Budgets(BUDGETED_CONNECTIONS, newcomers)
        """New authors over a connection: all, and those let in."""
        self._met = Budgets(1, GATE_NEWCOMERS * newcomers)  # new authors let in over any

    def refusal(self, topic: str, data: bytes, origin: str, forwarder: str, now: float) -> str | None:
        """Why `data`, signed by gossip process `origin` and brought by `forwarder`, is refused at Unix time `now`;
        None = it is let in. Never raises."""
        cost = 1, len(data)
        if not self._brought.take(forwarder, now, *cost):
            return "flood"
        if origin == forwarder and not self._said.take(forwarder, now, *cost):
            return "flood"
        if (kind := self._kinds.get(topic)) is None:
            return "shard"
        try:
            author, record = kind.verify(data, self.limits.swarm, self.limits.spoken)
        except RemoteProtocolError as error:
            return error.reason
        if kind.topic_of(author, self.limits.swarm, self.limits.shards) != topic:
            return "shard"
        if record.created > now + self.limits.max_skew_s:
            return "future"
        if record.created < now - self._budgets[kind.name].max_age_s:
            return "age"
        digest = hashlib.sha256(data).digest()[:16]
        if digest in self._seen:  # the same message, wrapped anew by somebody else
            return "seen"
        is_known = any(author in authors for authors in self._authors.values())
        reason = None if is_known else self._newcomer(forwarder, now)
        if reason is None and not self._authors[kind.name].take(author, now, *cost):
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
