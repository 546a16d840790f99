"""The question who leads a crew, as a state machine: this peer seeks the leader, follows it, succeeds it, or leads.

             no leader for FIND_LEADER_S, or it wants stage 0
    seeking ---------------------------------------> leading
      |  ^ \\______ first in line, leader lost ______/^ |
      |  |  leader lost, or it leads no more         | | another leader of this crew stands higher,
      v  +-------------------------------------------|-+ or stage 0 cannot be held here
    following

`TRANSITIONS` is the whole table. A record that does not fit the role is the sender's fault, and counted; an event that
does not fit the role is a mistake of this program, and raises LocalProtocolError.
Pure: `now` (seconds, of any clock) comes in, actions go to the queue.
"""

from __future__ import annotations

from enum import StrEnum

from protocol.crew import Answer, Broken, Hello, Load, Plan, Probe, Progress, Ready, Refusal, Report, Unable, Whole
from protocol.errors import LocalProtocolError
from swarm_node.pipeline.membership.actions import ActionQueue, PeerLink, PeerSpec, StartLeading, StopLeading
from swarm_node.pipeline.membership.channels import PART_S, PeerChannels
from swarm_node.pipeline.membership.directory import NAMELESS, Directory
from swarm_node.pipeline.membership.following import Following
from swarm_node.pipeline.membership.leader import Leader
from swarm_node.pipeline.membership.leader_search import LeaderSearch
from swarm_node.pipeline.membership.rivals import Rivals
from swarm_node.pipeline.membership.roster import BANNED_S, MAX_TERM, short

MAX_GUESTS = 32  # peers of the crew that wait here while it has no leader


class CrewRole(StrEnum):
    """The part that this peer has in its crew."""

    SEEKING = "seeking"
    FOLLOWING = "following"
    LEADING = "leading"


class Event(StrEnum):
    """Causes of a change of role."""

    LEADER_FOUND = "a peer says that it leads"
    OWN_TURN = "it is this peer's turn to lead"
    LEADER_LOST = "the channel to the leader ended"
    LEADER_RESIGNED = "the leader says that it leads no more"
    LEADER_REFUSES = "the leader refuses this peer"
    RIVAL_STANDS_HIGHER = "another leader stands higher"
    STAGE_0_FAILED = "stage 0 cannot be held here"


TRANSITIONS: dict[CrewRole, dict[Event, CrewRole]] = {
    CrewRole.SEEKING: {
        Event.LEADER_FOUND: CrewRole.FOLLOWING,
        Event.OWN_TURN: CrewRole.LEADING,
    },
    CrewRole.FOLLOWING: {
        Event.LEADER_LOST: CrewRole.SEEKING,
        Event.LEADER_RESIGNED: CrewRole.SEEKING,
        Event.LEADER_REFUSES: CrewRole.SEEKING,
    },
    CrewRole.LEADING: {
        Event.RIVAL_STANDS_HIGHER: CrewRole.SEEKING,
        Event.STAGE_0_FAILED: CrewRole.SEEKING,
    },
}
"""CrewRole -> event -> next role. All other moves are mistakes of this program."""

GREETINGS: frozenset[type] = frozenset({Hello, Answer, Refusal})
ACCEPTED: dict[CrewRole, frozenset[type]] = {
    CrewRole.SEEKING: GREETINGS,
    CrewRole.FOLLOWING: GREETINGS | {Plan, Whole, Progress, Probe},
    CrewRole.LEADING: GREETINGS | {Report, Ready, Unable, Broken, Load},
}
"""CrewRole -> records that peers may send. Others are counted as `stray`."""


def next_role(role: CrewRole, event: Event) -> CrewRole:
    """The role after `event`. LocalProtocolError if that cannot happen in `role`."""
    try:
        return TRANSITIONS[role][event]
    except KeyError:
        raise LocalProtocolError(f"while {role}: {event}") from None


