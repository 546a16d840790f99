"""Which gossip messages are let in and passed on. All apply the same rules, so that bad ones die at their source.

size -> signature -> version -> schema -> swarm -> shard -> clock -> seen before -> rate of its author
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from protocol import codec, topics
from protocol.errors import RemoteProtocolError
from protocol.transports.gossip_pipe import GossipSettings

AUTHORS = 4096
"""Authors whose rate is remembered; those heard of longest ago are forgotten first."""
SEEN = 65_536
"""Digests remembered (16 bytes each)."""
MINUTE = 60.0

HARMLESS = frozenset({"version", "age", "future", "seen", "rate"})
"""Reasons that do not count against the forwarder: it may be older than us, its clock or counters may differ."""


class Gate:
    """Decides message by message; memory is bounded by `AUTHORS` and `SEEN`."""

    def __init__(self, limits: GossipSettings) -> None:
        self.limits = limits
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._rates: OrderedDict[str, tuple[float, float, float]] = OrderedDict()
        """Author -> (messages left, bytes left, when that was so)."""

    def refusal(self, topic: str, data: bytes, origin: str, now: float) -> str | None:
        """Why `data` from gossip process `origin` is refused at Unix time `now`; None = it is let in. Never raises."""
        try:
            author, batch = codec.open_batch(data, self.limits.swarm)
        except RemoteProtocolError as error:
            return error.reason
        if topics.rollout_topic(self.limits.swarm, topics.shard_of(author, self.limits.shards)) != topic:
            return "shard"
        if batch.created > now + self.limits.max_skew_s:
            return "future"
        if batch.created < now - self.limits.max_age_s:
            return "age"
        if self._seen_before(data):  # the same batch, wrapped anew by somebody else
            return "seen"
        for name in (author, origin):
            if not self._take(name, len(data), now):
                return "rate"
        return None

    def _seen_before(self, data: bytes) -> bool:
        digest = hashlib.sha256(data).digest()[:16]
        if digest in self._seen:
            return True
        self._seen[digest] = None
        if len(self._seen) > SEEN:
            self._seen.popitem(last=False)
        return False

    def _take(self, name: str, size: int, now: float) -> bool:
        """Token buckets that fill in a minute, one of messages and one of bytes."""
        most, most_bytes = float(self.limits.messages_per_minute), float(self.limits.bytes_per_minute)
        messages, left, then = self._rates.pop(name, (most, most_bytes, now))
        part = max(0.0, now - then) / MINUTE
        messages, left = min(most, messages + part * most), min(most_bytes, left + part * most_bytes)
        fits = messages >= 1 and left >= size
        if fits:
            messages, left = messages - 1, left - size
        self._rates[name] = (messages, left, now)
        if len(self._rates) > AUTHORS:
            self._rates.popitem(last=False)
        return fits
