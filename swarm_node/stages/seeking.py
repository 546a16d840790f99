"""How a peer without a lead finds one, or finds that it is its own turn.

    the lost lead once more -> those in line for it -> who looks like a lead by its card -> who holds a stage
    -> everyone else of the crew -> nobody is there, or knows of a lead, for FIND_S: this peer itself

Cards are renewed rarely, and who is asked says who leads. Those with a lower peer id, who may become the first lead,
are waited for. Pure: `now` (seconds, of any clock) comes in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from protocol.crew import CREW_METHOD, Answer
from protocol.messages import CrewCard
from swarm_node.stages.doors import Doors
from swarm_node.stages.leading import Link, Outbox, Post

FIND_S = 3.0
"""A peer that finds no lead for so long, after it first saw members of its swarm, becomes the first."""
ALONE_S = 6.0
"""One that sees no members for so long takes it that there are none."""
DIAL_S = 3.0
"""A peer that does not answer for so long is not waited for."""
UNDECIDED_S = 8.0
"""One that answers, but knows no lead yet, is waited for so long: it may have to notice first that one is lost."""
AVOID_S = 5.0
"""Who could not be reached is not dialled again before."""
VOUCHED_S = 30.0
"""So long after another peer said that the lost lead lives, this one does not take its place."""


class Search:
    """For the lead."""

    def __init__(self, post: Post, doors: Doors, out: Outbox, now: float) -> None:
        self.lost = ""
        """The lead that went away, until there is another."""
        self.trying: Link | None = None
        """With whom this seeker has begun to talk, and how long it waits for the next word."""
        self._until = 0.0
        self._post = post
        self._doors = doors
        self._out = out
        self._begun = now
        self._looked: float | None = None
        """When members of the swarm were first seen."""
        self._queue: list[str] = []
        """Whom to ask next; this peer itself, when it is its turn to lead."""
        self._vouched_until = now
        self._avoid: dict[str, float] = {}
        self._asked: set[str] = set()
        """Who did not know of a lead, since this peer last did."""
        self._hoping: dict[Link, None] = {}
        """Channels to such peers: they may yet tell."""

    def look(self, anybody: bool, now: float) -> None:
        """Whether there are members of the swarm."""
        if self._looked is None and (anybody or now >= self._begun + ALONE_S):
            self._looked = now

    def next(
        self, cards: Mapping[str, CrewCard], may_begin: bool, can_lead: Callable[[], bool], now: float
    ) -> str | None:
        """Whom to ask now; this peer itself if it is to lead; `None` = wait. `cards`: of others in the crew.
        `may_begin`: this peer may lead if nobody else does."""
        if self.trying is not None:
            if now < self._until:
                return None
            self._avoid[self.trying.peer] = now + AVOID_S
            self._asked.add(self.trying.peer)
            self._doors.close(self.trying)
            self.trying = None
        me = self._post.me
        vouched = now < self._vouched_until
        while self._queue:
            peer = self._queue.pop(0)
            if peer != me:
                return peer
            if not vouched and can_lead():
                return me
        if self._looked is None:
            return None
        free = {peer: card for peer, card in cards.items() if not self.avoids(peer, now)}
        leads = [peer for peer, card in free.items() if 0 in card.seats]
        others = [peer for peer in free if peer not in self._asked]
        for peers in (leads, [peer for peer in others if free[peer].seats], others):
            if peers:
                return min(peers, key=lambda peer: (-free[peer].term, peer))
        found_none = self._post.wanted == 0 or now >= self._looked + FIND_S + self._post.absent_s
        if may_begin and found_none and not vouched and can_lead():
            return me
        if self._post.wanted:
            crew = self._post.crew
            self._out.say_once(f"waiting for a peer that takes stage 0 of crew {crew}, or for one that takes any")
        return None

    def dial(self, peer: str, now: float) -> Link:
        """Begin to talk with somebody."""
        link = self.trying = Link(peer, CREW_METHOD, dialled=True)
        self._until = now + DIAL_S
        self._doors.open(link)
        return link

    def wait_for(self, link: Link, now: float) -> None:
        """Another lead, to which this one has given way, is to say that it takes it."""
        self.trying, self._until = link, now + UNDECIDED_S

    def told(self, link: Link, answer: Answer, now: float) -> bool:
        """What somebody says who was asked. Whether it is the lead."""
        lead = answer.lead
        if link is not self.trying and link not in self._hoping:
            return False
        if lead == link.peer:
            self._doors.stay(link)
            self.end(link)
            return True
        if lead in ("", self._post.me) or self.avoids(lead, now):
            self._vouched_until = now + VOUCHED_S if lead and lead == self.lost else now
            before = self._post.wanted != 0 and link.peer < self._post.me
            if answer.may_lead and (before or self.lost) and link is self.trying:
                self._until = now + UNDECIDED_S
            elif link is self.trying:
                self.trying = None
                self._asked.add(link.peer)
                self._hoping[link] = None
                self._doors.part(link, now + UNDECIDED_S)
        else:
            self._avoid[link.peer] = now + AVOID_S
            self._ask_first(lead)
        return False

    def hear_of(self, lead: str, now: float) -> None:
        """A lead has called on this peer."""
        asked = self.trying is not None and self.trying.peer == lead
        if not asked and not self.avoids(lead, now):
            self._ask_first(lead)

    def avoids(self, peer: str, now: float) -> bool:
        return self._avoid.get(peer, now) > now

    def shun(self, peer: str, now: float) -> None:
        """Ask it rarely."""
        self._avoid[peer] = now + VOUCHED_S

    def vouch(self, now: float) -> None:
        """There is a lead, though not for this peer."""
        self._vouched_until = now + VOUCHED_S

    def unreached(self, now: float) -> None:
        """The channel to whom it was trying has ended, or could not be opened."""
        assert self.trying is not None
        self._avoid[self.trying.peer] = now + AVOID_S
        self.trying = None

    def begin(self, lost: str, queue: Iterable[str]) -> None:
        """There is no lead any more: ask these first."""
        self.lost, self._queue = lost, list(queue)

    def end(self, found: Link | None = None) -> None:
        """There is one, over that channel, or this peer leads."""
        self._stop(found)
        self._queue, self.lost = [], ""
        self._asked.clear()

    def gone(self, link: Link) -> None:
        self._hoping.pop(link, None)

    def _ask_first(self, peer: str) -> None:
        self._stop()
        self._queue.insert(0, peer)

    def _stop(self, but: Link | None = None) -> None:
        for link in [*self._hoping, self.trying]:
            if link is not None and link is not but:
                self._doors.close(link)
        self.trying = None
        self._hoping.clear()
