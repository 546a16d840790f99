"""The question who leads a crew, as a state machine: this peer seeks the leader, follows it, succeeds it, or leads.

             no leader for FIND_LEADER_S, or it wants stage 0
    seeking ---------------------------------------> leading
      |  ^ \\______ first in line, leader lost ______/^ |
      |  |  leader lost, or it leads no more         | | another leader of this crew stands higher,
      v  +-------------------------------------------|-+ or stage 0 cannot be held here
    following

`TRANSITIONS` is the whole table. A record that does not fit the role is the sender's fault, and counted; a change of
role that is not in the table is a mistake of this program, and raises LocalProtocolError.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from swarm_node.pipeline.membership.actions import ActionQueue, PeerLink, PeerSpec, StartLeading, StopLeading
from swarm_node.pipeline.membership.channels import PART_S, PeerChannels
from swarm_node.pipeline.membership.directory import NAMELESS, Directory
from swarm_node.pipeline.membership.following import Following
from swarm_node.pipeline.membership.leader import Leader
from swarm_node.pipeline.membership.leader_search import LeaderSearch, Rivals
from swarm_node.pipeline.membership.roster import BANNED_S, MAX_TERM, NOTHING, short
from swarm_node.say import Warned
from swarm_protocol.codec import version_for
from swarm_protocol.crew import (
    Answer,
    Broken,
    Hello,
    Load,
    Plan,
    Probe,
    Progress,
    Ready,
    Refusal,
    Report,
    Unable,
    Whole,
)
from swarm_protocol.errors import LocalProtocolError

MAX_GUESTS = 32  # peers of the crew that wait here while it has no leader


class CrewRole(StrEnum):
    """The part that this peer has in its crew."""

    SEEKING = "seeking"
    FOLLOWING = "following"
    LEADING = "leading"


TRANSITIONS: dict[CrewRole, frozenset[CrewRole]] = {
    CrewRole.SEEKING: frozenset({CrewRole.FOLLOWING, CrewRole.LEADING}),
    CrewRole.FOLLOWING: frozenset({CrewRole.SEEKING}),  # the leader is lost, leads no more, or refuses this peer
    CrewRole.LEADING: frozenset({CrewRole.SEEKING}),
}
"""Role -> roles that may come next."""

GREETINGS: frozenset[type] = frozenset({Hello, Answer, Refusal})
ACCEPTED: dict[CrewRole, frozenset[type]] = {
    CrewRole.SEEKING: GREETINGS,
    CrewRole.FOLLOWING: GREETINGS | {Plan, Whole, Progress, Probe},
    CrewRole.LEADING: GREETINGS | {Report, Ready, Unable, Broken, Load},
}
"""CrewRole -> records that peers may send. Others are counted as `stray`."""


@dataclass(eq=False)
class Leadership:
    """This peer's role, and how it changes."""

    spec: PeerSpec
    channels: PeerChannels
    queue: ActionQueue
    following: Following
    directory: Directory
    search: LeaderSearch
    role: CrewRole = CrewRole.SEEKING
    leader: Leader | None = None  # while this peer leads
    rivals: Rivals | None = None  # while this peer leads
    term: int = 0  # of the last plan that this peer knows, or of its own lead
    guests: dict[PeerLink, Hello] = field(default_factory=dict)  # peers that wait for a leader
    barred: bool = False  # this peer could not hold stage 0, and does not try again before ...
    barred_until: float = 0.0

    def _move(self, role: CrewRole) -> None:
        if role not in TRANSITIONS[self.role]:
            raise LocalProtocolError(f"a role that is {self.role} cannot become {role}")
        self.role = role

    def hello(self, peer: str) -> Hello:
        """The Hello of this peer to another."""
        spec, following, leader = self.spec, self.following, self.leader
        return Hello(
            protocol=version_for(peer, self.directory.members),
            swarm=spec.swarm,
            crew=spec.id,
            proof=spec.proof_to(peer),
            architecture=spec.architecture,
            stages=len(spec.spans),
            name=spec.name,
            wanted=spec.wanted,
            leads=leader is not None,
            term=leader.won if leader else self.term,
            updates=leader.updates if leader else max(following.live.values(), default=0),
            started=spec.started,
            holding=following.holding,
            spans=() if following.holding == NOTHING else following.spans,
            capacity=spec.capacity,
            run=following.run,
            round=following.progress.round if following.progress else 0,
        )

    def seek(self, now: float) -> None:
        """Without a leader, ask the peers that may know one, or lead if it is this peer's turn."""
        self.barred = self.barred and now < self.barred_until  # others are told whether this peer may lead
        while self.role == CrewRole.SEEKING:
            peer = self.search.next(self.directory.cards, self._may_lead, self._can_lead, now)
            if peer is None:
                return
            if peer == self.spec.me:
                self._take_lead(now)
            else:
                self.queue.send(self.search.dial(peer, now), self.hello(peer))

    def call_rivals(self, now: float) -> None:
        """A leader calls the peers of its crew that are not in touch, those first that seem to lead."""
        cards = self.directory.cards
        if self.rivals is not None:
            for peer in sorted(cards, key=lambda peer: 0 not in cards[peer].held):
                self.rivals.call(peer, cards[peer], now)

    def gone(self, link: PeerLink) -> None:
        """A channel is no more."""
        self.search.hoping.pop(link, None)
        self.guests.pop(link, None)
        if self.rivals is not None:
            self.rivals.links.pop(link, None)

    def greeted(self, link: PeerLink, hello: Hello, now: float) -> None:
        """A peer that has opened a channel, or another leader, says Hello."""
        refusal = self.directory.admit(link.peer, hello, self.leader)
        if refusal is None or refusal.proof:
            self.search.prove(link.peer)
        if refusal is not None:
            self.queue.send(link, refusal)
            self.guests.pop(link, None)
            self.channels.doubt(link, now + PART_S)
            self.ended(link, refusal.detail, now)
            return
        self.channels.trust(link)
        if self.leader is None or self.rivals is None:
            self._host(link, hello, now)
        elif hello.leads:
            if self.rivals.meet(link, hello, self._answer):
                self._give_way(link, now)
        else:
            self.rivals.links.pop(link, None)
            self.leader.join(link, hello, now)
            progress = self.following.progress
            if self.leader.plan is not None and progress is not None and self.leader.roster.link_of(link.peer) is link:
                self.queue.send(link, progress)

    def _host(self, link: PeerLink, hello: Hello, now: float) -> None:
        """Let a peer wait for a leader, and tell it who leads if that is known."""
        if len(self.guests) >= MAX_GUESTS:
            self.channels.close(link)
            return
        self.search.talks.pop(link, None)  # it asks this peer as well: its answer is not waited for
        self.guests[link] = hello
        self._answer(link, self.following.link.peer if self.following.link is not None else "")
        if hello.leads and self.role == CrewRole.SEEKING and self.following.plan is None:
            self.search.hear_of(link.peer, now)

    def _answer(self, link: PeerLink, leader: str) -> None:
        self.queue.send(link, Answer(leader, self.spec.proof_to(link.peer), self.term, self._may_lead))

    def answered(self, link: PeerLink, answer: Answer, now: float) -> None:
        """A peer says who leads."""
        if not self.spec.is_proof_of(link.peer, answer.proof):
            self._unmask(link, now)
            return
        self.channels.trust(link)
        self.search.prove(link.peer)
        if self.rivals is not None:
            if self.rivals.answered(link, answer, self.directory.cards, now):
                self._give_way(link, now)
        elif link is self.following.link and answer.lead != link.peer:
            self._stop_following()
            self.channels.close(link)
            queue = [answer.lead] if answer.lead else self.following.succession(link.peer)
            self.search.begin("", queue, now)
        elif self.search.told(link, answer, now):
            self._move(CrewRole.FOLLOWING)
            self.following.link, self.term = link, max(self.term, answer.term)
            for guest in self.guests:
                self._answer(guest, answer.lead)

    def refused(self, link: PeerLink, refusal: Refusal, now: float) -> None:
        """A peer refuses this one: say so once, and ask it rarely."""
        if not self.spec.is_proof_of(link.peer, refusal.proof):
            self._unmask(link, now)
            return
        self.queue.say_of_peer(f"peer {short(link.peer)} of crew {self.spec.crew} refuses this one: {refusal.detail}")
        self.search.vouch(now)
        if link is self.following.link:
            self._stop_following()
        self._shun(link, "it refuses this node", now)

    def _unmask(self, link: PeerLink, now: float) -> None:
        """A peer claims to be of this crew, but does not know its name."""
        self.queue.counts["refused/crew"] += 1
        self.queue.say_of_peer(f"peer {short(link.peer)} is left out of crew {self.spec.crew}: {NAMELESS}")
        self._shun(link, NAMELESS, now)

    def _shun(self, link: PeerLink, why: str, now: float) -> None:
        """Have nothing to do with a peer for a while."""
        self.channels.close(link)
        self.ended(link, why, now)
        self.search.shun(link.peer, now)

    def ended(self, link: PeerLink, why: str, now: float) -> None:
        """A channel with the leader, or a peer that might lead, or a member, has ended."""
        if link in self.search.talks:
            self.search.unreached(link, now)
        elif link is self.following.link:
            self.lose_leader(why, now)
        elif self.leader is not None:
            self.leader.left(link, why, now)

    def _stop_following(self) -> None:
        self._move(CrewRole.SEEKING)
        self.following.link, self.following.whole = None, False

    def lose_leader(self, why: str, now: float) -> None:
        link = self.following.link
        self._stop_following()
        peer = link.peer if link else ""
        self.queue.say(Warned(f"the leader of crew {self.spec.crew} is lost (peer {short(peer)}: {why})"))
        self.search.begin(peer, [peer, *self.following.succession(peer)], now)
        for guest in self.guests:
            self._answer(guest, "")

    @property
    def _may_lead(self) -> bool:
        """A peer that wants another stage than the first does not begin a crew, but goes on with one."""
        return not self.barred and (self.spec.wanted in (None, 0) or self.following.plan is not None)

    def _can_lead(self) -> bool:
        """Whether stage 0 fits here besides the stages of this peer, and has not failed to."""
        if self.barred:
            return False
        costs = self.spec.costs(self.following.spans)
        needed = sum(costs[stage] for stage in {0, *self.following.stages})
        if self.spec.capacity and needed > self.spec.capacity:
            room = f"{needed / 2**30:.2g} GiB, of {self.spec.capacity / 2**30:.2g} (pipeline.capacity_gb)"
            what = f"this machine has no room for stage 0 of crew {self.spec.crew}"
            self.queue.say_once(f"{what} ({room}): another peer must lead")
            return False
        return True

    def _take_lead(self, now: float) -> None:
        self._move(CrewRole.LEADING)
        spec, queue, self.term = self.spec, self.queue, min(self.term + 1, MAX_TERM)
        hello, lost = self.hello(spec.me), self.search.lost
        self.leader = Leader(spec, hello, self.following.plan, lost, self.term, queue, now)
        self.rivals = Rivals(spec, self.leader, self.channels, self.search, queue, self.hello)
        self.following.whole = False
        self.search.end()
        queue.say(f"this node leads crew {spec.crew} now")
        queue.do(StartLeading())
        guests, self.guests = self.guests, {}
        for link, greeting in guests.items():
            self.greeted(link, greeting, now)

    def _give_way(self, link: PeerLink, now: float) -> None:
        peer = short(link.peer)
        self.queue.say(f"peer {peer} leads crew {self.spec.crew} too, and stands higher: this node follows it")
        self.queue.counts["gave_way"] += 1
        self._stop_leading(link, now)
        self.search.wait_for(link, now)
        self.queue.send(link, self.hello(link.peer))

    def resign(self, why: str, now: float) -> None:
        """Stage 0 cannot be held here: the next in line must lead."""
        self.queue.say(
            Warned(f"this node cannot hold stage 0 of crew {self.spec.crew} ({why}): another peer must lead")
        )
        self.queue.counts["unable"] += 1
        self.barred, self.barred_until = True, now + BANNED_S
        self._stop_leading(None, now)
        self.search.begin("", self.following.succession(self.spec.me), now)

    def _stop_leading(self, successor: PeerLink | None, now: float) -> None:
        assert self.leader is not None and self.rivals is not None
        self._move(CrewRole.SEEKING)
        if successor is not None:
            self.rivals.links.pop(successor, None)
        for member in self.leader.roster.members.values():
            if member.link is not None:
                self._answer(member.link, successor.peer if successor else "")
                self.channels.part(member.link, now + PART_S)
        for link in list(self.rivals.links):
            self.channels.close(link)
        self.leader = self.rivals = None
        self.following.whole = False
        self.queue.do(StopLeading())
