"""How a peer without a leader finds one, or finds that it is its own turn to lead; how leaders of one crew meet.

    the lost leader once more -> the peers in line after it -> peers that seem to lead by their cards
    -> holders of stages -> all others of the crew -> for FIND_LEADER_S nobody knows a leader: this peer itself

Cards are renewed rarely, and a peer that is asked says who leads. Peers with a lower id, which may become the first
leader, are waited for. Anybody can make up cards of the crew, so several peers are asked at a time. A peer that has
never proved to know the crew's name is asked once in each search, then at longer and longer intervals, and is waited
for at most UNPROVEN_WAIT_S.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from swarm_node.pipeline.membership.actions import ActionQueue, PeerLink, PeerSpec
from swarm_node.pipeline.membership.channels import STRANGER_S, PeerChannels
from swarm_node.pipeline.membership.leader import Leader
from swarm_node.pipeline.membership.roster import note_latest
from swarm_protocol.crew import CREW_METHOD, Answer, Hello
from swarm_protocol.messages import CrewCard

FIND_LEADER_S = 3.0
"""A peer that finds no leader for so long, after it first saw members of its swarm, becomes the first one."""
NO_MEMBERS_S = 6.0  # a peer that sees no members of its swarm for so long concludes that there are none
FIRST_ANSWER_S = 3.0  # a peer that is asked must answer within this time
NEXT_ANSWER_S = 8.0
"""A peer that answers, but knows no leader yet, is waited for so long: it may have to notice first that one is lost."""
RETRY_PEER_S = 5.0  # a peer that could not be reached is not asked again before this time has passed
MAX_RETRY_PEER_S = 160.0  # longest such time: it doubles for a peer that has never proved to know the crew's name
UNPROVEN_WAIT_S = 20.0  # a peer that may lead waits so long for peers without proof, and then leads
MAX_TALKS = 8  # most peers that are asked, or that a leader calls, at a time
MAX_KNOWN = 1024  # most peers of which it is remembered whether they could be reached
VOUCHED_S = 30.0  # this peer does not take the lost leader's place for so long after another peer said that it lives


class LeaderSearch:
    """The search for the leader."""

    def __init__(self, spec: PeerSpec, channels: PeerChannels, queue: ActionQueue, now: float) -> None:
        self.lost = ""  # the leader that is lost, until there is another
        self.talks: dict[PeerLink, float] = {}
        """Channels to peers that were asked -> until when the next answer is waited for."""
        self._in_line = False  # the peers in line after the lost leader are being asked, one by one
        self._spec = spec
        self._channels = channels
        self._actions = queue
        self._begun = now
        self._looked: float | None = None  # when members of the swarm were first seen
        self._queue: list[str] = []  # peers to ask next; this peer itself stands for its own turn to lead
        self._vouched_until = now
        self._since = now  # when this search began
        self._avoid: dict[str, float] = {}
        self.known: dict[str, None] = {}  # peers that have proved to know the crew's name, latest last
        self._failed: dict[str, int] = {}  # peers without proof -> how often they were asked in vain
        self._asked: set[str] = set()  # peers that knew no leader, since this peer last knew one
        self.hoping: dict[PeerLink, None] = {}  # channels to such peers, which may still tell of one

    def look(self, anybody: bool, now: float) -> None:
        """`anybody`: there are members of the swarm."""
        if self._looked is None and (anybody or now >= self._begun + NO_MEMBERS_S):
            self._looked = now

    def next(
        self, cards: Mapping[str, CrewCard], may_begin: bool, can_lead: Callable[[], bool], now: float
    ) -> str | None:
        """The peer to ask now; this peer itself if it is to lead; `None` = nobody, or not yet.

        `cards`: of other peers of the crew. `may_begin`: this peer may lead if nobody else does."""
        for link in [link for link, until in self.talks.items() if until <= now]:
            self._asked.add(link.peer)
            self.unreached(link, now)
            self._channels.close(link)
        me = self._spec.me
        vouched = now < self._vouched_until
        if self._in_line and self.talks:
            return None
        while self._queue and not self.talks:
            peer = self._queue.pop(0)
            if peer != me:
                self._in_line = True
                return peer
            if not vouched and can_lead():
                return me
        self._in_line = False
        if self._looked is None or len(self.talks) >= MAX_TALKS:
            return None
        talking = {link.peer for link in self.talks}
        free = {peer: card for peer, card in cards.items() if not self.avoids(peer, now) and peer not in talking}
        others = [peer for peer in free if peer not in self._asked]
        leads = [peer for peer in free if 0 in free[peer].held and (peer in self.known or peer in others)]
        for peers in (leads, [peer for peer in others if free[peer].held], others):
            if peers:
                return min(peers, key=lambda peer: (peer not in self.known, -free[peer].term, peer))
        found_none = self._spec.wanted == 0 or now >= self._looked + FIND_LEADER_S + self._spec.absent_s
        if may_begin and found_none and not vouched and not self._waits(now) and can_lead():
            return me
        again = [peer for peer in free if 0 in free[peer].held]
        if self._spec.wanted:
            crew = self._spec.crew
            self._actions.say_once(f"waiting for a peer that takes stage 0 of crew {crew}, or for one that takes any")
        return min(again, default=None)

    def _waits(self, now: float) -> bool:
        """Whether an answer that may matter is still to come."""
        return any(link.peer in self.known or now < self._since + UNPROVEN_WAIT_S for link in self.talks)

    def dial(self, peer: str, now: float) -> PeerLink:
        """Open a channel to a peer that is to be asked."""
        link = PeerLink(peer, CREW_METHOD, dialled=True)
        self.talks[link] = now + FIRST_ANSWER_S
        self._channels.open(link)
        return link

    def wait_for(self, link: PeerLink, now: float) -> None:
        """Wait for an answer of the leader that this one has given way to."""
        self._stop(link)
        self.talks[link], self._in_line = now + NEXT_ANSWER_S, True

    def told(self, link: PeerLink, answer: Answer, now: float) -> bool:
        """A peer that was asked has answered. Whether it is the leader."""
        lead = answer.lead
        if link not in self.talks and link not in self.hoping:
            return False
        if lead == link.peer:
            self._channels.stay(link)
            self.end(link)
            return True
        if lead in ("", self._spec.me) or self.avoids(lead, now):
            self._vouched_until = now + VOUCHED_S if lead and lead == self.lost else now
            before = self._spec.wanted != 0 and link.peer < self._spec.me
            if answer.may_lead and (before or self.lost) and link in self.talks:
                self.talks[link] = now + NEXT_ANSWER_S
            elif link in self.talks:
                del self.talks[link]
                self._asked.add(link.peer)
                self.hoping[link] = None
                self._channels.part(link, now + NEXT_ANSWER_S)
        elif all(talk.peer != lead for talk in self.talks):
            self._avoid[link.peer] = now + RETRY_PEER_S
            self._ask_first(lead)
        return False

    def hear_of(self, lead: str, now: float) -> None:
        """A leader has called this peer."""
        if all(link.peer != lead for link in self.talks) and not self.avoids(lead, now):
            self._ask_first(lead)

    def avoids(self, peer: str, now: float) -> bool:
        """Whether the peer is not to be asked yet."""
        return self._avoid.get(peer, now) > now

    def shun(self, peer: str, now: float) -> None:
        """Ask a peer rarely."""
        self._avoid[peer] = now + VOUCHED_S

    def prove(self, peer: str) -> None:
        """A peer has proved that it knows the crew's name."""
        if self._failed.pop(peer, None):
            self._avoid.pop(peer, None)
        note_latest(self.known, peer, None, MAX_KNOWN)

    def doubt(self, peer: str, now: float) -> None:
        """A peer was asked in vain, or perhaps so: do not ask it again soon, unless it proves itself."""
        tries = 0 if peer in self.known else self._failed.pop(peer, 0)
        self._avoid[peer] = now + min(RETRY_PEER_S * 2**tries, MAX_RETRY_PEER_S)
        if peer not in self.known:
            note_latest(self._failed, peer, tries + 1, MAX_KNOWN)
        if len(self._avoid) > MAX_KNOWN:
            self._avoid = {one: until for one, until in self._avoid.items() if until > now}

    def vouch(self, now: float) -> None:
        """There is a leader, though it refuses this peer."""
        self._vouched_until = now + VOUCHED_S

    def unreached(self, link: PeerLink, now: float) -> None:
        """A channel to a peer that was asked has ended, or could not be opened."""
        del self.talks[link]
        self.doubt(link.peer, now)

    def begin(self, lost: str, queue: Iterable[str], now: float) -> None:
        """There is no leader any more: ask the peers in `queue` first. `lost`: the leader, if it is lost."""
        self.lost, self._queue, self._since = lost, list(queue), now

    def end(self, found: PeerLink | None = None) -> None:
        """The leader is found, over this channel, or this peer leads."""
        self._stop(found)
        self._queue, self.lost = [], ""
        self._asked.clear()

    def _ask_first(self, peer: str) -> None:
        self._stop()
        self._queue.insert(0, peer)

    def _stop(self, but: PeerLink | None = None) -> None:
        for link in [*self.hoping, *self.talks]:
            if link is not but:
                self._channels.close(link)
        self.talks.clear()
        self.hoping.clear()


