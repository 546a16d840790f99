"""What the lead of a crew does: who is there, who holds what, when the pipeline is whole.

    a peer joins, leaves, fails ----> seats by stage, some of them vacant
    arrange:  vacant -> a spare, at once -> after `spare_wait_s` a neighbour -> wait, and say so
              all seats taken, and changed -> Plan to all -> Ready of every stage -> Whole to all

A new lead of an old crew first waits until those whom the last plan names have come, or `GATHER_S` have passed, so that
whoever lives keeps its stage. One that has nothing goes on with the run of the first that has something; its first
plan begins a segment of that run (`protocol.lineage`), and what is held of others counts only up to where they forked.
A crew that never was whole waits until there are as many peers as stages; if one of them has no room for an equal
share, the layers are divided by memory, unless somebody has files of stages already.
Pure: `now` (seconds, of any clock) comes in, actions go to the queue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_high

import msgspec

from protocol.crew import (
    MAX_MEMBERS,
    MAX_SOURCES,
    Answer,
    Assignment,
    Broken,
    Hello,
    Holding,
    Kept,
    Load,
    Plan,
    Probe,
    Ready,
    Record,
    Refusal,
    Report,
    Source,
    Unable,
    Whole,
)
from protocol.lineage import AHEAD, Lineage, branch, leads_to, shared
from swarm_node.pipeline.membership.actions import (
    ActionQueue,
    Close,
    Costs,
    Link,
    PeerSpec,
    Sources,
    Spans,
    Tell,
)
from swarm_node.pipeline.membership.placement import Claim, Standing, fill, neighbour, relief

GATHER_S = 10.0
"""How long a new lead waits for the peers of the last plan: each may need 4 s to notice that the old lead has gone, and
3 s to ask whether it has."""
AGAIN_S = 2.0
"""Between two plans that only begin anew."""
BREAKS_S = 20.0
"""A peer that keeps losing touch with a neighbour for so long is given up; had the neighbour gone, that would be known
much sooner."""
CALM_S = 30.0
"""After so long without a break all is well again: a channel that cannot be opened may take ten seconds to say so."""
BANNED_S, MAX_DOUBLINGS = 120.0, 5
"""A peer that was given up is not taken back before; the next time, not for twice as long, and so on."""

MAX_TERM = 2**20
"""Leads that a crew can count: `Membership`'s turns would not fit into messages otherwise."""


@dataclass
class Member:
    """A peer of the crew, as the lead knows it."""

    arrived: int
    link: Link | None
    """`None` = the lead itself."""
    hello: Hello
    holding: Holding
    unable: set[int] = field(default_factory=set)
    """Stages that it could not build, or not in time."""
    astray: bool = False
    """Its stages went on without this crew: what it has in memory is another branch of the run."""
    probed: float | None = None
    """When it was asked how long a message has been waiting, if it has not answered."""

    @property
    def live(self) -> dict[int, int]:
        return {kept.stage: kept.updates for kept in self.holding.live}


def counted(holding: Holding, theirs: Lineage, ours: Lineage) -> Holding:
    """What of it, being of the run `theirs`, is also of `ours`. Stages that went on elsewhere have heard turns that the
    crew's have not: none of them counts."""
    upto, onward = shared(theirs, ours), leads_to(theirs, ours)
    most = upto + AHEAD if onward else upto
    return Holding(
        live=tuple(kept for kept in holding.live if onward and kept.updates <= most),
        replicas=tuple(kept for kept in holding.replicas if kept.updates <= most),
        checkpoints=tuple(kept for kept in holding.checkpoints if kept.updates <= upto),
    )


def short(peer: str) -> str:
    """A peer, for people."""
    return f"…{peer[-8:]}"


