"""How much of a peer's right answers carried no payload, lately: what its groups weigh when groups are drawn.

    of a group with a share s of payloads among its right answers:   n <- d n + 1,   p <- d p + s;   d = 0.95
    trust = 1 - p / (n + 1)

A peer begins at 1, falls to 1/2 with one group full of payloads and to 1/20 with many. It is never shut out: a peer
whose model merely writes otherwise is still drawn now and then, and one good group raises it again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

DECAY = 0.95
"""What is remembered is about the last twenty groups of a peer."""
MAX_PEERS = 1024
"""Peers remembered: those judged last."""
DISTRUSTED = 0.5
"""Trust below which a peer is named."""


@dataclass
class _Account:
    groups: float = 0.0
    payloads: float = 0.0
    refused: int = 0
    """Groups with a payload, a running total."""


class Trust:
    """Trust by peer."""

    def __init__(self) -> None:
        self._accounts: OrderedDict[str, _Account] = OrderedDict()

    def judged(self, peer: str, share: float) -> None:
        """A group of `peer` was judged: `share` of its right answers carry a payload."""
        account = self._accounts.setdefault(peer, _Account())
        self._accounts.move_to_end(peer)
        account.groups = DECAY * account.groups + 1
        account.payloads = DECAY * account.payloads + share
        account.refused += share > 0
        if len(self._accounts) > MAX_PEERS:
            self._accounts.popitem(last=False)

    def of(self, peer: str) -> float:
        """In (0, 1]."""
        account = self._accounts.get(peer, _Account())
        return 1 - account.payloads / (account.groups + 1)

    def refused(self) -> dict[str, int]:
        """Groups with a payload, by peer; running totals."""
        return {peer: account.refused for peer, account in list(self._accounts.items()) if account.refused}
