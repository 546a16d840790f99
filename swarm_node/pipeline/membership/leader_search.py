"""How a peer without a lead finds one, or finds that it is its own turn.

    the lost lead once more -> those in line for it -> who looks like a lead by its card -> who holds a stage
    -> everyone else of the crew -> nobody is there, or knows of a lead, for FIND_S: this peer itself

Cards are renewed rarely, and who is asked says who leads. Those with a lower peer id, who may become the first lead,
are waited for. Anybody can make cards of the crew: several are asked at a time, who has never shown that it knows the
crew's name once for each search and then at longer and longer intervals, and for such nobody waits longer than PASS_S.
Pure: `now` (seconds, of any clock) comes in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from protocol.crew import CREW_METHOD, Answer
from protocol.messages import CrewCard
from swarm_node.pipeline.membership.actions import ActionQueue, Link, PeerSpec
from swarm_node.pipeline.membership.channels import Channels

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
MOST_S = 160.0
"""Longest such time: it doubles for whoever has never proved to know the crew's name."""
PASS_S = 20.0
"""A peer that may lead waits so long for such peers, and then leads."""
MAX_TALKS = 8
"""Peers that are asked at a time."""
MAX_KNOWN = 1024
"""Peers of which it is remembered whether they could be reached."""
VOUCHED_S = 30.0
"""So long after another peer said that the lost lead lives, this one does not take its place."""