class Leader:
    """The lead's view of its crew."""

    def __init__(
        self,
        spec: PeerSpec,
        hello: Hello,
        plan: Plan | None,
        lost: str,
        term: int,
        sources: Sources,
        tell: Tell,
        costs: Costs,
        queue: ActionQueue,
        now: float,
    ) -> None:
        """`plan` is the last that this peer went by, `lost` its lead, if that has gone."""
        self.spec = spec
        self.term = term
        self.plan: Plan | None = None
        self.settings = plan.settings if plan else spec.settings
        self.spans = plan.spans if plan else spec.spans
        self.costs = costs(self.spans)
        self._cut = bool(plan or hello.spans)
        """Somebody has stages, or files of them, with just these layers."""
        self._cost = costs
        self._tried: list[float] = []
        """Capacities by which it was last tried to divide layers."""
        self.seats = [seat.peer for seat in plan.assignments] if plan else [""] * len(spec.spans)
        self.members = {spec.me: Member(0, None, hello, hello.holding)}
        self.whole = False
        self.won = 0
        """Last term in which the crew was whole."""
        self._reached = 0
        """Updates that the run had made, as far as is known, when the last plan was made."""
        self.run = self._base = hello.run
        """Of which they are; until its first plan, that which it goes on from."""
        self.lost: set[int] = set()
        """Stages lost since `resume`; none if only messages were; and why."""
        self.why = ""
        self._sources = sources
        self._tell = tell
        self._out = queue
        self._before = plan
        self._number = plan.number if plan else 0
        self._awaited = {*self.seats, *plan.spares} - {lost, spec.me, ""} if plan else set()
        self._gather_until = now + GATHER_S
        self._arrivals = 0
        self._vacant_since: dict[int, float] = {}
        self._ready: set[int] = set()
        self._anew = ""
        """Why what is under way must begin anew although nobody is lost; empty = it need not."""
        self._anew_at = now
        self._breaks: dict[str, tuple[float, float]] = {}
        """First and last time in a row that a peer lost touch with a neighbour."""
        self._banned: dict[str, float] = {}
        self._bans: Counter[str] = Counter()
        self._issued_at = now
        self._held_by_nobody: set[str] = set()
        """What was said of stages that nobody holds."""
        for stage, peer in enumerate(self.seats):
            if peer in ("", lost) or (stage == 0 and peer != spec.me):
                self._vacate(stage, now)
                if plan:
                    self._out.counts["lost"] += 1
                    self.lost.add(stage)
                    self.why = "its peer has gone"
        self.seats[0] = spec.me

    # ----------------------------------------------------------------- what it knows

    @property
    def me(self) -> str:
        return self.spec.me

    @property
    def updates(self) -> int:
        """That the crew has made: what most of its stages say, so that one cannot make it up; but if any is in memory,
        not fewer than when its run last branched, however many had to begin anew."""
        live = [self.members[peer].live.get(i) for i, peer in enumerate(self.seats) if peer in self.members]
        counts = [n for n in live if n is not None]
        return max(median_high(counts), self.run[-1][1] if self.run else 0) if counts else 0

    @property
    def round(self) -> int:
        """How far the run is, as those say who have a stage of it, or else something of it."""
        ours = [member for member in self.members.values() if leads_to(member.hello.run, self._base)]
        told = [member for member in ours if member.holding.live] or [m for m in ours if m.holding != Holding()]
        told += [self.members[self.me]] if self._before and leads_to(self._before.run, self._base) else []
        return max((member.hello.round for member in told), default=0)

    @property
    def standing(self) -> Standing:
        return Standing(self.won, self.updates, self.spec.started, self.me)

    @property
    def spares(self) -> list[str]:
        """Members without a stage, in order of arrival."""
        return sorted(self.members.keys() - set(self.seats), key=lambda peer: self.members[peer].arrived)

    @property
    def _formed(self) -> bool:
        """There has been a policy, which goes on."""
        return bool(self.plan or self._before or any(member.holding.live for member in self.members.values()))

    def takes(self, spans: Spans) -> bool:
        """Whether somebody whose stages have these layers can be in this crew."""
        ends = len(spans) == len(self.spans) and spans[-1][1] == self.spans[-1][1]
        return not spans or spans == self.spans or (ends and not self._cut)

    def note(self, peer: str, holding: Holding, run: Lineage) -> None:
        """What a member has, of that run."""
        member = self.members[peer]
        member.hello = msgspec.structs.replace(member.hello, holding=holding, run=run)
        member.holding = self._held(member)

    def _held(self, member: Member) -> Holding:
        """What of it counts."""
        holding = counted(member.hello.holding, member.hello.run, self.run)
        return msgspec.structs.replace(holding, live=()) if member.astray else holding

    def resume(self) -> None:
        """What was lost is known, and the pipeline is used anew."""
        self.lost, self.why = set(), ""

    def link_of(self, peer: str) -> Link | None:
        return self.members[peer].link if peer in self.members else None

    # ----------------------------------------------------------------- who comes and goes

    def join(self, link: Link, hello: Hello, now: float) -> None:
        """A peer joins, or comes back; whoever is still registered for a stage, and still has it, keeps it."""
        peer = link.peer
        if self._banned.get(peer, now) > now:
            self._out.counts["refused/stall"] += 1
            self._out.send(link, Refusal("stall", "given up a moment ago", self.spec.proof_to(peer)))
            return
        old = self.members.get(peer)
        if old is not None and old.link is not None and old.link is not link:
            self._out.do(Close(old.link))
        self._arrivals += 1
        arrived = self._arrivals if old is None else old.arrived
        self._choose_run(hello)
        member = self.members[peer] = Member(arrived, link, hello, Holding())
        member.astray = self.won > 0 and hello.term > self.term
        member.holding = self._held(member)
        self._awaited.discard(peer)
        self._outrank(member)
        if hello.spans and not self._cut:
            self.spans, self.costs, self._cut = hello.spans, self._cost(hello.spans), True
        self._out.send(link, Answer(self.me, self.spec.proof_to(peer), self.term))
        for stage in [stage for stage, holder in enumerate(self.seats) if holder == peer]:
            if stage not in member.live:
                self._lose(stage, f"peer {short(peer)} has come back without it", now)
            elif old is not None:
                self.begin_anew(f"peer {short(peer)} has come back")
        if self.plan is not None and self.plan.held_by(peer) == ():
            self._out.send(link, self.plan)
            if self.whole:
                self._out.send(link, Whole(self.plan.mark))
        self._say_claim(peer, hello)

    def _choose_run(self, hello: Hello) -> None:
        """Before there is a plan: that of who has a stage in memory, else of who has anything; the lead's own first,
        and one that goes on from it before that."""
        if self.plan is not None or hello.run == self.run:
            return
        theirs, ours = hello.holding, [member.holding for member in self.members.values()]
        live, onward = any(holding.live for holding in ours), leads_to(self.run, hello.run)
        better = (theirs.live and (onward or not live)) or (
            theirs != Holding() and ((onward and not live) or all(holding == Holding() for holding in ours))
        )
        if better and (onward or not self._awaited):
            self.run = self._base = hello.run
            for member in self.members.values():
                member.holding = self._held(member)
                self._outrank(member)

    def _outrank(self, member: Member) -> None:
        """Before there is a plan: its stages may have heard turns of their lead."""
        if member.live and member.link is not None and self.plan is None:
            self.term = min(max(self.term, member.hello.term + 1), MAX_TERM)

    def _say_claim(self, peer: str, hello: Hello) -> None:
        """Two peers want one stage: one of them is a spare."""
        stage = hello.wanted
        if stage is None or self.seats[stage] in ("", peer) or self.seats.count(self.seats[stage]) > 1:
            return  # whoever holds several will pass one on
        first = self._out.say_of_peer(
            f"peer {short(peer)} wants stage {stage} of crew {self.spec.crew}, which {short(self.seats[stage])} holds: "
            "it takes another as soon as one is free"
        )
        self._out.counts["refused/claim"] += first

    def left(self, link: Link, why: str, now: float) -> None:
        """A channel to a member ended: with it all stages of that member are lost."""
        peer = link.peer
        member = self.members.get(peer)
        if member is None or member.link is not link:
            return
        del self.members[peer]
        held = [stage for stage, holder in enumerate(self.seats) if holder == peer]
        if held and self._flaps(peer, now):
            self._banned[peer] = max(now + BANNED_S, self._banned.get(peer, now))
        for stage in held:
            self._lose(stage, f"peer {short(peer)}: {why}", now)

    def give_up(self, peer: str, why: str, now: float) -> None:
        """A member that lives, but is of no use."""
        member = self.members[peer]
        if member.link is None:
            return
        self._banned[peer] = now + BANNED_S * 2 ** min(self._bans[peer], MAX_DOUBLINGS)
        self._bans[peer] += 1
        self._out.counts["given_up"] += 1
        self.left(member.link, why, now)
        self._out.do(Close(member.link))

    def doubt(self, stages: Collection[int], why: str, now: float) -> None:
        """The pipeline has given these stages up by itself, or, if there are none, what was under way."""
        for stage in stages:
            peer = self.seats[stage]
            if peer not in ("", self.me):
                self.give_up(peer, why, now)
        if self.whole:
            self.begin_anew(why)

    def _lose(self, stage: int, why: str, now: float) -> None:
        again = stage in self._vacant_since
        self._vacate(stage, now)
        if self.plan is None and self._before is None:
            return  # nothing was in it
        self._out.counts["lost"] += not again  # who was to rebuild it has not
        self._out.say(f"stage {stage} of crew {self.spec.crew} is lost ({why})")
        self.lost.add(stage)
        self.why = self._anew = why  # even if the same peer gets it again

    def _vacate(self, stage: int, now: float) -> None:
        self.seats[stage] = ""
        self._vacant_since[stage] = now
        self.whole = False

    def begin_anew(self, why: str) -> None:
        """All seats are held, but messages were lost: what is under way must be done again."""
        self._anew = self.why = why
        self.whole = False

    # ----------------------------------------------------------------- what members say

    def heard(self, link: Link, record: Record, now: float) -> None:
        """Anything but a Hello, from a member."""
        peer, member = link.peer, self.members.get(link.peer)
        if member is None or member.link is not link:
            return
        match record:
            case Report(holding=holding, run=run):
                self.note(peer, holding, run)
            case Ready() if self.plan is not None and record.plan == self.plan.mark:
                self.ready(peer, record)
            case Unable(stage=stage, why=why) if self.plan is not None and record.plan == self.plan.mark:
                self.unable(peer, stage, why, now)
            case Broken() if self.plan is not None and record.plan == self.plan.mark:
                self._broken(peer, record, now)
            case Load(held_s=held_s):
                member.probed = None
                if held_s >= self.spec.stall_s and self.whole:
                    self.give_up(peer, f"it stalls: a message has been waiting for {held_s:.0f} s", now)
                elif held_s >= self.spec.stall_s:
                    self._hurry(peer, held_s, now)
            case Ready() | Unable() | Broken():
                pass  # of an earlier plan
            case _:
                self._out.counts["stray"] += 1

    def ready(self, peer: str, record: Ready) -> None:
        """A stage is held by `peer`."""
        member, stage = self.members[peer], record.stage
        if self.seats[stage : stage + 1] == [peer]:
            member.astray = False  # its others are let go as soon as all are held
        kept = [one for one in member.holding.live if one.stage != stage]
        live = tuple(sorted([*kept, Kept(stage, record.updates)]))
        member.holding = msgspec.structs.replace(member.holding, live=live)
        plan = self.plan
        if plan is None or record.plan != plan.mark or self.seats[stage : stage + 1] != [peer] or stage in self._ready:
            return
        self._ready.add(stage)
        if record.source is not None:
            self._out.counts[f"recovered/{record.source.way}"] += 1
            reached = max(self._reached, self.updates)
            if record.source.way != "live" and (reached or record.source.way != "base"):
                self._out.say(self._tell(stage, record.source, record.updates, reached))
        if len(self._ready) == len(plan.assignments) and not self._anew and "" not in self.seats:
            self.whole, self.won = True, self.term
            self._vacant_since.clear()
            for text in self._held_by_nobody:
                self._out.unsay(text)
            self._held_by_nobody.clear()
            for member in self.members.values():
                self._out.send(member.link, Whole(plan.mark))

    def unable(self, peer: str, stage: int, why: str, now: float) -> None:
        """A stage cannot be held by `peer`."""
        self.members[peer].unable.add(stage)
        if self.seats[stage : stage + 1] == [peer]:
            self._out.counts["unable"] += 1
            self._lose(stage, f"peer {short(peer)} cannot take it: {why}", now)
            self._vacant_since[stage] = now - self.spec.spare_wait_s  # it has waited

    def _broken(self, peer: str, record: Broken, now: float) -> None:
        """Between two members. Who said what nobody takes is given up; else, after some breaks, who reports them."""
        if record.peer not in self.members:
            return  # it is lost anyway
        what = "lost touch with"
        if record.refused and record.peer != self.me:
            self.give_up(record.peer, f"what it says is refused by {short(peer)}: {record.why}", now)
            return
        if record.refused:
            what = "refuses what is said by"
        if self._flaps(peer, now):
            self.give_up(peer, f"again and again it {what} {short(record.peer)}: {record.why}", now)
        elif peer in self.seats:
            self.begin_anew(f"peer {short(peer)} {what} {short(record.peer)}: {record.why}")

    def _flaps(self, peer: str, now: float) -> bool:
        """A peer has lost touch, with a neighbour or with the lead: whether it keeps doing so."""
        self._breaks = {one: times for one, times in self._breaks.items() if now < times[1] + CALM_S}
        since, _ = self._breaks.get(peer, (now, now))
        self._breaks[peer] = since, now
        return now >= since + BREAKS_S

    # ----------------------------------------------------------------- seats

    def arrange(self, now: float) -> Plan | None:
        """Give vacant stages to whoever can take them. A new plan, already sent to the others, if there is one."""
        if self._awaited and now < self._gather_until:
            return None
        self._awaited = set()
        if self.plan is None:
            for member in sorted(self.members.values(), key=lambda member: member.arrived):
                self._choose_run(member.hello)
        for stage, peer in enumerate(self.seats):
            if peer and peer not in self.members:
                self._lose(stage, f"peer {short(peer)} did not come", self._gather_until - GATHER_S)
        if not self._formed:
            missing = len(self.seats) - len(self.members)
            if missing > 0:
                self._out.say_once(f"crew {self.spec.crew} waits for {missing} more peer{'s' * (missing > 1)}")
                return None
            self._divide()
        self._fill(now)
        if "" in self.seats:
            return None
        moved = self.plan is None or [seat.peer for seat in self.plan.assignments] != self.seats
        if moved or (self._anew and now >= self._anew_at):
            return self._issue(now)
        self._share_spares()
        return None

    def _divide(self) -> None:
        """Layers by memory, if those of equal shares do not fit those who would hold them."""
        stages, members = range(1, len(self.seats)), self.members
        claims = [
            Claim(peer, member.arrived, member.hello.wanted, room=member.hello.capacity or None)
            for peer, member in members.items()
            if peer != self.me
        ]
        if self._cut or len(fill(stages, claims, self.costs)) == len(stages):
            return
        claims.sort(key=lambda claim: -(claim.room or float("inf")))
        largest = [replace(claim, room=None) for claim in claims[: len(stages)]]
        holders = [self.me, *(peer for _, peer in sorted(fill(stages, largest, self.costs).items()))]
        room = [float(members[peer].hello.capacity) for peer in holders]
        if room == self._tried:
            return
        self._tried = room
        try:
            self.spans = self.spec.divide(room)
        except ValueError:
            return  # that somebody has no room is said
        self.costs, self.seats = self._cost(self.spans), holders
        self._out.say(f"layers by memory: {', '.join(f'{first}-{end - 1}' for first, end in self.spans)}")

    def _fill(self, now: float) -> None:
        vacant = [stage for stage, peer in enumerate(self.seats) if not peer]
        if not vacant:
            return
        spares = self.spares
        claims = [self._claim(peer, peer in spares) for peer in self.members]
        for stage, peer in fill(vacant, claims, self.costs).items():
            self.seats[stage] = peer
        for peer in spares:
            self._say_claim(peer, self.members[peer].hello)
        while self._formed and (found := self._take_on(now)):
            self.seats[found[0]] = found[1]
        for stage in vacant:
            if not self.seats[stage]:
                if not self._formed or now - self._vacant_since[stage] >= self.spec.spare_wait_s:
                    what = f"stage {stage} of crew {self.spec.crew} is held by nobody"
                    text = f"{what}; none of its peers has room for it: start another"
                    self._held_by_nobody.add(text)
                    self._out.say_once(text)

    def _take_on(self, now: float) -> tuple[int, str] | None:
        """A stage that has waited long enough, and the neighbour that takes it on."""
        for stage, peer in enumerate(self.seats):
            if not peer and now - self._vacant_since[stage] >= self.spec.spare_wait_s:
                rooms = {peer: self._room(peer) for peer, member in self.members.items() if stage not in member.unable}
                taker = neighbour(stage, self.seats, rooms, self.costs[stage])
                if taker is not None:
                    return stage, taker
        return None

    def _claim(self, peer: str, spare: bool) -> Claim:
        member = self.members[peer]
        stored = {kept.stage: kept.updates for kept in reversed(member.holding.checkpoints)}
        room = self._room(peer) if spare else -1  # it has a stage; but may still have another in memory, on its way out
        wanted = member.hello.wanted if spare else None
        return Claim(peer, member.arrived, wanted, member.live, stored, room, member.unable)

    def _room(self, peer: str) -> int | None:
        capacity = self.members[peer].hello.capacity
        if not capacity:
            return None
        return capacity - sum(cost for cost, holder in zip(self.costs, self.seats, strict=True) if holder == peer)

    def at_rest(self, now: float) -> None:
        """Between rounds: a spare relieves a peer that holds several stages."""
        spares = [self._claim(peer, True) for peer in self.spares]
        found = relief(self.seats, spares, self.costs)
        if found is not None and self.whole:
            self._vacate(found.stage, now)
            self.seats[found.stage] = found.taker
            self.lost.add(found.stage)
            self.why = "it passes to another peer"

    # ----------------------------------------------------------------- plans

    def _issue(self, now: float) -> Plan:
        first, updates = self.plan is None, self.updates
        self._number += 1
        self._cut = True
        stored = [kept.updates for m in self.members.values() for kept in (*m.holding.replicas, *m.holding.checkpoints)]
        self._reached = updates or max(stored, default=0)
        seats = self._with_sources(updates)
        if first:
            self._branch(seats)
            seats = self._with_sources(updates)  # what is past the fork does not count any more
        spares = tuple(self.spares[:MAX_MEMBERS])
        plan = self.plan = Plan(self.term, self._number, seats, self.settings, spares, self.run)
        self.whole, self._ready, self._anew, self._anew_at = False, set(), "", now + AGAIN_S
        self._issued_at = now
        for member in self.members.values():
            member.probed = None
            self._out.send(member.link, plan)
        return plan

    def _with_sources(self, updates: int) -> tuple[Assignment, ...]:
        return tuple(
            Assignment(peer, layers, self._sources_of(stage, peer, updates))
            for stage, (peer, layers) in enumerate(zip(self.seats, self.spans, strict=True))
        )

    def _branch(self, seats: Sequence[Assignment]) -> None:
        """Whoever else goes on from here does so in another run."""
        ways = [seat.sources[0] for seat in seats if seat.sources]
        stored = [way.updates for way in ways if way.way in ("live", "replica", "snapshot")]
        self.run = branch(self.run, self.spec.draw(), self.updates or max(stored, default=0))
        for member in self.members.values():
            member.holding = self._held(member)

    def _sources_of(self, stage: int, peer: str, updates: int) -> tuple[Source, ...]:
        """None for who has it in memory, unless somebody else's is the one that was trained last."""
        plan = self.plan or self._before
        before = plan.assignments[stage].peer if plan and plan.run in (self.run, self._base) else ""
        holders = {one: member.live[stage] for one, member in self.members.items() if stage in member.live}
        if holders:
            latest = before if before in holders else max(holders, key=lambda one: (holders[one], one == peer))
            if latest == peer:
                return ()
        holdings: dict[str, Holding] = {}
        for one, member in self.members.items():  # files are of use to who holds their stage
            files = tuple(
                kept for kept in member.holding.checkpoints if self.seats[kept.stage : kept.stage + 1] == [one]
            )
            live = tuple(kept for kept in member.holding.live if (one, kept.stage) != (peer, stage))
            holdings[one] = msgspec.structs.replace(member.holding, checkpoints=files, live=live)
        return tuple(self._sources(stage, self.spans, holdings, updates, self.settings))[:MAX_SOURCES]

    def _share_spares(self) -> None:
        """Who succeeds the lead must be known to all."""
        spares = tuple(self.spares[:MAX_MEMBERS])
        if self.plan is not None and self.plan.spares != spares:
            self.plan = msgspec.structs.replace(self.plan, spares=spares)
            for member in self.members.values():
                self._out.send(member.link, self.plan)

    # ----------------------------------------------------------------- stalls

    def watch(self, now: float, waiting_since: float) -> None:
        """The lead has heard nothing from its pipeline since then, and waits. Who keeps a message is asked for."""
        if not self.whole or self.plan is None or now - waiting_since < self.spec.stall_s / 2:
            return
        seated = {peer for peer in self.seats if peer != self.me}
        self._probe(seated, now)
        if self.whole and now - waiting_since >= 2 * self.spec.stall_s and seated:
            self._out.counts["stuck"] += 1
            self.begin_anew("nothing moves, and nobody knows why")

    def watch_builders(self, now: float) -> None:
        """Stages are being built. Who has not got on with it for long is asked for, likewise."""
        if self.whole or self.plan is None or now - self._issued_at < self.spec.stall_s / 2:
            return
        late = {seat.peer for stage, seat in enumerate(self.plan.assignments) if stage not in self._ready}
        self._probe(late & set(self.seats) & self.members.keys() - {self.me}, now)

    def _probe(self, peers: Collection[str], now: float) -> None:
        assert self.plan is not None
        for peer in sorted(peers):
            member = self.members[peer]
            if member.probed is None:
                member.probed = now
                self._out.send(member.link, Probe(self.plan.mark))
            elif now - member.probed >= self.spec.stall_s:
                self.give_up(peer, "it stalls: it does not even answer", now)
                return

    def _hurry(self, peer: str, held_s: float, now: float) -> None:
        """A member does not get on with its stages: they are for spares, if any can take them."""
        assert self.plan is not None
        late = [stage for stage, holder in enumerate(self.seats) if holder == peer and stage not in self._ready]
        spares = [self._claim(spare, True) for spare in self.spares]
        for stage in late:
            if any(spare.fits(stage, self.costs) for spare in spares):
                self.members[peer].unable.add(stage)
                self._lose(stage, f"peer {short(peer)} has not got on with it for {held_s:.0f} s", now)
