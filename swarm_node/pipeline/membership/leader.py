"""Decisions of a crew's leader: which plan its peers go by, when the pipeline is whole, and which peer must go.

    a peer joins, leaves, fails ----> holders by stage, some stages vacant (`planning`)
    arrange:  all stages have a holder, and something changed -> Plan to all -> Ready of every stage -> Whole to all

A new leader of an old crew first waits until the peers of the last plan have come, or `GATHER_S` have passed, so that
peers that live keep their stages. Its first plan begins a segment of the run (`swarm_protocol.lineage`). A crew that
never was whole waits until there are as many peers as stages.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from swarm_node.pipeline.membership.actions import ActionQueue, Close, PeerLink, PeerSpec
from swarm_node.pipeline.membership.planning import Planning, stored_updates
from swarm_node.pipeline.membership.roster import CrewRoster, short
from swarm_node.say import Warned
from swarm_protocol import crew
from swarm_protocol.lineage import branch

REPLAN_S = 2.0  # shortest time between two plans that only begin work anew


class Leader:
    """The leader's view of its crew, and its decisions."""

    def __init__(
        self,
        spec: PeerSpec,
        hello: crew.Hello,
        before: crew.Plan | None,
        lost: str,
        term: int,
        queue: ActionQueue,
        now: float,
    ) -> None:
        """`hello`: of this peer. `before`: the last plan that it went by; `lost`: the leader of it, if it has gone."""
        self.spec = spec
        self.term = term
        self.plan: crew.Plan | None = None
        self.roster = CrewRoster(spec.me, hello, before, lost, now)
        self.planning = Planning(spec, self.roster, queue)
        self.whole = False
        self.won = 0  # last term in which the crew was whole
        self.lost: set[int] = set()  # stages lost since `resume`; none if only messages were
        self.why = ""  # why they were lost, or what else broke the pipeline
        self._queue = queue
        self._number = before.number if before else 0
        self._reached = 0  # updates that the run had made, as far as is known, when the last plan was made
        self._ready: set[int] = set()  # stages of the plan that are held
        self._anew = ""  # why work must begin anew although nobody is lost; empty = it need not
        self._began = self._replan_at = self._issued_at = now
        vacated = self.planning.begin(lost, now)
        if before is not None and vacated:
            queue.counts["lost"] += len(vacated)
            self.lost, self.why = vacated, "its peer has gone"

    # ----------------------------------------------------------------- what is known

    @property
    def updates(self) -> int:
        """Updates that the crew has made, as most of its stages say."""
        return self.roster.updates(self.planning.holders)

    @property
    def missing(self) -> set[int]:
        """Stages that are lost until the crew is whole again."""
        return set() if self.whole else self.lost.union(self.planning.held_by(""))

    def send_all(self, record: crew.Record) -> None:
        """Send a record to every member."""
        for member in self.roster.members.values():
            self._queue.send(member.link, record)

    def resume(self) -> None:
        """The losses are known, and the pipeline is used anew."""
        self.lost, self.why = set(), ""

    # ----------------------------------------------------------------- who comes and goes

    def join(self, link: PeerLink, hello: crew.Hello, now: float) -> None:
        """A peer joins, or comes back. It keeps a stage that it is still to hold, and still has."""
        peer, me = link.peer, self.spec.me
        if self.roster.is_banned(peer, now):
            self._queue.counts["refused/stall"] += 1
            self._queue.send(link, crew.Refusal("stall", "given up a moment ago", self.spec.proof_to(peer)))
            return
        if self.plan is None:
            self.roster.choose_run(hello)
        old = self.roster.enter(link, hello, astray=self.won > 0 and hello.term > self.term)
        if old is not None and old.link is not None and old.link is not link:
            self._queue.do(Close(old.link))
        if self.plan is None:
            self.term = self.roster.least_term(self.term)
        self.planning.fix(hello.spans)
        self._queue.send(link, crew.Answer(me, self.spec.proof_to(peer), self.term))
        for stage in self.planning.held_by(peer):
            if stage not in self.roster.members[peer].live:
                self._lose(stage, f"peer {short(peer)} has come back without it", now)
            elif old is not None:
                self.begin_anew(f"peer {short(peer)} has come back")
        if self.plan is not None and self.plan.held_by(peer) == ():
            self._queue.send(link, self.plan)
            if self.whole:
                self._queue.send(link, crew.Whole(self.plan.mark))
        self.planning.note_claim(peer)

    def left(self, link: PeerLink, why: str, now: float) -> None:
        """The channel to a member ended: all its stages are lost."""
        peer = link.peer
        member = self.roster.members.get(peer)
        if member is None or member.link is not link:
            return
        del self.roster.members[peer]
        held = self.planning.held_by(peer)
        if held:
            self.roster.note_loss(peer, now)
        for stage in held:
            self._lose(stage, f"peer {short(peer)}: {why}", now)

    def give_up(self, peer: str, why: str, now: float) -> None:
        """Put out a member that lives, but does not work."""
        member = self.roster.members[peer]
        if member.link is None:
            return
        self.roster.ban(peer, now)
        self._queue.counts["given_up"] += 1
        self.left(member.link, why, now)
        self._queue.do(Close(member.link))

    def doubt(self, stages: Collection[int], why: str, now: float) -> None:
        """The pipeline has given these stages up by itself; if there are none, only the work under way."""
        for stage in stages:
            peer = self.planning.holders[stage]
            if peer not in ("", self.spec.me):
                self.give_up(peer, why, now)
        if self.whole:
            self.begin_anew(why)

    def _lose(self, stage: int, why: str, now: float) -> None:
        again = stage in self.planning.vacant_since
        self.planning.vacate(stage, now)
        self.whole = False
        if not (self.plan or self.roster.before):
            return  # nothing was in it
        self._queue.counts["lost"] += not again  # the peer that was to rebuild it has failed
        self._queue.say(Warned(f"stage {stage} of crew {self.spec.crew} is lost ({why})"))
        self.lost.add(stage)
        self.why = self._anew = why  # even if the same peer gets it again

    def begin_anew(self, why: str) -> None:
        """All stages are held, but messages were lost: the work under way must be done again."""
        self._anew = self.why = why
        self.whole = False

    # ----------------------------------------------------------------- what members say

    def heard(self, link: PeerLink, record: crew.Record, now: float) -> None:
        """A record has come from a member. Those about an earlier plan are ignored."""
        peer, member = link.peer, self.roster.members.get(link.peer)
        if member is None or member.link is not link:
            return
        match record:
            case crew.Report(holding=holding, run=run):
                self.roster.note(peer, holding, run)
            case crew.Load(held_s=held_s):
                member.probed = None
                if held_s >= self.spec.stall_s:
                    self._stalls(peer, held_s, now)
            case crew.Ready() | crew.Unable() | crew.Broken() if self.plan is None or record.plan != self.plan.mark:
                pass
            case crew.Ready():
                self.ready(peer, record)
            case crew.Unable(stage=stage, why=why):
                self.unable(peer, stage, why, now)
            case crew.Broken():
                self._broken(peer, record, now)

    def ready(self, peer: str, record: crew.Ready) -> None:
        """A stage is held by `peer`; the crew is whole when all stages are."""
        stage, plan = record.stage, self.plan
        mine = stage in self.planning.held_by(peer)
        self.roster.note_stage(peer, stage, record.updates, mine)
        if plan is None or record.plan != plan.mark or not mine or stage in self._ready:
            return
        self._ready.add(stage)
        if record.source is not None:
            named = "checkpoint" if (way := record.source.way) == "snapshot" else way  # the wire keeps the earlier name
            self._queue.counts[f"recovered/{named}"] += 1
            reached = max(self._reached, self.updates)
            if way != "live" and (reached or way != "base"):
                self._queue.say(self.spec.tell(stage, record.source, record.updates, reached))
        if len(self._ready) == len(plan.assignments) and not self._anew and "" not in self.planning.holders:
            self.whole, self.won = True, self.term
            self.planning.settle()
            self.send_all(crew.Whole(plan.mark))

    def unable(self, peer: str, stage: int, why: str, now: float) -> None:
        """A stage cannot be held by `peer`."""
        self.roster.members[peer].unable.add(stage)
        if stage in self.planning.held_by(peer):
            self._queue.counts["unable"] += 1
            self._lose(stage, f"peer {short(peer)} cannot take it: {why}", now)
            self.planning.vacant_since[stage] = now - self.spec.spare_wait_s  # it has waited

    def _broken(self, peer: str, record: crew.Broken, now: float) -> None:
        """Two members lost touch. One that sent an invalid message is given up; else one that reports many breaks."""
        if record.peer not in self.roster.members:
            return  # it is lost anyway
        if record.refused and record.peer != self.spec.me:
            self.give_up(record.peer, f"what it says is refused by {short(peer)}: {record.why}", now)
            return
        what = "refuses what is said by" if record.refused else "lost touch with"
        if self.roster.flaps(peer, now):
            self.give_up(peer, f"again and again it {what} {short(record.peer)}: {record.why}", now)
        elif peer in self.planning.holders:
            self.begin_anew(f"peer {short(peer)} {what} {short(record.peer)}: {record.why}")

    # ----------------------------------------------------------------- plans

    def arrange(self, now: float) -> crew.Plan | None:
        """Give vacant stages to peers that can take them. A new plan, already sent to the others, if there is one."""
        if not self.roster.gathered(now):
            return None
        if self.plan is None:
            for member in self.roster.members.values():
                self.roster.choose_run(member.hello)
            self.term = self.roster.least_term(self.term)
        for stage, peer in enumerate(self.planning.holders):
            if peer and peer not in self.roster.members:
                self._lose(stage, f"peer {short(peer)} did not come", self._began)
        formed = bool(self.plan or self.roster.before or self.roster.any_live)  # there has been a policy, which goes on
        if not formed:
            missing = len(self.planning.holders) - len(self.roster.members)
            if missing > 0:
                self._queue.say_once(f"crew {self.spec.crew} waits for {missing} more peer{'s' * (missing > 1)}")
                return None
            self.planning.divide()
        if not self.planning.fill(formed, now):
            return None
        moved = self.plan is None or [row.peer for row in self.plan.assignments] != self.planning.holders
        if moved or (self._anew and now >= self._replan_at):
            return self._issue(now)
        spares = tuple(self.planning.spares[: crew.MAX_MEMBERS])
        if self.plan is not None and self.plan.spares != spares:  # all must know who succeeds the leader
            self.plan = msgspec.structs.replace(self.plan, spares=spares)
            self.send_all(self.plan)
        return None

    def _issue(self, now: float) -> crew.Plan:
        planning, roster, updates = self.planning, self.roster, self.updates
        self._number += 1
        planning.fixed = True
        self._reached = updates or roster.stored
        assignments = planning.assignments(self.plan, updates)
        if self.plan is None:  # another peer that goes on from here does so in another run
            began = self.updates or stored_updates(assignments)
            roster.count_by(branch(roster.run, self.spec.draw(), began))
            assignments = planning.assignments(None, updates)  # what is past the fork does not count any more
        spares = tuple(planning.spares[: crew.MAX_MEMBERS])
        plan = self.plan = crew.Plan(self.term, self._number, assignments, planning.settings, spares, roster.run)
        self.whole, self._ready, self._anew, self._replan_at = False, set(), "", now + REPLAN_S
        self._issued_at = now
        for member in self.roster.members.values():
            member.probed = None
        self.send_all(plan)
        return plan

    def at_rest(self, now: float) -> None:
        """Between two rounds: a spare relieves a peer that holds several stages."""
        if self.whole and (stage := self.planning.relieve(now)) is not None:
            self.whole = False
            self.lost.add(stage)
            self.why = "it passes to another peer"

    # ----------------------------------------------------------------- stalls

    def watch(self, waiting_since: float | None, now: float) -> None:
        """Ask members that may stall how long a message has been waiting, or a build has made no progress.

        `waiting_since`: the leader has heard nothing from its pipeline since then; `None` = it does not wait."""
        stall_s, since = self.spec.stall_s, waiting_since if self.whole else self._issued_at
        if self.plan is None or since is None or now - since < stall_s / 2:
            return
        busy = set(self.planning.holders) & self.roster.members.keys() - {self.spec.me}
        if not self.whole:
            busy &= {row.peer for stage, row in enumerate(self.plan.assignments) if stage not in self._ready}
        links, mute = self.roster.probe(busy, stall_s, now)
        for link in links:
            self._queue.send(link, crew.Probe(self.plan.mark))
        if mute:
            self.give_up(mute, "it stalls: it does not even answer", now)
        elif self.whole and busy and now - since >= 2 * stall_s:
            self._queue.counts["stuck"] += 1
            self.begin_anew("nothing moves, and nobody knows why")

    def _stalls(self, peer: str, held_s: float, now: float) -> None:
        """A message has been waiting at `peer`, or a stage in building, for `held_s` seconds.

        In a whole crew the peer is given up. A builder loses the stages that some spare can take."""
        if self.whole:
            self.give_up(peer, f"it stalls: a message has been waiting for {held_s:.0f} s", now)
            return
        late = set(self.planning.held_by(peer)) - self._ready
        for stage in [stage for stage in sorted(late) if self.planning.spare_fits(stage)]:
            self.roster.members[peer].unable.add(stage)
            self._lose(stage, f"peer {short(peer)} has not got on with it for {held_s:.0f} s", now)
