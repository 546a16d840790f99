"""Whether another node runs with this node's key: a copied file, or the same disk in two machines. Pure: Unix time
comes in.

A peer's cards name its gossip process, whose key is fresh at each start. So a card under this node's own peer id that
names another process is of an earlier start, or of a twin. Only a twin goes on making cards.
"""

from __future__ import annotations

from swarm_protocol.limits import CARD_RENEWAL_S, MAX_CLOCK_SKEW_S
from swarm_protocol.messages import PeerCard

MAX_SEEN = 64  # other starts with this key that are told apart


class Twins:
    """The nodes that run with the key of this one."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._mine: set[str] = set()  # gossip ids of this node, one a start of its gossip process
        self._seen_own = False  # whether a card of this node has been seen
        self._first: dict[str, tuple[bool, float]] = {}
        """Another's gossip id -> (whether it was seen before a card of this node, when that card was made)."""
        self.found: PeerCard | None = None  # the latest card of a twin
        self.was_first = False  # whether the twin was there before this node

    def is_mine(self, gossip_id: str) -> None:
        """Remember a gossip id of this node; empty = its gossip process is not up."""
        if gossip_id:
            self._mine.add(gossip_id)

    def see(self, card: PeerCard) -> None:
        """Look at a card that was found under this node's own peer id."""
        self._seen_own |= card.gossip_id in self._mine
        if not card.gossip_id or card.gossip_id in self._mine:
            return
        if len(self._first) >= MAX_SEEN and card.gossip_id not in self._first:
            return
        before, made = self._first.setdefault(card.gossip_id, (not self._seen_own, card.created))
        if card.created >= max(made + CARD_RENEWAL_S / 4, self._began + MAX_CLOCK_SKEW_S):
            self.found, self.was_first = card, before
