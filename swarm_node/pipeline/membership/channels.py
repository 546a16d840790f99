"""A peer's channels in its crew: who may have one, and for how long.

    opened by others   of a crew: strangers, until they say who they are     of stages: strangers, but for neighbours
    strangers          few, and not for long
    neighbours         whoever holds the higher stage opens the channel, again whenever it has ended

Pure: `now` (seconds, of any clock) comes in, actions go to the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from protocol.crew import STAGE_METHOD
from swarm_node.pipeline.membership.actions import ActionQueue, Close, Connect, Link

PART_S = 3.0
"""Time for a last word before a channel is closed."""
REDIAL_S = 1.0
"""Between two tries to reach a neighbour."""
STRANGER_S = 10.0
"""A peer that has not said who it is, or is no neighbour, may keep a channel open for so long: plans may be late."""
MAX_STRANGERS = 32
"""Channels of such peers."""


class Channels:
    """Channels of this peer."""

    def __init__(self, out: ActionQueue, gone: Callable[[Link], None]) -> None:
        """`gone` is told of each that is no more."""
        self.neighbours: dict[str, Link] = {}
        """Channel with each peer that holds a neighbouring stage, or says so."""
        self._out = out
        self._gone = gone
        self._links: set[Link] = set()
        self._strangers: dict[Link, float] = {}
        """Channels of peers that have yet to say who they are, or to become neighbours: closed then."""
        self._parting: dict[Link, float] = {}
        """Channels that are closed then."""
        self._redial: dict[str, float] = {}
        """When each neighbour may be dialled again."""

    def __contains__(self, link: Link) -> bool:
        return link in self._links

    def open(self, link: Link) -> None:
        self._links.add(link)
        self._out.do(Connect(link))

    def opened(self, link: Link, now: float) -> None:
        """By another peer."""
        self._links.add(link)
        if link.method == STAGE_METHOD:
            old = self.neighbours.pop(link.peer, None)
            if old is not None:
                self.close(old)
            self.neighbours[link.peer] = link
        else:
            self.doubt(link, now + STRANGER_S)

    def close(self, link: Link) -> None:
        if link in self._links:
            self.forget(link)
            self._out.do(Close(link))

    def forget(self, link: Link) -> None:
        """It has ended."""
        self._links.discard(link)
        self._strangers.pop(link, None)
        self._parting.pop(link, None)
        self._gone(link)

    def doubt(self, link: Link, until: float) -> None:
        """Close it then at the latest, unless the peer says who it is."""
        self._strangers[link] = min(until, self._strangers.get(link, until))

    def trust(self, link: Link) -> None:
        """Its peer has said who it is."""
        self._strangers.pop(link, None)

    def part(self, link: Link, until: float) -> None:
        """Close it then."""
        self._parting[link] = until

    def stay(self, link: Link) -> None:
        """Do not."""
        self._parting.pop(link, None)

    def leave(self, link: Link) -> bool:
        """A channel between stages is no more. Whether it was the one in use."""
        in_use = self.neighbours.get(link.peer) is link
        if in_use:
            del self.neighbours[link.peer]
        return in_use

    def tidy(self, neighbours: Mapping[str, bool], now: float) -> None:
        """Close what has been open for long enough. `neighbours`: as in `reach`."""
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
        """Open channels to neighbours: peer -> whether it is for this one to do so."""
        for peer, opens in neighbours.items():
            if opens and self._redial.get(peer, now) <= now and peer not in self.neighbours:
                self._redial[peer] = now + REDIAL_S
                link = self.neighbours[peer] = Link(peer, STAGE_METHOD, dialled=True)
                self.open(link)
