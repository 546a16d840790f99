"""A peer's channels in its crew: which other peers may have one, and for how long.

strangers    peers that have opened a channel, and are not known to be of the crew: few of them, and not for long
neighbours   holders of neighbouring stages: the one with the higher stage opens the channel, again after each end
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from swarm_node.pipeline.membership.actions import ActionQueue, Close, Connect, PeerLink
from swarm_protocol.crew import STAGE_METHOD

PART_S = 3.0  # a channel is closed so long after the last record was sent over it, which must arrive first
NEIGHBOUR_REDIAL_S = 1.0  # time between two attempts to reach a neighbour
STRANGER_S = 10.0
"""A peer that has not proved to be of the crew, or is no neighbour yet, may keep a channel for so long: plans may be
late."""
MAX_STRANGERS = 32  # most channels of such peers


class PeerChannels:
    """Channels of this peer, by the reason that they are open for."""

    def __init__(self, out: ActionQueue, gone: Callable[[PeerLink], None]) -> None:
        """`gone` is called with each channel that is no more."""
        self.neighbours: dict[str, PeerLink] = {}  # channel to each peer that holds a neighbouring stage, or says so
        self._out = out
        self._gone = gone
        self._links: set[PeerLink] = set()
        self._strangers: dict[PeerLink, float] = {}  # channels of strangers -> when they are closed
        self._parting: dict[PeerLink, float] = {}  # channels that are not needed any more -> when they are closed
        self._redial: dict[str, float] = {}  # when each neighbour may be dialled again

    def __contains__(self, link: PeerLink) -> bool:
        return link in self._links

    def open(self, link: PeerLink) -> None:
        self._links.add(link)
        self._out.do(Connect(link))

    def opened(self, link: PeerLink, now: float) -> None:
        """Another peer has opened a channel."""
        self._links.add(link)
        if link.method == STAGE_METHOD:
            old = self.neighbours.pop(link.peer, None)
            if old is not None:
                self.close(old)
            self.neighbours[link.peer] = link
        else:
            self.doubt(link, now + STRANGER_S)

    def close(self, link: PeerLink) -> None:
        if link in self._links:
            self.forget(link)
            self._out.do(Close(link))

    def forget(self, link: PeerLink) -> None:
        """A channel has ended."""
        self._links.discard(link)
        self._strangers.pop(link, None)
        self._parting.pop(link, None)
        self._gone(link)

    def doubt(self, link: PeerLink, until: float) -> None:
        """Close a channel at `until`, unless its peer proves itself before."""
        self._strangers[link] = min(until, self._strangers.get(link, until))

    def trust(self, link: PeerLink) -> None:
        """The peer of a channel is of this crew."""
        self._strangers.pop(link, None)

    def part(self, link: PeerLink, until: float) -> None:
        """Close a channel at `until`."""
        self._parting[link] = until

    def stay(self, link: PeerLink) -> None:
        """Keep a channel that was to be closed."""
        self._parting.pop(link, None)

    def leave(self, link: PeerLink) -> bool:
        """A channel between stages has ended. Whether it was the one in use."""
        in_use = self.neighbours.get(link.peer) is link
        if in_use:
            del self.neighbours[link.peer]
        return in_use

    def tidy(self, neighbours: Mapping[str, bool], now: float) -> None:
        """Close channels whose time is over. `neighbours`: as in `reach`."""
        for link in [link for link, until in self._parting.items() if until <= now]:
            self.close(link)
        for peer, link in list(self.neighbours.items()):
            if peer in neighbours:
                self.trust(link)
            elif link not in self._strangers:
                self.doubt(link, now if link.dialled else now + STRANGER_S)
        due = [link for link, until in self._strangers.items() if until <= now]
        for link in [*due, *list(self._strangers)[:-MAX_STRANGERS]]:
            self.leave(link)
            self.close(link)

    def reach(self, neighbours: Mapping[str, bool], now: float) -> None:
        """Open channels to neighbours. `neighbours`: peer id -> whether this peer opens the channel."""
        for peer, opens in neighbours.items():
            if opens and self._redial.get(peer, now) <= now and peer not in self.neighbours:
                self._redial[peer] = now + NEIGHBOUR_REDIAL_S
                link = self.neighbours[peer] = PeerLink(peer, STAGE_METHOD, dialled=True)
                self.open(link)
