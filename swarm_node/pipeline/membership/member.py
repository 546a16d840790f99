"""A peer's part in its crew, as a state machine: finds the lead, follows it, succeeds it, is it.

             no lead for FIND_S, or wants stage 0
    seeks ----------------------------------------> leads        `leader.Leaderer`: who is there, who holds what
      |  ^ \\______ first in line, lead lost _______/^ |
      |  |  lead lost, or leads no more               | | another lead of this crew stands higher,
      v  +--------------------------------------------|-+ or it cannot hold stage 0
    follows: Hello -> Answer -> Plan -> BuildStage ... Ready

Whom a seeker asks: see `seeking`. Of two leads the one with the lower peer id decides who gives way, so that both
cannot. A lead calls on everybody of the crew who has not come, so that two that began at once, or a newcomer that has
not seen it, need not wait for new cards.

Nothing is believed of a peer that has not proved to know the crew's name: with its Hello, if it opened the channel,
else with its Answer.

No thread, no clock, no network: events come in with `now` (seconds, of any clock), actions are returned.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from enum import StrEnum

import msgspec

from protocol.codec import version_for
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
from protocol.lineage import leads_to
from protocol.messages import CrewCard, PeerCard
from swarm_node.install import upgrade_command
from swarm_node.pipeline.compute.fingerprint import difference
from swarm_node.pipeline.membership.actions import (
    Action,
    ActionQueue,
    BuildStage,
    Costs,
    DropStage,
    Link,
    PeerSpec,
    Sources,
    StartLeading,
    StopLeading,
    Tell,
)
from swarm_node.pipeline.membership.channels import PART_S, STRANGER_S, Channels
from swarm_node.pipeline.membership.leader import BANNED_S, MAX_TERM, Leader, counted, short
from swarm_node.pipeline.membership.leader_search import AVOID_S, VOUCHED_S, LeaderSearch
from swarm_node.pipeline.membership.placement import Standing, adjacent, gives_way, succession

MAX_GUESTS = 32
"""Peers of the crew that wait here while it has no lead."""
MAX_CALLS = 8
"""Peers that a lead calls on at a time."""
MAX_NAMES = 512
"""Peers whose names are remembered."""
NOTHING = Holding()
NAMELESS = "it does not know the crew's name"


class Role(StrEnum):
    """What this peer is in its crew."""

    SEEKING = "seeking"
    FOLLOWING = "following"
    LEADING = "leading"


class Membership:
    """This peer in its crew."""

    def __init__(
        self,
        spec: PeerSpec,
        sources: Sources,
        tell: Tell,
        costs: Costs,
        now: float,
        holding: Holding = NOTHING,
        held_s: Callable[[], float] = float,
    ) -> None:
        """`holding`: checkpoints of earlier runs. `held_s` = seconds that the oldest message here has been waiting, or
        that nothing has been done about stages that are to be built."""
        self.spec = spec
        self.role: Role = Role.SEEKING
        self.lead: Leader | None = None
        self.plan: Plan | None = None
        """The last that this peer went by."""
        self.term = 0
        self.whole = False
        """All stages of the plan are held, as far as this peer knows."""
        self.live: dict[int, int] = {}
        """Stages in memory here -> their updates."""
        self.run = spec.run
        """Of which this peer's stages, replicas and checkpoints are."""
        self.progress = Progress(spec.round, 0.0) if spec.round else None
        """Of the run, as the lead last told."""
        self.missing: dict[int, float] = {}
        """Stages that are lost, as far as this peer knows, until the crew is whole again -> since when."""
        self.names: dict[str, str] = {}
        """What peers of the crew call themselves, latest last."""
        self._holding = holding
        self._sources = sources
        self._tell = tell
        self._costs = costs
        self._held_s = held_s
        self._out = ActionQueue()
        self._channels = Channels(self._out, self._gone)
        self._search = LeaderSearch(spec, self._channels, self._out, now)
        self._members: Mapping[str, PeerCard] = {}
        """Of the swarm, as last looked up."""
        self._cards: dict[str, CrewCard] = {}
        """Of other peers of this crew."""
        self._ordered: dict[int, BuildStage] = {}
        """Stages that are being built."""
        self._built: dict[int, tuple[Source, ...]] = {}
        """Sources that were given for those that have been."""
        self.unsaid: dict[int, Source | None] = {}
        """Stages that are ready, and how they were come by: the lead is told when neighbours can be talked to."""
        self._planned_at = now
        self.leader_link: Link | None = None
        """The channel with the lead that this peer follows."""
        self._severed: set[str] = set()
        """Neighbours that were lost since the last plan."""
        self._guests: dict[Link, Hello] = {}
        self._rivals: dict[Link, bool] = {}
        """Channels from lead to lead, as far as is known; whether this one has said Hello."""
        self._called: dict[str, float] = {}
        """Whom this lead has called on -> when it may again."""
        self._barred = False
        """It could not hold stage 0, and does not try again before ..."""
        self._barred_until = now

    # ----------------------------------------------------------------- what is known

    @property
    def counts(self) -> Mapping[str, int]:
        """`lost`, `recovered/<way>`, `given_up`, `unable`, `stuck`, `stray`, `refused/<reason>`: running totals."""
        return self._out.counts

    @property
    def stages(self) -> tuple[int, ...]:
        """Stages of this peer."""
        return self.plan.held_by(self.spec.me) if self.plan else ()

    @property
    def card(self) -> CrewCard:
        """For the membership card: the lead shows stage 0 as soon as it leads, others what they have in memory."""
        mine = {stage for stage in self.stages if stage in self.live and stage > 0}
        seats = tuple(sorted(mine | {0} if self.role == Role.LEADING else mine))
        return CrewCard(self.spec.id, self.spec.architecture, len(self.spec.spans), seats, self.term)

    def way_to(self, stage: int) -> Link | None:
        """The channel to whoever holds `stage` (-1 = the lead); `None` if there is none, or it is this peer."""
        if self.plan is None:
            return None
        peer = self.plan.lead if stage < 0 else self.plan.assignments[stage].peer
        if self.role == Role.LEADING:
            return self.lead.link_of(peer) if self.lead else None
        return self.leader_link if peer == self.plan.lead else self._channels.neighbours.get(peer)

    @property
    def building(self) -> bool:
        """Stages are to be built here."""
        return bool(self._ordered)

    def stands(self, order: BuildStage) -> bool:
        """Whether a stage is still to be built, and so."""
        return self._ordered.get(order.stage) == order

    # ----------------------------------------------------------------- events

    def cards(self, members: Mapping[str, PeerCard], now: float) -> list[Action]:
        """Members of the swarm, as last looked up."""
        self._search.look(bool(members), now)
        self._members, self._cards, mine = members, {}, self.spec.id
        for peer, card in members.items():
            if card.crew is None or peer == self.spec.me:
                continue
            if card.crew.id != mine:
                self._note_other(card.crew)
            elif card.crew.architecture != self.spec.architecture:
                self._refuse_card(peer, "model", difference(self.spec.architecture, card.crew.architecture))
            elif card.crew.count != len(self.spec.spans):
                self._refuse_card(peer, "stages", "another number of stages")
            else:
                self._cards[peer] = card.crew
        return self._settle(now)

    def opened(self, link: Link, now: float) -> list[Action]:
        """A peer has opened a channel."""
        self._channels.opened(link, now)
        self._channels.tidy(self._neighbours(), now)
        return self._settle(now)

    def heard(self, link: Link, record: Record, now: float) -> list[Action]:
        """A record has come over a channel."""
        if link.method != CREW_METHOD:
            self._out.counts["stray"] += 1
        elif link in self._channels:
            self._heard(link, record, now)
        return self._settle(now)

    def closed(self, link: Link, why: str, now: float) -> list[Action]:
        """A channel has ended, or could not be opened."""
        if link in self._channels:
            self._channels.forget(link)
            if link.method == STAGE_METHOD:
                self._neighbour_lost(link, why, refused=False)
            else:
                self._ended(link, why, now)
        return self._settle(now)

    def refused(self, link: Link, reason: str, now: float, ended: bool = True) -> list[Action]:
        """What a peer said of its stage's work is nothing that anybody takes: this peer has done with it; but if it is
        the lead, and the channel has not `ended`, only with what was under way."""
        self._out.counts[f"refused/{reason}"] += 1
        if link is self.leader_link and not ended and self.plan is not None:
            self._out.send(link, Broken(self.plan.mark, link.peer, _line(reason), refused=True))
        elif link in self._channels:
            self._channels.close(link)
            if link.method == STAGE_METHOD:
                self._neighbour_lost(link, reason, refused=True)
            elif link is self.leader_link:
                self._leader_lost(f"what it says is refused: {reason}", now)
            elif self.lead is not None and self.lead.link_of(link.peer) is link:
                self.lead.give_up(link.peer, f"what it says is refused: {reason}", now)
        return self._settle(now)

    def unspoken(self, link: Link, why: str, now: float) -> list[Action]:
        """A peer says Hello in a version of the protocol that is not read here; its channel ends."""
        self._out.counts["refused/version"] += 1
        upgrade = f"to upgrade this node, if it is the older one: {upgrade_command()}"
        self._out.say_of_peer(f"peer {short(link.peer)} is not heard in crew {self.spec.crew}: {why}; {upgrade}")
        return self._settle(now)

    def unsent(self, mark: int, peer: str, now: float) -> list[Action]:
        """By the plan of that mark, there was no channel for a message to a neighbour: what is under way would wait for
        it."""
        if (
            self.plan is not None
            and self.plan.mark == mark
            and self.role == Role.FOLLOWING
            and peer in self._neighbours()
        ):
            self._break_with(peer, "there is no channel", refused=False)
        return self._settle(now)

    def seated(self, order: BuildStage, updates: int, source: Source | None, now: float) -> list[Action]:
        """A stage that was to be built is here."""
        stage, present = order.stage, self._ordered.get(order.stage)
        same = present is not None and present.layers == order.layers and source == present.sources[0]
        if present is not None and (present == order or same):
            del self._ordered[stage]
            self.live[stage] = updates
            self._built[stage] = present.sources
            self._say_ready(stage, source)
        elif present is None:  # else it is built once more
            self.live.pop(stage, None)
            self.unsaid.pop(stage, None)
            self._out.do(DropStage(stage))
        return self._settle(now)

    def unable(self, order: BuildStage, why: str, now: float) -> list[Action]:
        """A stage that was to be built cannot be; whoever cannot hold the first does not lead for a while."""
        if self.stands(order) and self.plan is not None:
            del self._ordered[order.stage]
            line = _line(why)
            if self.lead is None:
                self._out.send(self.leader_link, Unable(self.plan.mark, order.stage, line))
            elif order.stage:
                self.lead.unable(self.spec.me, order.stage, line, now)
            else:
                self._resign(line, now)
        return self._settle(now)

    def report(self, holding: Holding, now: float) -> list[Action]:
        """What this peer has: updates of its stages (those it was not told to leave), replicas, checkpoints."""
        self.live |= {kept.stage: kept.updates for kept in holding.live if kept.stage in self.live}
        self._holding = holding
        if self.lead is not None:
            self.lead.note(self.spec.me, self.holding, self.run)
        elif self.role == Role.FOLLOWING:
            self._out.send(self.leader_link, Report(self.holding, self.run))
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
        self._search.look(False, now)
        if self.lead is not None:
            self.lead.watch_builders(now)
            if waiting_since is not None:
                self.lead.watch(now, waiting_since)
        self._tend_channels(now)
        return self._settle(now)

    @property
    def holding(self) -> Holding:
        live = tuple(Kept(stage, updates) for stage, updates in sorted(self.live.items()))
        return msgspec.structs.replace(self._holding, live=live)

    # ----------------------------------------------------------------- the rest is how

    def _ended(self, link: Link, why: str, now: float) -> None:
        """A channel with the lead, or with whom it might be, or with a member, is no more."""
        if link in self._search:
            self._search.unreached(link, now)
        elif link is self.leader_link:
            self._leader_lost(why, now)
        elif self.lead is not None:
            self.lead.left(link, why, now)

    def _settle(self, now: float) -> list[Action]:
        """Do what follows from what is known now."""
        if self.role == Role.SEEKING:
            self._seek(now)
        if self.lead is not None:
            self._look_for_rivals(now)
            plan = self.lead.arrange(now)
            if plan is not None:
                first = self.plan is None or self.plan.term != plan.term
                self.term = plan.term
                self._adopt(plan, now)
                if first:
                    self._go_on_from(self.lead.round)
            self.plan = self.lead.plan or self.plan
            if self.lead.whole and not self.whole:
                self._leave_others()
            self.whole = self.lead.whole
        if self.unsaid:
            self._say_what_is_ready(now)
        self.missing = {stage: self.missing.get(stage, now) for stage in self._lost()}
        return self._out.take()

    def _lost(self) -> set[int]:
        if self.lead is not None:
            vacant = {stage for stage, peer in enumerate(self.lead.seats) if not peer}
            return set() if self.lead.whole else vacant | self.lead.lost
        if self.plan is None:
            return set()
        if self.role == Role.SEEKING:
            return set(self.plan.held_by(self.plan.lead))
        return {
            stage
            for stage, seat in enumerate(self.plan.assignments)
            if seat.peer in self._severed or (seat.sources and not self.whole)
        }

    def taker(self, stage: int) -> str:
        """Of a stage that is missing: who is building it; empty = nobody is yet."""
        if self.plan is None or self.role == Role.SEEKING:
            return ""
        if self.lead is not None:
            return self.lead.seats[stage]
        seat = self.plan.assignments[stage]
        return seat.peer if seat.sources and not self.whole else ""

    @property
    def absent(self) -> set[str]:
        """At the lead: peers whose cards are of this crew, but who are not in touch with it (any more)."""
        return set() if self.lead is None else self._cards.keys() - self.lead.members.keys()

    def _heard(self, link: Link, record: Record, now: float) -> None:
        match record:
            case Hello():
                self._greeted(link, record, now)
            case Answer():
                self._answered(link, record, now)
            case Refusal():
                self._refused_by(link, record, now)
            case Plan() if link is self.leader_link:
                self._follow(link, record, now)
            case Whole(plan=mark) if link is self.leader_link:
                if self.plan is not None and mark == self.plan.mark:
                    self.whole = True
                    self._leave_others()
            case Progress() if link is self.leader_link:
                self.progress = record
            case Probe(plan=mark) if link is self.leader_link:
                self._out.send(link, Load(mark, max(0.0, self._held_s())))
            case _ if self.lead is not None:
                self.lead.heard(link, record, now)
            case _:
                self._out.counts["stray"] += 1

    # ----------------------------------------------------------------- seeking

    def _seek(self, now: float) -> None:
        self._barred = self._barred and now < self._barred_until
        while (peer := self._search.next(self._cards, self._may_lead, self._can_lead, now)) is not None:
            if peer == self.spec.me:
                self._take_lead(now)
                return
            self._out.send(self._search.dial(peer, now), self.hello(peer))

    @property
    def _may_lead(self) -> bool:
        """Who wants another stage than the first does not begin a crew, but goes on with one."""
        return not self._barred and (self.spec.wanted in (None, 0) or self.plan is not None)

    def _can_lead(self) -> bool:
        """There is room for stage 0 besides what this peer holds, and it has not failed to hold it."""
        if self._barred:
            return False
        costs = self._costs(self.plan.spans if self.plan else self.spec.spans)
        needed = sum(costs[stage] for stage in {0, *self.stages})
        if self.spec.capacity and needed > self.spec.capacity:
            room = f"{needed / 2**30:.2g} GiB, of {self.spec.capacity / 2**30:.2g} (stages.capacity_gb)"
            what = f"this machine has no room for stage 0 of crew {self.spec.crew}"
            self._out.say_once(f"{what} ({room}): another peer must lead")
            return False
        return True

    def hello(self, peer: str) -> Hello:
        """To somebody."""
        spec, lead = self.spec, self.lead
        holding = self.holding
        has_any = holding.live or holding.replicas or holding.checkpoints
        return Hello(
            protocol=version_for(peer, self._members),
            swarm=spec.swarm,
            crew=spec.id,
            proof=spec.proof_to(peer),
            architecture=spec.architecture,
            stages=len(spec.spans),
            name=spec.name,
            wanted=spec.wanted,
            leads=lead is not None,
            term=lead.won if lead else self.term,
            updates=lead.updates if lead else max(self.live.values(), default=0),
            started=spec.started,
            holding=holding,
            spans=(self.plan.spans if self.plan else spec.spans) if has_any else (),
            capacity=spec.capacity,
            run=self.run,
            round=self.progress.round if self.progress else 0,
        )

    def _answer(self, link: Link, lead: str) -> None:
        self._out.send(link, Answer(lead, self.spec.proof_to(link.peer), self.term, self._may_lead))

    def _answered(self, link: Link, answer: Answer, now: float) -> None:
        lead = answer.lead
        if not self.spec.is_proof_of(link.peer, answer.proof):
            self._unmask(link, now)
            return
        self._channels.trust(link)
        self._search.prove(link.peer)
        if self.lead is not None:
            if link in self._rivals and lead == link.peer:
                self._give_way(link, now)
            elif link in self._rivals:
                self._channels.close(link)
                if lead not in ("", self.spec.me):
                    self._call(lead, now)
        elif link is self.leader_link and lead != link.peer:  # it leads no more
            self.leader_link, self.role, self.whole = None, Role.SEEKING, False
            self._channels.close(link)
            self._search.begin("", [lead] if lead else self._succession(link.peer), now)
        elif self._search.told(link, answer, now):
            self.leader_link, self.role, self.term = link, Role.FOLLOWING, max(self.term, answer.term)
            for guest in self._guests:
                self._answer(guest, lead)

    def _refused_by(self, link: Link, refusal: Refusal, now: float) -> None:
        """Say so once; it is asked again, but rarely."""
        if not self.spec.is_proof_of(link.peer, refusal.proof):
            self._unmask(link, now)
            return
        self._out.say_of_peer(f"peer {short(link.peer)} of crew {self.spec.crew} refuses this one: {refusal.detail}")
        self._search.vouch(now)
        if link is self.leader_link:
            self.leader_link, self.role = None, Role.SEEKING
        self._shun(link, "it refuses this node", now)

    def _unmask(self, link: Link, now: float) -> None:
        """Its card is of this crew, or it says so, but it does not know the crew's name."""
        self._out.counts["refused/crew"] += 1
        self._out.say_of_peer(f"peer {short(link.peer)} is left out of crew {self.spec.crew}: {NAMELESS}")
        self._shun(link, NAMELESS, now)

    def _shun(self, link: Link, why: str, now: float) -> None:
        """Have nothing to do with a peer for a while."""
        self._channels.close(link)
        self._ended(link, why, now)
        self._search.shun(link.peer, now)

    # ----------------------------------------------------------------- following

    def _follow(self, link: Link, plan: Plan, now: float) -> None:
        ours = self.spec.spans
        if plan.lead != link.peer or len(plan.assignments) != len(ours) or plan.spans[-1][1] != ours[-1][1]:
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
        if self.plan is None or (self.plan.lead, self.plan.term, self.plan.run) != (plan.lead, plan.term, plan.run):
            self._built.clear()
        if plan.run != self.run:
            self._change_run(plan)
        self.plan = plan
        self._severed.clear()
        self._planned_at = now
        unsaid, self.unsaid = self.unsaid, {}
        mine = self.stages
        self._ordered = {stage: order for stage, order in self._ordered.items() if stage in mine}
        for stage in mine:
            seat = plan.assignments[stage]
            if stage in self.live and seat.sources in ((), self._built.get(stage)):
                self._say_ready(stage, unsaid.get(stage))
                continue
            if not seat.sources:
                self._ordered.pop(stage, None)
                self._out.send(self.leader_link, Unable(plan.mark, stage, "it is not here any more"))
                continue
            order = BuildStage(stage, seat.layers, seat.sources)
            if self._ordered.get(stage) != order:
                self.live.pop(stage, None)
                self._ordered[stage] = order
                self._out.do(order)
        self._tend_channels(now)

    def _change_run(self, plan: Plan) -> None:
        """What this peer has is of another run than the crew's, or of what that has gone on from. Of the rest, stages
        that it is to hold are built anew."""
        if not leads_to(self.run, plan.run):
            self.progress = Progress(0, 0.0)
            self._ordered.clear()
        self._holding = counted(self.holding, self.run, plan.run)
        self.run = plan.run
        for stage in self.live.keys() - {kept.stage for kept in self._holding.live}:
            del self.live[stage]
            if stage not in plan.held_by(self.spec.me):
                self._out.do(DropStage(stage))

    def _say_ready(self, stage: int, source: Source | None) -> None:
        assert self.plan is not None
        if self.lead is not None:
            self.lead.ready(self.spec.me, Ready(self.plan.mark, stage, self.live[stage], source))
        else:
            self.unsaid[stage] = source

    def _say_what_is_ready(self, now: float) -> None:
        """As soon as all neighbours can be talked to; whoever cannot be for long is told to the lead."""
        link, plan = self.leader_link, self.plan
        if self.role != Role.FOLLOWING or link is None or plan is None or plan.lead != link.peer:
            return
        unheard = self._neighbours().keys() - self._channels.neighbours.keys()
        if not unheard:
            for stage, source in self.unsaid.items():
                self._out.send(link, Ready(plan.mark, stage, self.live[stage], source))
            self.unsaid.clear()
        elif now >= self._planned_at + STRANGER_S:
            for peer in sorted(unheard):
                self._break_with(peer, "there is no channel", refused=False)

    def _leave_others(self) -> None:
        """Stages that were kept for whoever has taken them over."""
        for stage in [stage for stage in self.live if stage not in self.stages]:
            del self.live[stage]
            self._built.pop(stage, None)
            self._out.do(DropStage(stage))

    def _leader_lost(self, why: str, now: float) -> None:
        peer = self.leader_link.peer if self.leader_link else ""
        self.leader_link, self.role, self.whole = None, Role.SEEKING, False
        self._out.say(f"the lead of crew {self.spec.crew} is lost (peer {short(peer)}: {why})")
        self._search.begin(peer, [peer, *self._succession(peer)], now)
        for guest in self._guests:
            self._answer(guest, "")

    def _succession(self, lead: str) -> list[str]:
        """Who leads after it, first in line first."""
        if self.plan is None or self.plan.lead != lead:
            return []
        return succession([seat.peer for seat in self.plan.assignments], self.plan.spares)

    # ----------------------------------------------------------------- neighbours

    def _neighbours(self) -> dict[str, bool]:
        """Peers whose stages talk to this peer's without the lead -> whether this one opens the channel."""
        if self.plan is None:
            return {}
        reach = 2 if self.plan.settings.swap else 1
        return adjacent([seat.peer for seat in self.plan.assignments], self.spec.me, reach)

    def _tend_channels(self, now: float) -> None:
        neighbours = self._neighbours()
        self._channels.tidy(neighbours, now)
        if self.role == Role.FOLLOWING:
            self._channels.reach(neighbours, now)

    def _neighbour_lost(self, link: Link, why: str, refused: bool) -> None:
        in_use = self._channels.leave(link) and link.peer in self._neighbours()
        if in_use and self.role == Role.FOLLOWING:
            self._break_with(link.peer, why, refused)

    def _break_with(self, peer: str, why: str, refused: bool) -> None:
        """Tell the lead, once a plan."""
        if self.plan is not None and peer not in self._severed:
            self._severed.add(peer)
            self._out.send(self.leader_link, Broken(self.plan.mark, peer, _line(why), refused))

    # ----------------------------------------------------------------- leading

    def _take_lead(self, now: float) -> None:
        lost = self._search.lost
        self.term = min(self.term + 1, MAX_TERM)
        self.lead = Leader(
            self.spec,
            self.hello(self.spec.me),
            self.plan,
            lost,
            self.term,
            self._sources,
            self._tell,
            self._costs,
            self._out,
            now,
        )
        self.role, self.whole = Role.LEADING, False
        self._called.clear()
        self._search.end()
        self._out.say(f"this node leads crew {self.spec.crew} now")
        self._out.do(StartLeading())
        guests, self._guests = self._guests, {}
        for link, greeting in guests.items():
            self._greeted(link, greeting, now)

    def _greeted(self, link: Link, hello: Hello, now: float) -> None:
        problem = self._objection(link.peer, hello)
        known = problem is None or problem[0] not in ("swarm", "crew")
        if known:
            self._note_name(link.peer, hello.name)
            self._search.prove(link.peer)
        if problem is not None:
            reason, detail = problem
            self._out.counts[f"refused/{reason}"] += 1
            self._out.say_of_peer(f"peer {short(link.peer)} is refused in crew {self.spec.crew}: {detail}")
            self._out.send(link, Refusal(reason, detail, self.spec.proof_to(link.peer) if known else ""))
            self._guests.pop(link, None)
            self._channels.doubt(link, now + PART_S)
            self._ended(link, detail, now)
            return
        self._channels.trust(link)
        if self.lead is None:
            if len(self._guests) >= MAX_GUESTS:
                self._channels.close(link)
                return
            self._search.release(link)
            self._guests[link] = hello
            self._answer(link, self.leader_link.peer if self.leader_link is not None else "")
            if hello.leads and self.role == Role.SEEKING and self.plan is None:
                self._search.hear_of(link.peer, now)
        elif hello.leads:
            self._meet(link, hello, now)
        else:
            self._rivals.pop(link, None)
            self.lead.join(link, hello, now)
            if self.lead.plan is not None and self.progress is not None and self.lead.link_of(link.peer) is link:
                self._out.send(link, self.progress)

    def _note_name(self, peer: str, name: str) -> None:
        self.names.pop(peer, None)
        self.names[peer] = name
        if len(self.names) > MAX_NAMES:
            del self.names[next(iter(self.names))]

    def _objection(self, peer: str, hello: Hello) -> tuple[str, str] | None:
        """Why somebody cannot be in this crew."""
        spec = self.spec
        if hello.swarm != spec.swarm:
            return "swarm", "it is of another swarm"
        if hello.crew != spec.id or not spec.is_proof_of(peer, hello.proof):
            return "crew", NAMELESS
        if hello.architecture != spec.architecture:
            return "model", f"it has {difference(spec.architecture, hello.architecture)}"
        if hello.stages != len(spec.spans):
            return "stages", f"it has {hello.stages} stages, here are {len(spec.spans)}"
        if hello.wanted is not None and hello.wanted >= hello.stages:
            return "stages", f"it wants stage {hello.wanted} of {hello.stages}"
        if self.lead is not None and not self.lead.takes(hello.spans):
            return "span", "its files are of stages with other layers: it can take part with another --run-dir"
        return None

    def _note_other(self, crew: CrewCard) -> None:
        """A crew with another name; said only by whoever leads a crew that has not found together."""
        alike = (crew.architecture, crew.count) == (self.spec.architecture, len(self.spec.spans))
        if alike and self.lead is not None and self.plan is None:
            self._out.say_once(
                f"another crew of this policy is in the swarm: if it is the one that was meant, its name is not "
                f"{self.spec.crew}"
            )

    def _refuse_card(self, peer: str, reason: str, what: str) -> None:
        text = f"peer {short(peer)} of crew {self.spec.crew} has {what}: it and this node cannot hold one policy"
        if self._out.say_of_peer(text):
            self._out.counts[f"refused/{reason}"] += 1

    def _go_on_from(self, round: int) -> None:
        """This new lead and its members may have known it differently."""
        assert self.lead is not None
        self.progress = Progress(round, self.progress.reward if self.progress else 0.0)
        for member in self.lead.members.values():
            self._out.send(member.link, self.progress)

    def _look_for_rivals(self, now: float) -> None:
        assert self.lead is not None
        for peer in sorted(self._cards, key=lambda peer: 0 not in self._cards[peer].held):
            self._call(peer, now)

    def _call(self, peer: str, now: float) -> None:
        """Say Hello to somebody who may lead as well, or not know who does."""
        assert self.lead is not None
        called = self._called.get(peer, now) > now or any(link.peer == peer for link in self._rivals)
        if called or peer in self.lead.members or self._search.avoids(peer, now) or len(self._rivals) >= MAX_CALLS:
            return
        card = self._cards.get(peer)
        self._called[peer] = now + (VOUCHED_S if card is not None and 0 not in card.held else AVOID_S)
        if not self._search.knows(peer):
            self._search.doubt(peer, now)
        link = Link(peer, CREW_METHOD, dialled=True)
        self._rivals[link] = True
        self._channels.open(link)
        self._channels.doubt(link, now + STRANGER_S)
        self._out.send(link, self.hello(peer))

    def _meet(self, link: Link, hello: Hello, now: float) -> None:
        """Another lead: the lower peer id of the two decides."""
        assert self.lead is not None
        said, self._rivals[link] = self._rivals.get(link, False), True
        if self.spec.me > link.peer:
            if not said:
                self._out.send(link, self.hello(link.peer))
            return
        live = bool(hello.holding.live)  # what has no stage in memory was nobody's lead
        theirs = Standing(hello.term * live, hello.updates * live, hello.started, link.peer)
        if gives_way(self.lead.standing, theirs) == self.spec.me:
            self._give_way(link, now)
        else:
            self._answer(link, self.spec.me)

    def _give_way(self, link: Link, now: float) -> None:
        self._out.say(f"peer {short(link.peer)} leads crew {self.spec.crew} too, and stands higher: it is followed")
        self._out.counts["gave_way"] += 1
        self._rivals.pop(link, None)
        self._lead_no_more(link.peer, now)
        self._search.wait_for(link, now)
        self._out.send(link, self.hello(link.peer))

    def _resign(self, why: str, now: float) -> None:
        """Stage 0 cannot be held here: it is for the next in line."""
        self._out.say(f"this node cannot hold stage 0 of crew {self.spec.crew} ({why}): another peer must lead")
        self._out.counts["unable"] += 1
        self._barred, self._barred_until = True, now + BANNED_S
        self._lead_no_more("", now)
        self._search.begin("", self._succession(self.spec.me), now)

    def _lead_no_more(self, successor: str, now: float) -> None:
        assert self.lead is not None
        for member in self.lead.members.values():
            if member.link is not None:
                self._answer(member.link, successor)
                self._channels.part(member.link, now + PART_S)
        for other in list(self._rivals):
            self._channels.close(other)
        self.lead, self.role, self.whole = None, Role.SEEKING, False
        self._out.do(StopLeading())

    def _gone(self, link: Link) -> None:
        self._search.gone(link)
        self._guests.pop(link, None)
        self._rivals.pop(link, None)


def _line(text: str) -> str:
    """As it may be sent."""
    return "".join(letter if " " <= letter <= "~" else "?" for letter in text[:MAX_REASON_CHARS])
