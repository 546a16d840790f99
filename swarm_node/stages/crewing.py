"""A peer's part in its crew, as a state machine: finds the lead, follows it, succeeds it, is it.

             no lead for FIND_S, or wants stage 0
    seeks ----------------------------------------> leads        (`leading.Lead`: who is there, who holds what)
      |  ^ \\______ first in line, lead lost _______/^ |
      |  |  lead lost, or leads no more               | | another lead of this crew stands higher
      v  +--------------------------------------------|-+
    follows: Hello -> Answer -> Plan -> TakeSeat ... Ready

Whom a seeker asks: the lost lead once more, then those in line for it; else who looks like a lead by its card, then who
holds a stage, then everyone else of the crew: cards are renewed rarely, and who is asked says who leads. Those with a
lower peer id, who may become the first lead, are waited for. Of two leads the one with the lower peer id decides who
gives way, so that both cannot.

No thread, no clock, no network: events come in with `now` (seconds, of any clock), actions are returned.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Literal

import msgspec

from protocol.crew import (
    CREW_METHOD,
    MAX_REASON_CHARS,
    STAGE_METHOD,
    Answer,
    Broken,
    Hello,
    Holding,
    Kept,
    Load,
    Plan,
    Probe,
    Progress,
    Ready,
    Record,
    Refusal,
    Report,
    Source,
    Unable,
    Whole,
)
from protocol.messages import PROTOCOL_VERSION, CrewCard, PeerCard
from swarm_node.stages.leading import (
    Action,
    Close,
    Connect,
    Costs,
    Lead,
    LeaveLead,
    LeaveSeat,
    Link,
    Outbox,
    Post,
    Sources,
    TakeLead,
    TakeSeat,
    Tell,
    short,
)
from swarm_node.stages.placement import Standing, gives_way, succession

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
PART_S = 3.0
"""Time for a last word before a channel is closed."""
REDIAL_S = 1.0
"""Between two tries to reach a neighbour."""
MAX_GUESTS = 32
"""Channels of peers that are not, or not yet, in the crew."""
NOTHING = Holding()


class Crew:
    """This peer in its crew."""

    def __init__(
        self,
        post: Post,
        sources: Sources,
        tell: Tell,
        costs: Costs,
        now: float,
        holding: Holding = NOTHING,
        held_s: Callable[[], float] = float,
    ) -> None:
        """`holding`: snapshots of earlier runs. `held_s` = seconds that the oldest message here has been waiting."""
        self.post = post
        self.role: Literal["seeks", "follows", "leads"] = "seeks"
        self.lead: Lead | None = None
        self.plan: Plan | None = None
        """The last that this peer went by."""
        self.term = 0
        self.whole = False
        """All stages of the plan are held, as far as this peer knows."""
        self.live: dict[int, int] = {}
        """Stages in memory here -> their updates."""
        self.progress: Progress | None = None
        """Of the run, as the lead last told."""
        self._holding = holding
        self._sources = sources
        self._tell = tell
        self._costs = costs
        self._held_s = held_s
        self._out = Outbox()
        self._begun = now
        self._looked: float | None = None
        """When members of the swarm were first seen."""
        self._cards: dict[str, CrewCard] = {}
        """Of other peers of this crew."""
        self._ordered: dict[int, TakeSeat] = {}
        """Stages that are being built."""
        self._built: dict[int, tuple[Source, ...]] = {}
        """Sources that were given for those that have been."""
        self._links: set[Link] = set()
        self._stage_links: dict[str, Link] = {}
        """Channel with each neighbour."""
        self._redial: dict[str, float] = {}
        """When each of them may be dialled again."""
        self._lead_link: Link | None = None
        self._trying: Link | None = None
        """With whom this seeker has begun to talk, and how long it waits for the next word."""
        self._until = 0.0
        self._queue: list[str] = []
        """Whom to ask next; this peer itself, when it is its turn to lead."""
        self._lost = ""
        """The lead that went away, until there is another."""
        self._vouched_until = now
        self._avoid: dict[str, float] = {}
        self._asked: set[str] = set()
        """Who did not know of a lead, since this peer last did."""
        self._hoping: dict[Link, None] = {}
        """Channels to such peers: they may yet tell."""
        self._guests: dict[Link, Hello] = {}
        self._rivals: dict[Link, bool] = {}
        """Channels between two leads; whether this one has said Hello."""
        self._parting: dict[Link, float] = {}
        """Channels that are closed then."""

    # ----------------------------------------------------------------- what is known

    @property
    def counts(self) -> Mapping[str, int]:
        """`lost`, `recovered/<way>`, `given_up`, `unable`, `stuck`, `stray`, `refused/<reason>`: running totals."""
        return self._out.counts

    @property
    def seats(self) -> tuple[int, ...]:
        """Stages of this peer."""
        return self.plan.held_by(self.post.me) if self.plan else ()

    @property
    def card(self) -> CrewCard:
        """For the membership card: the lead shows stage 0 as soon as it leads, others what they have in memory."""
        mine = {stage for stage in self.seats if stage in self.live and stage > 0}
        seats = tuple(sorted(mine | {0} if self.role == "leads" else mine))
        return CrewCard(self.post.crew, self.post.architecture, len(self.post.spans), seats, self.term)

    def way_to(self, stage: int) -> Link | None:
        """The channel to whoever holds `stage` (-1 = the lead); `None` if there is none, or it is this peer."""
        if self.plan is None:
            return None
        peer = self.plan.lead if stage < 0 else self.plan.seats[stage].peer
        if self.role == "leads":
            return self.lead.link_of(peer) if self.lead else None
        return self._lead_link if peer == self.plan.lead else self._stage_links.get(peer)

    def stands(self, order: TakeSeat) -> bool:
        """Whether a stage is still to be built, and so."""
        return self._ordered.get(order.stage) == order

    # ----------------------------------------------------------------- events

    def cards(self, members: Mapping[str, PeerCard], now: float) -> list[Action]:
        """Members of the swarm, as last looked up."""
        if self._looked is None and (members or now >= self._begun + ALONE_S):
            self._looked = now
        self._cards = {}
        for peer, card in members.items():
            if card.crew is None or card.crew.name != self.post.crew or peer == self.post.me:
                continue
            if card.crew.architecture != self.post.architecture:
                self._refuse_card(peer, "model")
            elif card.crew.count != len(self.post.spans):
                self._refuse_card(peer, "stages")
            else:
                self._cards[peer] = card.crew
        return self._settle(now)

    def opened(self, link: Link, now: float) -> list[Action]:
        """A peer has opened a channel."""
        self._links.add(link)
        if link.method == STAGE_METHOD:
            old = self._stage_links.pop(link.peer, None)
            if old is not None:
                self._close(old)
            self._stage_links[link.peer] = link
            self._drop_strangers()
        return self._settle(now)

    def heard(self, link: Link, record: Record, now: float) -> list[Action]:
        """A record has come over a channel."""
        if link.method != CREW_METHOD:
            self._out.counts["stray"] += 1
        elif link in self._links:
            self._heard(link, record, now)
        return self._settle(now)

    def closed(self, link: Link, why: str, now: float) -> list[Action]:
        """A channel has ended, or could not be opened."""
        if link in self._links:
            self._forget(link)
            if link.method == STAGE_METHOD:
                self._neighbour_lost(link, why, refused=False)
            elif link is self._trying:
                self._trying = None
                self._avoid[link.peer] = now + AVOID_S
            elif link is self._lead_link:
                self._lead_lost(f"{why}", now)
            elif self.lead is not None:
                self.lead.left(link, why, now)
        return self._settle(now)

    def refused(self, link: Link, reason: str, now: float) -> list[Action]:
        """What a peer said of its stage's work is nothing that anybody takes: this peer has done with it."""
        self._out.counts[f"refused/{reason}"] += 1
        if link in self._links:
            self._close(link)
            if link.method == STAGE_METHOD:
                self._neighbour_lost(link, reason, refused=True)
            elif link is self._lead_link:
                self._lead_lost(f"what it says is refused: {reason}", now)
            elif self.lead is not None and self.lead.link_of(link.peer) is link:
                self.lead.give_up(link.peer, f"what it says is refused: {reason}", now)
        return self._settle(now)

    def seated(self, stage: int, updates: int, source: Source | None, now: float) -> list[Action]:
        """A stage that was to be built is here."""
        order = self._ordered.pop(stage, None)
        if order is None or stage not in self.seats:
            self._out.do(LeaveSeat(stage))
        else:
            self.live[stage] = updates
            self._built[stage] = order.sources
            self._say_ready(stage, source)
        return self._settle(now)

    def unable(self, stage: int, why: str, now: float) -> list[Action]:
        """A stage that was to be built cannot be."""
        self._ordered.pop(stage, None)
        if self.plan is not None and stage in self.seats:
            line = _line(why)
            if self.lead is not None:
                self.lead.unable(self.post.me, stage, line, now)
            else:
                self._out.send(self._lead_link, Unable(self.plan.mark, stage, line))
        return self._settle(now)

    def report(self, holding: Holding, now: float) -> list[Action]:
        """What this peer has: updates of its stages (those it was not told to leave), replicas, snapshots."""
        self.live |= {kept.stage: kept.updates for kept in holding.live if kept.stage in self.live}
        self._holding = holding
        if self.lead is not None:
            self.lead.members[self.post.me].holding = self.holding
        elif self.role == "follows":
            self._out.send(self._lead_link, Report(self.holding))
        return self._settle(now)

    def doubted(self, mark: int, stages: Collection[int], why: str, now: float) -> list[Action]:
        """The lead's pipeline, which worked by the plan of that mark, has given up stages that the crew has not."""
        if self.lead is not None and self.lead.whole and self.plan is not None and self.plan.mark == mark:
            self.lead.doubt(stages, why, now)
        return self._settle(now)

    def advance(self, progress: Progress, now: float) -> list[Action]:
        """The lead tells everybody how far the run is."""
        self.progress = progress
        if self.lead is not None:
            for member in self.lead.members.values():
                if member.link is not None:
                    self._out.send(member.link, progress)
        return self._settle(now)

    def at_rest(self, now: float) -> list[Action]:
        """The lead is between two rounds."""
        if self.lead is not None:
            self.lead.at_rest(now)
        return self._settle(now)

    def tick(self, now: float, waiting_since: float | None = None) -> list[Action]:
        """Time has passed. `waiting_since`: the lead has been waiting for its stages, and heard nothing."""
        for link in [link for link, until in self._parting.items() if until <= now]:
            self._close(link)
        if self._looked is None and now >= self._begun + ALONE_S:
            self._looked = now
        if self.lead is not None and waiting_since is not None:
            self.lead.watch(now, waiting_since)
        self._drop_strangers()
        self._connect_neighbours(now)
        return self._settle(now)

    @property
    def holding(self) -> Holding:
        live = tuple(Kept(stage, updates) for stage, updates in sorted(self.live.items()))
        return msgspec.structs.replace(self._holding, live=live)

    # ----------------------------------------------------------------- the rest is how

    def _settle(self, now: float) -> list[Action]:
        """Do what follows from what is known now."""
        if self.role == "seeks":
            self._seek(now)
        if self.lead is not None:
            self._look_for_rivals(now)
            plan = self.lead.arrange(now)
            if plan is not None:
                self._adopt(plan, now)
            self.plan = self.lead.plan or self.plan
            if self.lead.whole and not self.whole:
                self._leave_others()
            self.whole = self.lead.whole
        return self._out.take()

    def _heard(self, link: Link, record: Record, now: float) -> None:
        match record:
            case Hello():
                self._greeted(link, record, now)
            case Answer():
                self._answered(link, record, now)
            case Refusal():
                self._refused_by(link, record, now)
            case Plan() if link is self._lead_link:
                self._follow(link, record, now)
            case Whole(plan=mark) if link is self._lead_link:
                if self.plan is not None and mark == self.plan.mark:
                    self.whole = True
                    self._leave_others()
            case Progress() if link is self._lead_link:
                self.progress = record
            case Probe(plan=mark) if link is self._lead_link:
                self._out.send(link, Load(mark, max(0.0, self._held_s())))
            case _ if self.lead is not None:
                self.lead.heard(link, record, now)
            case _:
                self._out.counts["stray"] += 1

    # ----------------------------------------------------------------- seeking

    def _seek(self, now: float) -> None:
        if self._trying is not None:
            if now < self._until:
                return
            self._avoid[self._trying.peer] = now + AVOID_S
            self._asked.add(self._trying.peer)
            self._close(self._trying)
            self._trying = None
        peer = self._next(now)
        if peer == self.post.me:
            self._take_lead(now)
        elif peer is not None:
            self._dial(peer, now)

    def _next(self, now: float) -> str | None:
        """Whom to ask next; this peer itself if it is to lead; `None` = wait."""
        me, post = self.post.me, self.post
        vouched = now < self._vouched_until
        while self._queue:
            peer = self._queue.pop(0)
            if peer != me:
                return peer
            if not vouched and self._can_lead():
                return me
        if self._looked is None:
            return None
        free = {peer: card for peer, card in self._cards.items() if self._avoid.get(peer, now) <= now}
        leads = [peer for peer, card in free.items() if 0 in card.seats]
        others = [peer for peer in free if peer not in self._asked]
        for peers in (leads, [peer for peer in others if free[peer].seats], others):
            if peers:
                return min(peers, key=lambda peer: (-free[peer].term, peer))
        found_none = post.wanted == 0 or now >= self._looked + FIND_S + post.absent_s
        if self._may_lead and found_none and not vouched and self._can_lead():
            return me
        if post.wanted:
            self._out.say_once(f"waiting for a peer that takes stage 0 of crew {post.crew}, or for one that takes any")
        return None

    @property
    def _may_lead(self) -> bool:
        """Who wants another stage than the first does not begin a crew, but goes on with one."""
        return self.post.wanted in (None, 0) or self.plan is not None

    def _can_lead(self) -> bool:
        """There is room for stage 0 besides what this peer holds."""
        costs = self._costs(self.plan.spans if self.plan else self.post.spans)
        needed = sum(costs[stage] for stage in {0, *self.seats})
        if self.post.capacity and needed > self.post.capacity:
            self._out.say_once(f"this machine has no room for stage 0 of crew {self.post.crew}: another peer must lead")
            return False
        return True

    def _dial(self, peer: str, now: float) -> None:
        link = self._trying = Link(peer, CREW_METHOD, dialled=True)
        self._until = now + DIAL_S
        self._connect(link)
        self._out.send(link, self._hello())

    def _hello(self) -> Hello:
        post, lead = self.post, self.lead
        holding = self.holding
        has_any = holding.live or holding.replicas or holding.snapshots
        return Hello(
            protocol=PROTOCOL_VERSION,
            swarm=post.swarm,
            crew=post.crew,
            architecture=post.architecture,
            stages=len(post.spans),
            wanted=post.wanted,
            leads=lead is not None,
            term=lead.won if lead else self.term,
            updates=lead.updates if lead else max(self.live.values(), default=0),
            started=post.started,
            holding=holding,
            spans=(self.plan.spans if self.plan else post.spans) if has_any else (),
            capacity=post.capacity,
        )

    def _answered(self, link: Link, answer: Answer, now: float) -> None:
        lead = answer.lead
        if self.lead is not None:
            if link in self._rivals and lead == link.peer:
                self._give_way(link, now)
            elif link in self._rivals:
                self._close(link)
        elif link is self._lead_link and lead != link.peer:  # it leads no more
            self._lead_link = None
            self._close(link)
            self.role, self._queue = "seeks", [lead] if lead not in ("", self.post.me) else []
        elif link is not self._trying and link not in self._hoping:
            return
        elif lead == link.peer:
            self._stop_asking(link)
            self._parting.pop(link, None)
            self._trying, self._lead_link, self._queue, self._lost = None, link, [], ""
            self.role, self.term = "follows", max(self.term, answer.term)
            self._asked.clear()
            for guest in self._guests:
                self._out.send(guest, Answer(lead, self.term))
        elif lead in ("", self.post.me) or self._avoid.get(lead, now) > now:
            self._vouched_until = now + VOUCHED_S if lead and lead == self._lost else now
            before = self.post.wanted != 0 and link.peer < self.post.me
            if answer.may_lead and (before or self._lost) and link is self._trying:
                self._until = now + UNDECIDED_S
            elif link is self._trying:
                self._trying = None
                self._asked.add(link.peer)
                self._hoping[link] = None
                self._parting[link] = now + UNDECIDED_S
        else:
            self._avoid[link.peer] = now + AVOID_S
            self._stop_asking()
            self._queue.insert(0, lead)

    def _stop_asking(self, but: Link | None = None) -> None:
        for link in [*self._hoping, self._trying]:
            if link is not None and link is not but:
                self._close(link)
        self._trying = None
        self._hoping.clear()

    def _refused_by(self, link: Link, refusal: Refusal, now: float) -> None:
        """Say so once; it is asked again, but rarely."""
        self._out.say_once(f"peer {short(link.peer)} of crew {self.post.crew} refuses this one: {refusal.detail}")
        was_lead = link is self._lead_link
        self._close(link)
        self._avoid[link.peer] = now + VOUCHED_S
        self._vouched_until = now + VOUCHED_S
        if link is self._trying:
            self._trying = None
        elif was_lead:
            self._lead_link, self.role = None, "seeks"

    # ----------------------------------------------------------------- following

    def _follow(self, link: Link, plan: Plan, now: float) -> None:
        if plan.lead != link.peer or len(plan.seats) != len(self.post.spans):
            self._out.counts["refused/plan"] += 1
            return
        self.term = plan.term
        if self.plan is not None and plan.mark == self.plan.mark:
            self.plan = plan  # other spares
        else:
            self.whole = False
            self._adopt(plan, now)

    def _adopt(self, plan: Plan, now: float) -> None:
        """Go by a new plan."""
        self.plan = plan
        mine = self.seats
        self._ordered = {stage: order for stage, order in self._ordered.items() if stage in mine}
        for stage in mine:
            seat = plan.seats[stage]
            if stage in self.live and seat.sources in ((), self._built.get(stage)):
                self._say_ready(stage, None)
                continue
            if not seat.sources:
                self._out.send(self._lead_link, Unable(plan.mark, stage, "it is not here any more"))
                continue
            order = TakeSeat(stage, seat.layers, seat.sources)
            if self._ordered.get(stage) != order:
                self.live.pop(stage, None)
                self._ordered[stage] = order
                self._out.do(order)
        self._drop_strangers()
        self._connect_neighbours(now)

    def _say_ready(self, stage: int, source: Source | None) -> None:
        assert self.plan is not None
        ready = Ready(self.plan.mark, stage, self.live[stage], source)
        if self.lead is not None:
            self.lead.ready(self.post.me, ready)
        else:
            self._out.send(self._lead_link, ready)

    def _leave_others(self) -> None:
        """Stages that were kept for whoever has taken them over."""
        for stage in [stage for stage in self.live if stage not in self.seats]:
            del self.live[stage]
            self._built.pop(stage, None)
            self._out.do(LeaveSeat(stage))

    def _lead_lost(self, why: str, now: float) -> None:
        peer = self._lead_link.peer if self._lead_link else ""
        self._lead_link, self.role, self.whole = None, "seeks", False
        self._out.say(f"the lead of crew {self.post.crew} is lost (peer {short(peer)}: {why})")
        self._lost = peer
        self._queue = [peer]
        if self.plan is not None and self.plan.lead == peer:
            self._queue += succession([seat.peer for seat in self.plan.seats], self.plan.spares)
        for guest in self._guests:
            self._out.send(guest, Answer("", self.term, self._may_lead))

    # ----------------------------------------------------------------- neighbours

    def _neighbours(self) -> dict[str, bool]:
        """Peers whose stages talk to this peer's without the lead -> whether this one opens the channel: whoever holds
        the higher stage does."""
        plan, mine = self.plan, self.seats
        if plan is None or not mine or plan.lead == self.post.me:
            return {}
        near = {
            seat.peer
            for stage, seat in enumerate(plan.seats)
            if min(abs(stage - own) for own in mine) <= self.post.reach
        }
        return {peer: max(mine) > max(plan.held_by(peer)) for peer in sorted(near - {self.post.me, plan.lead})}

    def _connect_neighbours(self, now: float) -> None:
        for peer, opens in self._neighbours().items():
            waits = self._redial.get(peer, now) > now
            if opens and not waits and peer not in self._stage_links and self.role == "follows":
                self._redial[peer] = now + REDIAL_S
                link = self._stage_links[peer] = Link(peer, STAGE_METHOD, dialled=True)
                self._connect(link)

    def _drop_strangers(self) -> None:
        """Channels with peers that are no neighbours: a few may be early."""
        neighbours = self._neighbours()
        others = [link for peer, link in self._stage_links.items() if peer not in neighbours]
        for link in others:
            if link.dialled or len(others) > MAX_GUESTS:
                del self._stage_links[link.peer]
                self._close(link)

    def _neighbour_lost(self, link: Link, why: str, refused: bool) -> None:
        if self._stage_links.get(link.peer) is link:
            del self._stage_links[link.peer]
            if link.peer in self._neighbours() and self.plan is not None and self.role == "follows":
                self._out.send(self._lead_link, Broken(self.plan.mark, link.peer, _line(why), refused))

    # ----------------------------------------------------------------- leading

    def _take_lead(self, now: float) -> None:
        succeeds = bool(self._lost and self.plan is not None)
        self.term = self.term + 1 if succeeds else max(1, self.term)
        hello = self._hello()
        self.lead = Lead(
            self.post,
            hello,
            self.plan,
            self._lost,
            self.term,
            self._sources,
            self._tell,
            self._costs,
            self._out,
            now,
        )
        self.role, self._queue, self._lost, self.whole = "leads", [], "", False
        self._asked.clear()
        self._stop_asking()
        for peer in list(self._stage_links):  # from now on they come over the channels to the lead
            self._close(self._stage_links.pop(peer))
        self._out.say(f"this node leads crew {self.post.crew} now")
        self._out.do(TakeLead(self.term))
        guests, self._guests = self._guests, {}
        for link, greeting in guests.items():
            self._greeted(link, greeting, now)

    def _greeted(self, link: Link, hello: Hello, now: float) -> None:
        problem = self._objection(hello)
        if problem is not None:
            reason, detail = problem
            self._out.counts[f"refused/{reason}"] += 1
            self._out.say_once(f"peer {short(link.peer)} is refused in crew {self.post.crew}: {detail}")
            self._out.send(link, Refusal(reason, detail))
            self._parting[link] = now + PART_S
        elif self.lead is None:
            if len(self._guests) >= MAX_GUESTS:
                self._close(link)
                return
            if link is self._trying:  # each gave way to the other
                self._trying = None
            self._guests[link] = hello
            known = self._lead_link.peer if self._lead_link is not None else ""
            self._out.send(link, Answer(known, self.term, self._may_lead))
        elif hello.leads:
            self._meet(link, hello, now)
        else:
            self._rivals.pop(link, None)
            self.lead.join(link, hello, now)

    def _objection(self, hello: Hello) -> tuple[str, str] | None:
        """Why somebody cannot be in this crew."""
        post = self.post
        spans = self.plan.spans if self.plan else post.spans
        if hello.swarm != post.swarm:
            return "swarm", "it is of another swarm"
        if hello.crew != post.crew:
            return "crew", f"it is of crew {hello.crew}"
        if hello.architecture != post.architecture:
            return "model", "it has another model"
        if hello.stages != len(post.spans):
            return "stages", f"it has {hello.stages} stages, here are {len(post.spans)}"
        if hello.wanted is not None and hello.wanted >= hello.stages:
            return "stages", f"it wants stage {hello.wanted} of {hello.stages}"
        if self.lead is not None and hello.spans and hello.spans != spans:
            return "span", "the layers of its stages are others"
        return None

    def _refuse_card(self, peer: str, reason: str) -> None:
        what = {"model": "another model", "stages": "another number of stages"}[reason]
        if self._out.say_once(f"peer {short(peer)} is left out of crew {self.post.crew}: it has {what}"):
            self._out.counts[f"refused/{reason}"] += 1

    def _look_for_rivals(self, now: float) -> None:
        assert self.lead is not None
        known = {link.peer for link in self._rivals} | self.lead.members.keys()
        for peer, card in self._cards.items():
            if 0 in card.seats and peer not in known and self._avoid.get(peer, now) <= now:
                self._avoid[peer] = now + AVOID_S
                link = Link(peer, CREW_METHOD, dialled=True)
                self._rivals[link] = True
                self._connect(link)
                self._out.send(link, self._hello())

    def _meet(self, link: Link, hello: Hello, now: float) -> None:
        """Another lead: the lower peer id of the two decides."""
        assert self.lead is not None
        said, self._rivals[link] = self._rivals.get(link, False), True
        if self.post.me > link.peer:
            if not said:
                self._out.send(link, self._hello())
            return
        theirs = Standing(hello.term, hello.updates, hello.started, link.peer)
        if gives_way(self.lead.standing, theirs) == self.post.me:
            self._give_way(link, now)
        else:
            self._out.send(link, Answer(self.post.me, self.term))

    def _give_way(self, link: Link, now: float) -> None:
        assert self.lead is not None
        self._out.say(f"peer {short(link.peer)} leads crew {self.post.crew} too, and stands higher: it is followed")
        self._out.counts["gave_way"] += 1
        for member in self.lead.members.values():
            if member.link is not None:
                self._out.send(member.link, Answer(link.peer, self.term))
                self._parting[member.link] = now + PART_S
        self._rivals.pop(link, None)
        for other in list(self._rivals):
            self._close(other)
        self.lead, self.role, self.whole = None, "seeks", False
        self._out.do(LeaveLead())
        self._trying, self._until = link, now + UNDECIDED_S
        self._out.send(link, self._hello())

    # ----------------------------------------------------------------- channels

    def _connect(self, link: Link) -> None:
        self._links.add(link)
        self._out.do(Connect(link))

    def _close(self, link: Link) -> None:
        if link in self._links:
            self._forget(link)
            self._out.do(Close(link))

    def _forget(self, link: Link) -> None:
        self._links.discard(link)
        self._hoping.pop(link, None)
        self._guests.pop(link, None)
        self._rivals.pop(link, None)
        self._parting.pop(link, None)


def _line(text: str) -> str:
    """As it may be sent."""
    return "".join(letter if " " <= letter <= "~" else "?" for letter in text[:MAX_REASON_CHARS])
