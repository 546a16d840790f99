"""How a leader meets other leaders of its crew, and which of two gives way.

    leader -- Hello --> every peer whose card is of the crew, but which is not in touch
           <- Hello of another leader, or Answer: the peer with the lower id decides, so that never both give way

So two leaders that began at once, or a newcomer that has not seen the leader, need not wait for new cards.
Pure: `now` (seconds, of any clock) comes in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from protocol.crew import CREW_METHOD, Answer, Hello
from protocol.messages import CrewCard
from swarm_node.pipeline.membership.actions import ActionQueue, PeerLink, PeerSpec
from swarm_node.pipeline.membership.channels import STRANGER_S, PeerChannels
from swarm_node.pipeline.membership.leader import Leader
from swarm_node.pipeline.membership.leader_search import RETRY_PEER_S, VOUCHED_S, LeaderSearch

MAX_CALLS = 8  # peers that a leader calls at a time


@dataclass(eq=False)
class Rivals:
    """Channels from this leader to peers that may lead as well."""

    spec: PeerSpec
    leader: Leader
    channels: PeerChannels
    search: LeaderSearch
    queue: ActionQueue
    hello: Callable[[str], Hello]  # makes this peer's Hello to another
    links: dict[PeerLink, bool] = field(default_factory=dict)
    """Channels to other leaders, as far as is known -> whether this peer has said Hello over it."""
    call_again_at: dict[str, float] = field(default_factory=dict)  # when each peer may be called again

    def call_all(self, cards: Mapping[str, CrewCard], now: float) -> None:
        """Call peers of the crew that are not in touch, those first that seem to lead."""
        for peer in sorted(cards, key=lambda peer: 0 not in cards[peer].held):
            self.call(peer, cards.get(peer), now)

    def call(self, peer: str, card: CrewCard | None, now: float) -> None:
        """Say Hello to a peer that may lead as well, or may not know who leads."""
        called = self.call_again_at.get(peer, now) > now or any(link.peer == peer for link in self.links)
        known = peer in self.leader.roster.members or self.search.avoids(peer, now)
        if called or known or len(self.links) >= MAX_CALLS:
            return
        self.call_again_at[peer] = now + (VOUCHED_S if card is not None and 0 not in card.held else RETRY_PEER_S)
        if not self.search.knows(peer):
            self.search.doubt(peer, now)
        link = PeerLink(peer, CREW_METHOD, dialled=True)
        self.links[link] = True
        self.channels.open(link)
        self.channels.doubt(link, now + STRANGER_S)
        self.queue.send(link, self.hello(peer))

    def meet(self, link: PeerLink, hello: Hello, answer: Callable[[PeerLink, str], None]) -> bool:
        """Another leader says Hello. Whether this one gives way, if that is for it to decide.

        A later term stands higher, then more updates, then the earlier start, then the lower peer id: that of the one
        that decides. `answer` tells a peer who leads."""
        said, self.links[link] = self.links.get(link, False), True
        if self.spec.me > link.peer:
            if not said:
                self.queue.send(link, self.hello(link.peer))
            return False
        live = bool(hello.holding.live)  # a peer without a stage in memory has led nobody
        ours = self.leader.won, self.leader.updates, -self.spec.started
        if (hello.term * live, hello.updates * live, -hello.started) > ours:
            return True
        answer(link, self.spec.me)
        return False

    def answered(self, link: PeerLink, answer: Answer, cards: Mapping[str, CrewCard], now: float) -> bool:
        """A peer that was called says who leads. Whether this leader gives way to it."""
        if link not in self.links:
            return False
        if answer.lead == link.peer:
            return True
        self.channels.close(link)
        if answer.lead not in ("", self.spec.me):
            self.call(answer.lead, cards.get(answer.lead), now)
        return False

    def forget(self, link: PeerLink) -> None:
        """The channel has ended, or its peer does not lead."""
        self.links.pop(link, None)

    def close(self) -> None:
        """Close all these channels: this peer leads no more."""
        for link in list(self.links):
            self.channels.close(link)
