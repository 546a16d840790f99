"""Records which connection brought which card first. Pure: `now` (Unix seconds) comes in.

Keys cost nothing, but connections do. Over one connection a peer may introduce a limited number of others at a time,
besides itself. When all places are taken, the connection that holds most of them gives one up to a connection that
holds fewer. So a few connections that bring made-up peers do not keep out peers that others bring.
"""

from __future__ import annotations

from collections import OrderedDict


class Introductions:
    """Which connection introduced which peer, as long as the cards live."""

    def __init__(self, each: int, most: int) -> None:
        """At most `each` peers may be introduced at a time over one connection, and `most` over all."""
        self._each, self._most = each, most
        self._by: OrderedDict[str, tuple[str, float]] = OrderedDict()
        """Peer -> (connection that brought it first, when its card expires). The peer renewed longest ago comes
        first."""
        self._brought: dict[str, dict[str, None]] = {}  # connection -> the peers that it brought first, in that order

    def may_admit(self, peer: str, bringer: str, now: float) -> bool:
        """Whether `admits` would accept the card of `peer`. Only its name has to be known."""
        held = self._by.get(peer)
        if peer == bringer or (held is not None and held[1] > now):
            return True
        self._forget_old(now)
        ours = len(self._brought.get(bringer, ()))
        return ours < self._each and (len(self._by) < self._most or len(self._brought[self._busiest()]) > ours + 1)

    def admits(self, peer: str, bringer: str, expires: float, now: float) -> bool:
        """Whether the card of `peer`, which expires at `expires`, is accepted over a connection with `bringer`."""
        if peer == bringer:  # it has proved the key of the card
            self._forget(peer)
            return True
        held = self._by.get(peer)
        if held is not None and held[1] > now:
            self._by[peer] = held[0], max(held[1], expires)
            self._by.move_to_end(peer)
            return True
        self._forget(peer)
        if not self.may_admit(peer, bringer, now):
            return False
        if len(self._by) >= self._most:
            self._forget(next(iter(self._brought[self._busiest()])))
        self._by[peer] = bringer, expires
        self._brought.setdefault(bringer, {})[peer] = None
        return True

    def clear(self) -> None:
        """Forget everything: the clock was set back."""
        self._by.clear()
        self._brought.clear()

    def __len__(self) -> int:
        return len(self._by)

    def _forget_old(self, now: float) -> None:
        """The order is that of renewals, which is nearly that of ends: a card hides later ones for its own life."""
        while self._by:
            peer, (_, expires) = next(iter(self._by.items()))
            if expires > now:
                return
            self._forget(peer)

    def _busiest(self) -> str:
        return max(self._brought, key=lambda bringer: len(self._brought[bringer]))

    def _forget(self, peer: str) -> None:
        held = self._by.pop(peer, None)
        if held is not None:
            brought = self._brought[held[0]]
            del brought[peer]
            if not brought:
                del self._brought[held[0]]
