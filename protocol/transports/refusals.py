"""What this node refused: totals by reason, and of the latest peers what each was refused for.

The peer is the one at the other end of the connection: it sent, or answered with, what was refused. It need not have
made it.
"""

from __future__ import annotations

from collections import Counter

MAX_PEERS = 256
"""Peers remembered: more than p2pd keeps connections to for long, and some 100 KB."""


class Refusals:
    """Counts refusals. `totals` (reason -> count) is shared with its owner; the rest is bounded by `MAX_PEERS`, beyond
    which the peer refused longest ago is forgotten. Reasons are this node's own words, so there are few."""

    def __init__(self, totals: Counter[str]) -> None:
        self.totals = totals
        self._by_peer: dict[str, Counter[str]] = {}
        """Peer refused last comes last."""

    def note(self, peer: str, reason: str, count: int = 1) -> None:
        """`peer` was refused `count` times for `reason`."""
        self.totals[reason] += count
        reasons = self._by_peer.pop(peer, None)
        self._by_peer[peer] = reasons = Counter() if reasons is None else reasons
        reasons[reason] += count
        if len(self._by_peer) > MAX_PEERS:
            del self._by_peer[next(iter(self._by_peer))]

    def by_peer(self) -> dict[str, dict[str, int]]:
        """Peer id -> reason -> count; a copy, which another thread may ask for."""
        return {peer: dict(reasons) for peer, reasons in dict(self._by_peer).items()}
