"""Which connection brought which card first. Pure: `now` (Unix seconds) comes in.

Keys cost nothing, connections do: over one connection a peer may introduce so many others at a time, besides itself.
"""

from __future__ import annotations

from collections import Counter, OrderedDict


class Introductions:
    """Who brought whom, as long as the cards live."""

    def __init__(self, each: int, most: int) -> None:
        """Over one connection `each` peers may be introduced at a time, over all `most`."""
        self._each, self._most = each, most
        self._by: OrderedDict[str, tuple[str, float]] = OrderedDict()
        """Peer -> (who brought it first, when its card runs out), the one renewed longest ago first."""
        self._count: Counter[str] = Counter()

    def admits(self, peer: str, bringer: str, expires: float, now: float) -> bool:
        """Whether the card of `peer`, which runs out at `expires`, may be taken in over a connection with `bringer`."""
        if peer == bringer:  # it has proved the key of the card
            self._forget(peer)
            return True
        held = self._by.get(peer)
        if held is not None and held[1] > now:
            self._by[peer] = held[0], max(held[1], expires)
            self._by.move_to_end(peer)
            return True
        self._forget(peer)
        self._forget_old(now)
        if self._count.get(bringer, 0) >= self._each or len(self._by) >= self._most:
            return False
        self._by[peer] = bringer, expires
        self._count[bringer] += 1
        return True

    def clear(self) -> None:
        """Forget everything: the clock was set back."""
        self._by.clear()
        self._count.clear()

    def __len__(self) -> int:
        return len(self._by)

    def _forget_old(self, now: float) -> None:
        """The order is that of renewals, which is nearly that of ends: a card hides later ones for its own life."""
        while self._by:
            peer, (_, expires) = next(iter(self._by.items()))
            if expires > now:
                return
            self._forget(peer)

    def _forget(self, peer: str) -> None:
        held = self._by.pop(peer, None)
        if held is not None:
            self._count[held[0]] -= 1
            if not self._count[held[0]]:
                del self._count[held[0]]
