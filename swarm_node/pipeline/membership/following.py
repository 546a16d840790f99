"""How a peer goes by the plans of its crew, those that it makes as the leader included.

    plan -> stages of this peer: here already -> Ready     not here -> BuildStage ... built -> Ready
         -> neighbours: open channels to them, and tell the leader when one is lost
    whole -> DropStage for each stage that another peer has taken over

A stage is reported as ready once all its neighbours can be talked to, so that a whole crew can train at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from swarm_node.pipeline.membership.actions import ActionQueue, BuildStage, DropStage, PeerLink, PeerSpec, Spans
from swarm_node.pipeline.membership.channels import STRANGER_S, PeerChannels
from swarm_node.pipeline.membership.roster import NOTHING, counted
from swarm_protocol.crew import MAX_REASON_CHARS, Broken, Holding, Kept, Plan, Progress, Ready, Source, Unable
from swarm_protocol.lineage import leads_to


class Following:
    """The plan that this peer goes by, and the stages that it holds."""

    def __init__(self, spec: PeerSpec, channels: PeerChannels, queue: ActionQueue) -> None:
        self.link: PeerLink | None = None
        """The channel to the leader that this peer follows; `None` while it seeks one, or leads."""
        self.plan: Plan | None = None  # the last plan that this peer went by
        self.whole = False  # all stages of the plan are held, as far as this peer knows
        self.live: dict[int, int] = {}  # stages in memory here -> their updates
        self.run = spec.run  # the run that this peer's stages, replicas and checkpoints belong to
        self.progress = Progress(spec.round, 0.0) if spec.round else None
        """Progress of the run, as the leader last told it."""
        self._ready: dict[int, Source | None] = {}
        """Stages that are ready, and the source of each: the leader has not been told yet."""
        self._holding = NOTHING
        self._spec = spec
        self._channels = channels
        self._queue = queue
        self._ordered: dict[int, BuildStage] = {}  # stages that are being built
        self._sources: dict[int, tuple[Source, ...]] = {}  # sources that the plan gave for each stage that was built
        self._planned_at = 0.0
        self._severed: set[str] = set()  # neighbours lost since the last plan

    @property
    def stages(self) -> tuple[int, ...]:
        """Stages of this peer, by the plan."""
        return self.plan.held_by(self._spec.me) if self.plan else ()

    @property
    def spans(self) -> Spans:
        """Layers of each stage, by the plan; without one, as they would be if this peer became the first leader."""
        return self.plan.spans if self.plan else self._spec.spans

    @property
    def building(self) -> bool:
        """Stages are to be built here."""
        return bool(self._ordered)

    @property
    def holding(self) -> Holding:
        """Weights of the policy that this peer has."""
        live = tuple(Kept(stage, updates) for stage, updates in sorted(self.live.items()))
        return msgspec.structs.replace(self._holding, live=live)

    @property
    def missing(self) -> set[int]:
        """Stages that are lost, as far as a follower knows: a neighbour is gone, or the plan has them rebuilt."""
        rows = enumerate(self.plan.assignments if self.plan else ())
        return {stage for stage, row in rows if row.peer in self._severed or (row.sources and not self.whole)}

    def stands(self, order: BuildStage) -> bool:
        """Whether this very order is still to be carried out."""
        return self._ordered.get(order.stage) == order

    def succession(self, leader: str) -> list[str]:
        """Peers that lead after `leader`, first in line first: spares, then the holders of stages 1, 2, ...

        Empty if the plan is not its plan."""
        if self.plan is None or self.plan.lead != leader:
            return []
        heirs = dict.fromkeys([*self.plan.spares, *(row.peer for row in self.plan.assignments)])
        return [peer for peer in heirs if peer != leader]

    def accept(self, plan: Plan, sender: str, now: float) -> bool:
        """Go by a plan that the leader has sent; False if it does not fit this crew."""
        ours = self._spec.spans
        if plan.lead != sender or len(plan.assignments) != len(ours) or plan.spans[-1][1] != ours[-1][1]:
            self._queue.counts["refused/plan"] += 1
            return False
        if self.plan is not None and plan.mark == self.plan.mark:
            self.plan = plan  # only the spares differ
        else:
            self.whole = False
            self.adopt(plan, now)
        return True

    def adopt(self, plan: Plan, now: float) -> None:
        """Go by a new plan: order the stages that are to be built here."""
        if self.plan is None or (self.plan.lead, self.plan.term, self.plan.run) != (plan.lead, plan.term, plan.run):
            self._sources.clear()
        if plan.run != self.run:
            self._change_run(plan)
        self.plan = plan
        self._severed.clear()
        self._planned_at = now
        unsaid, self._ready = self._ready, {}
        mine = self.stages
        self._ordered = {stage: order for stage, order in self._ordered.items() if stage in mine}
        for stage in mine:
            row = plan.assignments[stage]
            if stage in self.live and row.sources in ((), self._sources.get(stage)):
                self._ready[stage] = unsaid.get(stage)
                continue
            if not row.sources:
                self._ordered.pop(stage, None)
                self._queue.send(self.link, Unable(plan.mark, stage, "it is not here any more"))
                continue
            order = BuildStage(stage, row.layers, row.sources)
            if self._ordered.get(stage) != order:
                self.live.pop(stage, None)
                self._ordered[stage] = order
                self._queue.do(order)
        self.tend_channels(now)

    def _change_run(self, plan: Plan) -> None:
        """Drop what does not belong to the crew's run.

        Stages that the plan gives to this peer are built anew."""
        if not leads_to(self.run, plan.run):
            self.progress = Progress(0, 0.0)
            self._ordered.clear()
        self._holding = counted(self.holding, self.run, plan.run)
        self.run = plan.run
        for stage in self.live.keys() - {kept.stage for kept in self._holding.live}:
            del self.live[stage]
            if stage not in plan.held_by(self._spec.me):
                self._queue.do(DropStage(stage))

    def confirm_whole(self, mark: int) -> None:
        """The leader says that all stages of the plan with this mark are held."""
        if self.plan is not None and mark == self.plan.mark:
            self.whole = True
            self.drop_others()

    def drop_others(self) -> None:
        """Drop the stages that were kept until other peers had taken them over."""
        for stage in [stage for stage in self.live if stage not in self.stages]:
            del self.live[stage]
            self._sources.pop(stage, None)
            self._queue.do(DropStage(stage))

    def built(self, order: BuildStage, updates: int, source: Source | None) -> None:
        """A stage was built; if no order asks for it any more, it is dropped."""
        stage, present = order.stage, self._ordered.get(order.stage)
        same = present is not None and present.layers == order.layers and source == present.sources[0]
        if present is not None and (present == order or same):
            del self._ordered[stage]
            self.live[stage] = updates
            self._sources[stage] = present.sources
            self._ready[stage] = source
        elif present is None:  # else it is built once more
            self.live.pop(stage, None)
            self._ready.pop(stage, None)
            self._queue.do(DropStage(stage))

    def unable(self, order: BuildStage, why: str) -> None:
        """A stage could not be built: tell the leader."""
        assert self.plan is not None
        del self._ordered[order.stage]
        self._queue.send(self.link, Unable(self.plan.mark, order.stage, why))

    def update(self, holding: Holding) -> None:
        """Take note of what this peer has now; stages that it was told to drop do not count."""
        self.live |= {kept.stage: kept.updates for kept in holding.live if kept.stage in self.live}
        self._holding = holding

    def take_ready(self) -> list[Ready]:
        """Records for the leader about stages that are ready; each is given once."""
        assert self.plan is not None
        ready, self._ready = self._ready, {}
        return [Ready(self.plan.mark, stage, self.live[stage], source) for stage, source in ready.items()]

    def report_ready(self, now: float) -> None:
        """Tell the leader about ready stages once all neighbours can be talked to.

        A neighbour that cannot be reached for `STRANGER_S` is reported as lost."""
        if self.link is None or self.plan is None or self.plan.lead != self.link.peer:
            return
        unheard = self.neighbours().keys() - self._channels.neighbours.keys()
        if not unheard:
            for record in self.take_ready():
                self._queue.send(self.link, record)
        elif now >= self._planned_at + STRANGER_S:
            for peer in sorted(unheard):
                self._break_with(peer, "there is no channel")

    def neighbours(self) -> dict[str, bool]:
        """Peers whose stages talk to this peer's without the leader -> whether this one opens the channel."""
        if self.plan is None:
            return {}
        reach = 2 if self.plan.settings.swap else 1
        return adjacent([row.peer for row in self.plan.assignments], self._spec.me, reach)

    def tend_channels(self, now: float) -> None:
        """Close the channels that are not needed, and open those that are."""
        neighbours = self.neighbours()
        self._channels.tidy(neighbours, now)
        if self.link is not None:
            self._channels.reach(neighbours, now)

    def lose_neighbour(self, link: PeerLink, why: str, refused: bool) -> None:
        """A channel between stages has ended."""
        if self._channels.leave(link):
            self._break_with(link.peer, why, refused)

    def miss_channel(self, mark: int, peer: str) -> None:
        """There was no channel for a message to a neighbour, by the plan with that mark."""
        if self.plan is not None and self.plan.mark == mark:
            self._break_with(peer, "there is no channel")

    def refuse_leader(self, reason: str) -> None:
        """The leader sent a message that is not valid: the plan's work begins anew, and the channel stays."""
        if self.plan is not None and self.link is not None:
            self._queue.send(self.link, Broken(self.plan.mark, self.link.peer, line(reason), refused=True))

    def _break_with(self, peer: str, why: str, refused: bool = False) -> None:
        """Tell the leader that a neighbour is lost, once for each plan."""
        new = peer in self.neighbours() and peer not in self._severed
        if self.plan is not None and self.link is not None and new:
            self._severed.add(peer)
            self._queue.send(self.link, Broken(self.plan.mark, peer, line(why), refused))


def line(text: str) -> str:
    """`text` as records may carry it: printable ASCII, at most `MAX_REASON_CHARS` characters."""
    return "".join(letter if " " <= letter <= "~" else "?" for letter in text[:MAX_REASON_CHARS])


def adjacent(holders: Sequence[str], me: str, reach: int) -> dict[str, bool]:
    """Peers with stages at most `reach` from those of `me` -> whether `me` opens the channel to them.

    The holder of the higher stage does. The leader is left out, since it has channels with all."""
    highest = {peer: stage for stage, peer in enumerate(holders)}
    mine = [stage for stage, peer in enumerate(holders) if peer == me]
    if 0 in mine:
        return {}
    near = {holders[stage] for own in mine for stage in range(max(0, own - reach), min(len(holders), own + reach + 1))}
    return {peer: highest[me] > highest[peer] for peer in sorted(near - {me, holders[0]})}