class LeaderSearch:
    """For the lead."""

    def __init__(self, spec: PeerSpec, channels: Channels, out: ActionQueue, now: float) -> None:
        self.lost = ""
        """The lead that went away, until there is another."""
        self._talks: dict[Link, float] = {}
        """With whom this seeker has begun to talk, and how long it waits for the next word."""
        self._in_line = False
        """It is asking those in line for the lead, one by one."""
        self._post = spec
        self._channels = channels
        self._out = out
        self._begun = now
        self._looked: float | None = None
        """When members of the swarm were first seen."""
        self._queue: list[str] = []
        """Whom to ask next; this peer itself, when it is its turn to lead."""
        self._vouched_until = now
        self._since = now
        """When this search began."""
        self._avoid: dict[str, float] = {}
        self._known: dict[str, None] = {}
        """Who has proved to know the crew's name, latest last."""
        self._failed: dict[str, int] = {}
        """How often others were asked in vain."""
        self._asked: set[str] = set()
        """Who did not know of a lead, since this peer last did."""
        self._hoping: dict[Link, None] = {}
        """Channels to such peers: they may yet tell."""

    def look(self, anybody: bool, now: float) -> None:
        """Whether there are members of the swarm."""
        if self._looked is None and (anybody or now >= self._begun + ALONE_S):
            self._looked = now

    def __contains__(self, link: Link) -> bool:
        return link in self._talks

    def next(
        self, cards: Mapping[str, CrewCard], may_begin: bool, can_lead: Callable[[], bool], now: float
    ) -> str | None:
        """Whom to ask now; this peer itself if it is to lead; `None` = nobody, or not yet. `cards`: of others in the
        crew. `may_begin`: this peer may lead if nobody else does."""
        for link in [link for link, until in self._talks.items() if until <= now]:
            self._asked.add(link.peer)
            self.unreached(link, now)
            self._channels.close(link)
        me = self._post.me
        vouched = now < self._vouched_until
        if self._in_line and self._talks:
            return None
        while self._queue and not self._talks:
            peer = self._queue.pop(0)
            if peer != me:
                self._in_line = True
                return peer
            if not vouched and can_lead():
                return me
        self._in_line = False
        if self._looked is None or len(self._talks) >= MAX_TALKS:
            return None
        talking = {link.peer for link in self._talks}
        free = {peer: card for peer, card in cards.items() if not self.avoids(peer, now) and peer not in talking}
        others = [peer for peer in free if peer not in self._asked]
        leads = [peer for peer in free if 0 in free[peer].held and (peer in self._known or peer in others)]
        for peers in (leads, [peer for peer in others if free[peer].held], others):
            if peers:
                return min(peers, key=lambda peer: (peer not in self._known, -free[peer].term, peer))
        found_none = self._post.wanted == 0 or now >= self._looked + FIND_S + self._post.absent_s
        if may_begin and found_none and not vouched and not self._waits(now) and can_lead():
            return me
        again = [peer for peer in free if 0 in free[peer].held]
        if self._post.wanted:
            crew = self._post.crew
            self._out.say_once(f"waiting for a peer that takes stage 0 of crew {crew}, or for one that takes any")
        return min(again, default=None)

    def _waits(self, now: float) -> bool:
        """For an answer that may matter."""
        return any(link.peer in self._known or now < self._since + PASS_S for link in self._talks)

    def dial(self, peer: str, now: float) -> Link:
        """Begin to talk with somebody."""
        link = Link(peer, CREW_METHOD, dialled=True)
        self._talks[link] = now + DIAL_S
        self._channels.open(link)
        return link

    def wait_for(self, link: Link, now: float) -> None:
        """Another lead, to which this one has given way, is to say that it takes it."""
        self._stop(link)
        self._talks[link], self._in_line = now + UNDECIDED_S, True

    def told(self, link: Link, answer: Answer, now: float) -> bool:
        """What somebody says who was asked. Whether it is the lead."""
        lead = answer.lead
        if link not in self._talks and link not in self._hoping:
            return False
        if lead == link.peer:
            self._channels.stay(link)
            self.end(link)
            return True
        if lead in ("", self._post.me) or self.avoids(lead, now):
            self._vouched_until = now + VOUCHED_S if lead and lead == self.lost else now
            before = self._post.wanted != 0 and link.peer < self._post.me
            if answer.may_lead and (before or self.lost) and link in self._talks:
                self._talks[link] = now + UNDECIDED_S
            elif link in self._talks:
                del self._talks[link]
                self._asked.add(link.peer)
                self._hoping[link] = None
                self._channels.part(link, now + UNDECIDED_S)
        elif all(talk.peer != lead for talk in self._talks):
            self._avoid[link.peer] = now + AVOID_S
            self._ask_first(lead)
        return False

    def hear_of(self, lead: str, now: float) -> None:
        """A lead has called on this peer."""
        if all(link.peer != lead for link in self._talks) and not self.avoids(lead, now):
            self._ask_first(lead)

    def avoids(self, peer: str, now: float) -> bool:
        return self._avoid.get(peer, now) > now

    def shun(self, peer: str, now: float) -> None:
        """Ask it rarely."""
        self._avoid[peer] = now + VOUCHED_S

    def prove(self, peer: str) -> None:
        """It knows the crew's name."""
        if self._failed.pop(peer, None):
            self._avoid.pop(peer, None)
        self._known.pop(peer, None)
        self._known[peer] = None
        _forget_first(self._known)

    def doubt(self, peer: str, now: float) -> None:
        """It was asked in vain, or may turn out to have been: do not ask it again soon, unless it proves itself."""
        tries = 0 if peer in self._known else self._failed.pop(peer, 0)
        self._avoid[peer] = now + min(AVOID_S * 2**tries, MOST_S)
        if peer not in self._known:
            self._failed[peer] = tries + 1
            _forget_first(self._failed)
        if len(self._avoid) > MAX_KNOWN:
            self._avoid = {one: until for one, until in self._avoid.items() if until > now}

    def knows(self, peer: str) -> bool:
        """Whether it has proved to know the crew's name."""
        return peer in self._known

    def vouch(self, now: float) -> None:
        """There is a lead, though not for this peer."""
        self._vouched_until = now + VOUCHED_S

    def unreached(self, link: Link, now: float) -> None:
        """A channel to whom it was trying has ended, or could not be opened."""
        del self._talks[link]
        self.doubt(link.peer, now)

    def begin(self, lost: str, queue: Iterable[str], now: float) -> None:
        """There is no lead any more: ask these first."""
        self.lost, self._queue, self._since = lost, list(queue), now

    def end(self, found: Link | None = None) -> None:
        """There is one, over that channel, or this peer leads."""
        self._stop(found)
        self._queue, self.lost = [], ""
        self._asked.clear()

    def gone(self, link: Link) -> None:
        self._hoping.pop(link, None)

    def release(self, link: Link) -> None:
        """Its peer was asked, and asks itself: each gave way to the other."""
        self._talks.pop(link, None)

    def _ask_first(self, peer: str) -> None:
        self._stop()
        self._queue.insert(0, peer)

    def _stop(self, but: Link | None = None) -> None:
        for link in [*self._hoping, *self._talks]:
            if link is not but:
                self._channels.close(link)
        self._talks.clear()
        self._hoping.clear()


def _forget_first(peers: dict[str, Any]) -> None:
    if len(peers) > MAX_KNOWN:
        del peers[next(iter(peers))]