@dataclass(eq=False)
class Rivals:
    """How a leader meets other leaders of its crew, and which of two gives way.

        leader -- Hello --> every peer whose card is of the crew, but which is not in touch
               <- Hello of another leader, or Answer: the peer with the lower id decides, so that never both give way

    So two leaders that began at once, or a newcomer that has not seen the leader, need not wait for new cards."""

    spec: PeerSpec
    leader: Leader
    channels: PeerChannels
    search: LeaderSearch
    queue: ActionQueue
    hello: Callable[[str], Hello]  # makes this peer's Hello to another
    links: dict[PeerLink, bool] = field(default_factory=dict)
    """Channels to other leaders, as far as is known -> whether this peer has said Hello over it."""
    call_again_at: dict[str, float] = field(default_factory=dict)  # when each peer may be called again

    def call(self, peer: str, card: CrewCard | None, now: float) -> None:
        """Say Hello to a peer that may lead as well, or may not know who leads."""
        called = self.call_again_at.get(peer, now) > now or any(link.peer == peer for link in self.links)
        known = peer in self.leader.roster.members or self.search.avoids(peer, now)
        if called or known or len(self.links) >= MAX_TALKS:
            return
        self.call_again_at[peer] = now + (VOUCHED_S if card is not None and 0 not in card.held else RETRY_PEER_S)
        if peer not in self.search.known:
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
