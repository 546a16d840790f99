"""Decides when connected peers without a card are worth a lookup of all cards. Pure: `now` (seconds) comes in.

    a peer without a card -> a lookup at once, then after 2, 4, 8, ... s, at last every `LAST_WAIT_S`
    all of them together  -> `LOOKUPS` lookups a minute, fewer in large swarms

Honest peers lack a card only for a moment. A peer that never stores one causes few lookups, and so do peers that come
under ever new keys.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from swarm_protocol.budgets import Budgets

FIRST_WAIT_S = 2.0  # time until the second lookup for a peer: a card is stored within a round or two of connecting
LAST_WAIT_S = 120.0
"""Longest time between two lookups for one peer: the lookups made anyhow find its card within a card's life."""
LOOKUPS = 12
"""Lookups a minute because of peers without a card: one every five seconds, as often as small swarms look anyhow. As
many can come at once, when a swarm starts."""
MEMBERS = 200  # members known up to which a lookup counts once; one of more cards counts as many times
MAX_REMEMBERED = 1024
"""Peers without a card that are remembered, some 200 bytes each; those looked for longest ago are forgotten first."""


class Strangers:
    """Peers without a card that were looked for, and when each is worth another lookup."""

    def __init__(self) -> None:
        self._waits: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Peer -> (when it is worth a lookup again, the wait after that one), the one looked for last at the end."""
        self._budget = Budgets(1, LOOKUPS)

    def are_worth_a_lookup(self, strangers: Collection[str], members: int, now: float) -> bool:
        """Whether to look up all cards because these peers have none. If so, the lookup is remembered. `members` is the
        number of other peers known."""
        due = [peer for peer in strangers if self._waits.get(peer, (now, 0.0))[0] <= now]
        if not due or not self._budget.take("", now, min(LOOKUPS, max(1.0, members / MEMBERS))):
            return False
        for peer in due:
            wait = self._waits.pop(peer, (now, FIRST_WAIT_S))[1]
            self._waits[peer] = now + wait, min(2 * wait, LAST_WAIT_S)
        while len(self._waits) > MAX_REMEMBERED:
            self._waits.popitem(last=False)
        return True