class Leadership:
    """This peer's role, and how it changes."""

    def __init__(
        self,
        spec: PeerSpec,
        channels: PeerChannels,
        queue: ActionQueue,
        following: Following,
        directory: Directory,
        now: float,
    ) -> None:
        self.role = CrewRole.SEEKING
        self.leader: Leader | None = None  # while this peer leads
        self.term = 0
        self.search = LeaderSearch(spec, channels, queue, now)
        self._spec = spec
        self._channels = channels
        self._queue = queue
        self._following = following
        self._directory = directory
        self._rivals: Rivals | None = None
        self._guests: dict[PeerLink, Hello] = {}  # peers that wait for a leader
        self._barred = False  # this peer could not hold stage 0, and does not try again before ...
        self._barred_until = now

    def _move(self, event: Event) -> None:
        self.role = next_role(self.role, event)

    def hello(self, peer: str) -> Hello:
        """The Hello of this peer to another."""
        return self._directory.hello(peer, self._following, self.leader, self.term)

    def seek(self, now: float) -> None:
        """Ask the peers that may know the leader, or lead if it is this peer's turn."""
        self._barred = self._barred and now < self._barred_until
        while (peer := self.search.next(self._directory.cards, self._may_lead, self._can_lead, now)) is not None:
            if peer == self._spec.me:
                self._take_lead(now)
                return
            self._queue.send(self.search.dial(peer, now), self.hello(peer))

    def call_rivals(self, now: float) -> None:
        """A leader calls the peers of its crew that are not in touch."""
        if self._rivals is not None:
            self._rivals.call_all(self._directory.cards, now)

    def gone(self, link: PeerLink) -> None:
        """A channel is no more."""
        self.search.gone(link)
        self._guests.pop(link, None)
        if self._rivals is not None:
            self._rivals.forget(link)

    # ----------------------------------------------------------------- greetings

    def greet(self, link: PeerLink, record: Hello | Answer | Refusal, now: float) -> None:
        """A greeting has come."""
        match record:
            case Hello():
                self._greeted(link, record, now)
            case Answer():
                self._answered(link, record, now)
            case Refusal():
                self._refused_by(link, record, now)

    def _greeted(self, link: PeerLink, hello: Hello, now: float) -> None:
        refusal = self._directory.admit(link.peer, hello, self.leader)
        if refusal is None or refusal.proof:
            self.search.prove(link.peer)
        if refusal is not None:
            self._queue.send(link, refusal)
            self._guests.pop(link, None)
            self._channels.doubt(link, now + PART_S)
            self.ended(link, refusal.detail, now)
            return
        self._channels.trust(link)
        if self.leader is None or self._rivals is None:
            self._host(link, hello, now)
        elif hello.leads:
            if self._rivals.meet(link, hello, self._answer):
                self._give_way(link, now)
        else:
            self._rivals.forget(link)
            self.leader.join(link, hello, now)
            progress = self._following.progress
            if self.leader.plan is not None and progress is not None and self.leader.roster.link_of(link.peer) is link:
                self._queue.send(link, progress)

    def _host(self, link: PeerLink, hello: Hello, now: float) -> None:
        """Let a peer wait for a leader, and tell it who leads if that is known."""
        if len(self._guests) >= MAX_GUESTS:
            self._channels.close(link)
            return
        self.search.release(link)
        self._guests[link] = hello
        self._answer(link, self._following.link.peer if self._following.link is not None else "")
        if hello.leads and self.role == CrewRole.SEEKING and self._following.plan is None:
            self.search.hear_of(link.peer, now)

    def _answer(self, link: PeerLink, leader: str) -> None:
        self._queue.send(link, Answer(leader, self._spec.proof_to(link.peer), self.term, self._may_lead))

    def _answered(self, link: PeerLink, answer: Answer, now: float) -> None:
        if not self._spec.is_proof_of(link.peer, answer.proof):
            self._unmask(link, now)
            return
        self._channels.trust(link)
        self.search.prove(link.peer)
        if self._rivals is not None:
            if self._rivals.answered(link, answer, self._directory.cards, now):
                self._give_way(link, now)
        elif link is self._following.link and answer.lead != link.peer:
            self._stop_following(Event.LEADER_RESIGNED)
            self._channels.close(link)
            queue = [answer.lead] if answer.lead else self._following.succession(link.peer)
            self.search.begin("", queue, now)
        elif self.search.told(link, answer, now):
            self._move(Event.LEADER_FOUND)
            self._following.link, self.term = link, max(self.term, answer.term)
            for guest in self._guests:
                self._answer(guest, answer.lead)

    def _refused_by(self, link: PeerLink, refusal: Refusal, now: float) -> None:
        """Say so once; the peer is asked again, but rarely."""
        if not self._spec.is_proof_of(link.peer, refusal.proof):
            self._unmask(link, now)
            return
        self._queue.say_of_peer(f"peer {short(link.peer)} of crew {self._spec.crew} refuses this one: {refusal.detail}")
        self.search.vouch(now)
        if link is self._following.link:
            self._stop_following(Event.LEADER_REFUSES)
        self._shun(link, "it refuses this node", now)

    def _unmask(self, link: PeerLink, now: float) -> None:
        """A peer claims to be of this crew, but does not know its name."""
        self._queue.counts["refused/crew"] += 1
        self._queue.say_of_peer(f"peer {short(link.peer)} is left out of crew {self._spec.crew}: {NAMELESS}")
        self._shun(link, NAMELESS, now)

    def _shun(self, link: PeerLink, why: str, now: float) -> None:
        """Have nothing to do with a peer for a while."""
        self._channels.close(link)
        self.ended(link, why, now)
        self.search.shun(link.peer, now)

    # ----------------------------------------------------------------- changes of the leader

    def ended(self, link: PeerLink, why: str, now: float) -> None:
        """A channel with the leader, or a peer that might lead, or a member, has ended."""
        if link in self.search:
            self.search.unreached(link, now)
        elif link is self._following.link:
            self.lose_leader(why, now)
        elif self.leader is not None:
            self.leader.left(link, why, now)

    def _stop_following(self, event: Event) -> None:
        self._move(event)
        self._following.link, self._following.whole = None, False

    def lose_leader(self, why: str, now: float) -> None:
        link = self._following.link
        self._stop_following(Event.LEADER_LOST)
        peer = link.peer if link else ""
        self._queue.say(f"the leader of crew {self._spec.crew} is lost (peer {short(peer)}: {why})")
        self.search.begin(peer, [peer, *self._following.succession(peer)], now)
        for guest in self._guests:
            self._answer(guest, "")

    @property
    def _may_lead(self) -> bool:
        """A peer that wants another stage than the first does not begin a crew, but goes on with one."""
        return not self._barred and (self._spec.wanted in (None, 0) or self._following.plan is not None)

    def _can_lead(self) -> bool:
        """Whether stage 0 fits here besides the stages of this peer, and has not failed to."""
        if self._barred:
            return False
        costs = self._spec.costs(self._following.plan.spans if self._following.plan else self._spec.spans)
        needed = sum(costs[stage] for stage in {0, *self._following.stages})
        if self._spec.capacity and needed > self._spec.capacity:
            room = f"{needed / 2**30:.2g} GiB, of {self._spec.capacity / 2**30:.2g} (pipeline.capacity_gb)"
            what = f"this machine has no room for stage 0 of crew {self._spec.crew}"
            self._queue.say_once(f"{what} ({room}): another peer must lead")
            return False
        return True

    def _take_lead(self, now: float) -> None:
        self._move(Event.OWN_TURN)
        spec, queue, self.term = self._spec, self._queue, min(self.term + 1, MAX_TERM)
        hello, lost = self.hello(spec.me), self.search.lost
        self.leader = Leader(spec, hello, self._following.plan, lost, self.term, queue, now)
        self._rivals = Rivals(spec, self.leader, self._channels, self.search, queue, self.hello)
        self._following.whole = False
        self.search.end()
        queue.say(f"this node leads crew {spec.crew} now")
        queue.do(StartLeading())
        guests, self._guests = self._guests, {}
        for link, greeting in guests.items():
            self._greeted(link, greeting, now)

    def _give_way(self, link: PeerLink, now: float) -> None:
        peer = short(link.peer)
        self._queue.say(f"peer {peer} leads crew {self._spec.crew} too, and stands higher: this node follows it")
        self._queue.counts["gave_way"] += 1
        self._stop_leading(Event.RIVAL_STANDS_HIGHER, link, now)
        self.search.wait_for(link, now)
        self._queue.send(link, self.hello(link.peer))

    def resign(self, why: str, now: float) -> None:
        """Stage 0 cannot be held here: the next in line must lead."""
        self._queue.say(f"this node cannot hold stage 0 of crew {self._spec.crew} ({why}): another peer must lead")
        self._queue.counts["unable"] += 1
        self._barred, self._barred_until = True, now + BANNED_S
        self._stop_leading(Event.STAGE_0_FAILED, None, now)
        self.search.begin("", self._following.succession(self._spec.me), now)

    def _stop_leading(self, event: Event, successor: PeerLink | None, now: float) -> None:
        assert self.leader is not None and self._rivals is not None
        self._move(event)
        if successor is not None:
            self._rivals.forget(successor)
        for member in self.leader.members.values():
            if member.link is not None:
                self._answer(member.link, successor.peer if successor else "")
                self._channels.part(member.link, now + PART_S)
        self._rivals.close()
        self.leader = self._rivals = None
        self._following.whole = False
        self._queue.do(StopLeading())
