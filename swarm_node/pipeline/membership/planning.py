"""Which peer holds each stage, and from where it takes the weights.

    vacant stage -> a spare, at once -> after `spare_wait_s` a neighbour that has room -> wait, and say so
    spares       <- peers that still have the stage in memory <- peers that want it <- all others, so that as many
                    stages as possible are held: augmenting paths over (peer, stage it can take)
    weights      <- the peer that held the stage last, and has it in memory, else the sources of `recovery.sources`

No peer that holds a stage loses it to another one. In the functions below the class, holders are given by stage (peer
id, "" = nobody), costs by stage (bytes that it takes), and claims in order of arrival, since the peer that came first
is served first.
If a peer of a new crew has no room for an equal share, the layers are divided by memory, unless some peer has stages,
or files of stages, with just these layers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import msgspec

from swarm_node.pipeline.membership.actions import ActionQueue, PeerSpec, Spans
from swarm_node.pipeline.membership.roster import CrewRoster, short
from swarm_protocol.crew import MAX_STAGE_SOURCES, Assignment, Holding, Plan, Source


@dataclass(frozen=True)
class Claim:
    """A peer that may take a stage."""

    peer: str
    wanted: int | None = None  # stage that it asks for
    live: Mapping[int, int] = field(default_factory=dict)  # stages in memory -> their updates
    stored: Mapping[int, int] = field(default_factory=dict)  # stages on disk -> their updates
    room: float = inf  # bytes that it can take besides the stages that it holds; inf = not known
    unable: Collection[int] = ()  # stages that it has failed to build

    def fits(self, stage: int, costs: Sequence[int]) -> bool:
        """Whether the peer can take the stage."""
        return stage not in self.unable and self.room >= costs[stage]


class Planning:
    """The holders of the stages, in the making."""

    def __init__(self, spec: PeerSpec, roster: CrewRoster, queue: ActionQueue) -> None:
        before = roster.before
        self.spans = before.spans if before else spec.spans
        self.settings = before.settings if before else spec.settings
        self.costs = spec.costs(self.spans)  # bytes that each stage takes
        self.holders = [row.peer for row in before.assignments] if before else [""] * len(spec.spans)
        """Peer id by stage, empty = nobody."""
        self.vacant_since: dict[int, float] = {}
        self.fixed = bool(before or roster.members[spec.me].hello.spans)
        """Some peer has stages, or files of stages, with just these layers: they are not divided anew."""
        self._spec = spec
        self._roster = roster
        self._queue = queue
        self._tried: list[float] = []  # capacities by which it was last tried to divide layers
        self._held_by_nobody: set[str] = set()  # sentences about stages that nobody holds

    def begin(self, lost: str, now: float) -> set[int]:
        """Vacate the stages of the peer `lost`, and take stage 0. The stages that were vacated."""
        me = self._spec.me
        vacated = {i for i, peer in enumerate(self.holders) if peer in ("", lost) or (i == 0 and peer != me)}
        for stage in vacated:
            self.vacate(stage, now)
        self.holders[0] = me
        return vacated

    def held_by(self, peer: str) -> list[int]:
        return [stage for stage, holder in enumerate(self.holders) if holder == peer]

    @property
    def spares(self) -> list[str]:
        """Members without a stage, in order of arrival."""
        return [peer for peer in self._roster.members if peer not in self.holders]

    def vacate(self, stage: int, now: float) -> None:
        """Nobody holds the stage any more."""
        self.holders[stage] = ""
        self.vacant_since[stage] = now

    def settle(self) -> None:
        """All stages are held."""
        self.vacant_since.clear()
        for text in self._held_by_nobody:
            self._queue.unsay(text)
        self._held_by_nobody.clear()

    # ----------------------------------------------------------------- layers

    def takes(self, spans: Spans) -> bool:
        """Whether a peer whose stages have these layers can be in this crew."""
        ends = len(spans) == len(self.spans) and spans[-1][1] == self.spans[-1][1]
        return not spans or spans == self.spans or (ends and not self.fixed)

    def fix(self, spans: Spans) -> None:
        """Use these layers, which some peer has stages of; unless layers are fixed, or there are none given."""
        if spans and not self.fixed:
            self.spans, self.costs, self.fixed = spans, self._spec.costs(spans), True

    def divide(self) -> None:
        """Divide the layers by memory, if some peer has no room for an equal share."""
        members, me = self._roster.members, self._spec.me
        stages = range(1, len(self.holders))
        claims = [
            Claim(peer, member.hello.wanted, room=member.hello.capacity or inf)
            for peer, member in members.items()
            if peer != me
        ]
        if self.fixed or len(fill(stages, claims, self.costs)) == len(stages):
            return
        largest = sorted(claims, key=lambda claim: -claim.room)[: len(stages)]
        largest = [replace(claim, room=inf) for claim in claims if claim in largest]
        holders = [me, *(peer for _, peer in sorted(fill(stages, largest, self.costs).items()))]
        room = [float(members[peer].hello.capacity) for peer in holders]
        if room == self._tried:
            return
        self._tried = room
        try:
            self.spans = self._spec.divide(room)
        except ValueError:
            return  # `fill` says that nobody has room
        self.costs, self.holders = self._spec.costs(self.spans), holders
        self._queue.say(f"layers by memory: {', '.join(f'{first}-{end - 1}' for first, end in self.spans)}")

    # ----------------------------------------------------------------- holders

    def fill(self, formed: bool, now: float) -> bool:
        """Give vacant stages to peers that can take them. Whether none is left. `formed`: there has been a policy."""
        vacant = self.held_by("")
        if not vacant:
            return True
        spares = self.spares
        claims = [self._claim(peer, peer in spares) for peer in self._roster.members]
        for stage, peer in fill(vacant, claims, self.costs).items():
            self.holders[stage] = peer
        for peer in spares:
            self.note_claim(peer)
        while formed and (found := self._next_neighbour(now)):
            self.holders[found[0]] = found[1]
        for stage in vacant:
            if not self.holders[stage] and (not formed or self._waited(stage, now)):
                what = f"stage {stage} of crew {self._spec.crew} is held by nobody"
                text = f"{what}; none of its peers has room for it: start another"
                self._held_by_nobody.add(text)
                self._queue.say_once(text)
        return "" not in self.holders

    def note_claim(self, peer: str) -> None:
        """Say and count it if a peer wants a stage that another one holds."""
        stage = self._roster.members[peer].hello.wanted
        if stage is None or self.holders[stage] in ("", peer) or self.holders.count(self.holders[stage]) > 1:
            return  # a peer that holds several stages will pass one on
        first = self._queue.say_of_peer(
            f"peer {short(peer)} wants stage {stage} of crew {self._spec.crew}, which {short(self.holders[stage])} "
            "holds: it takes another as soon as one is free"
        )
        self._queue.counts["refused/claim"] += first

    def _waited(self, stage: int, now: float) -> bool:
        return now - self.vacant_since[stage] >= self._spec.spare_wait_s

    def _next_neighbour(self, now: float) -> tuple[int, str] | None:
        """A stage that has waited long enough, and the neighbour that takes it on."""
        members = self._roster.members
        for stage, peer in enumerate(self.holders):
            if not peer and self._waited(stage, now):
                rooms = {peer: self._room(peer) for peer, member in members.items() if stage not in member.unable}
                taker = neighbour(stage, self.holders, rooms, self.costs[stage])
                if taker is not None:
                    return stage, taker
        return None

    def _claim(self, peer: str, spare: bool) -> Claim:
        member = self._roster.members[peer]
        stored = {kept.stage: kept.updates for kept in reversed(member.holding.checkpoints)}
        room = self._room(peer) if spare else -1  # it has a stage; but may still have another in memory, on its way out
        wanted = member.hello.wanted if spare else None
        return Claim(peer, wanted, member.live, stored, room, member.unable)

    def _room(self, peer: str) -> float:
        """Bytes that a peer can take besides its stages; inf = not known."""
        capacity = self._roster.members[peer].hello.capacity or inf
        return capacity - sum(self.costs[stage] for stage in self.held_by(peer))

    def spare_fits(self, stage: int) -> bool:
        """Whether some spare has room for the stage."""
        return any(self._claim(spare, True).fits(stage, self.costs) for spare in self.spares)

    def relieve(self, now: float) -> int | None:
        """Pass a stage of a peer that holds several to a spare: which one, `None` = there is none."""
        found = relief(self.holders, [self._claim(peer, True) for peer in self.spares], self.costs)
        if found is None:
            return None
        stage, taker = found
        self.vacate(stage, now)
        self.holders[stage] = taker
        return stage

    # ----------------------------------------------------------------- sources

    def assignments(self, plan: Plan | None, updates: int) -> tuple[Assignment, ...]:
        """The stages with their holders and sources. `plan`: the present one; `updates`: those of the crew."""
        return tuple(
            Assignment(peer, layers, self._sources_of(stage, peer, plan or self._roster.before, updates))
            for stage, (peer, layers) in enumerate(zip(self.holders, self.spans, strict=True))
        )

    def _sources_of(self, stage: int, peer: str, last: Plan | None, updates: int) -> tuple[Source, ...]:
        """Ways for `peer` to get the stage; none if it has it in memory, unless another peer trained it last."""
        roster = self._roster
        before = last.assignments[stage].peer if last and last.run in (roster.run, roster.base) else ""
        live = {one: member.live[stage] for one, member in roster.members.items() if stage in member.live}
        if live:
            latest = before if before in live else max(live, key=lambda one: (live[one], one == peer))
            if latest == peer:
                return ()
        holdings: dict[str, Holding] = {}
        for one, member in roster.members.items():  # a file is of use to the holder of its stage only
            files = tuple(kept for kept in member.holding.checkpoints if kept.stage in self.held_by(one))
            others = tuple(kept for kept in member.holding.live if (one, kept.stage) != (peer, stage))
            holdings[one] = msgspec.structs.replace(member.holding, checkpoints=files, live=others)
        return tuple(self._spec.sources(stage, self.spans, holdings, updates, self.settings))[:MAX_STAGE_SOURCES]


def stored_updates(assignments: Sequence[Assignment]) -> int:
    """Updates of the newest weights that the assignments' first sources give; 0 = only the base model."""
    first = [row.sources[0] for row in assignments if row.sources]
    return max((source.updates for source in first if source.way in ("live", "replica", "snapshot")), default=0)


def fill(vacant: Collection[int], claims: Collection[Claim], costs: Sequence[int]) -> dict[int, str]:
    """Vacant stage -> the peer that gets it; stages that no peer can take are left out."""
    holders: dict[int, str] = {}
    for stage in sorted(vacant):
        live = [claim for claim in claims if stage in claim.live and stage not in claim.unable]
        if live:
            holders[stage] = max(live, key=lambda claim: claim.live[stage]).peer  # of equals, the first
    for claim in claims:
        if claim.wanted in vacant and claim.wanted not in holders and claim.peer not in holders.values():
            assert claim.wanted is not None
            if claim.fits(claim.wanted, costs):
                holders[claim.wanted] = claim.peer
    rest = {claim.peer: claim for claim in claims if claim.peer not in holders.values()}

    def place(claim: Claim, tried: set[int]) -> bool:
        free = [stage for stage in vacant if claim.fits(stage, costs)]
        for stage in sorted(free, key=lambda stage: (-claim.stored.get(stage, -1), stage)):
            if stage in tried:
                continue
            tried.add(stage)
            holder = holders.get(stage)
            if holder is None or (holder in rest and place(rest[holder], tried)):
                holders[stage] = claim.peer
                return True
        return False

    for claim in rest.values():
        place(claim, set())
    return holders


def neighbour(stage: int, holders: Sequence[str], rooms: Mapping[str, float], cost: int) -> str | None:
    """The neighbour that takes on a lost stage: the one with more room, or the lower one if that is not known.

    `None` if neither can. `rooms`: bytes that each peer can take besides its stages; inf = not known."""
    around = [holders[s] for s in (stage - 1, stage + 1) if 0 <= s < len(holders)]
    able = {peer: rooms[peer] for peer in around if peer in rooms and rooms[peer] >= cost}
    if inf in able.values():
        return next(iter(able))
    return max(able, key=lambda peer: able[peer], default=None)


def relief(holders: Sequence[str], spares: Collection[Claim], costs: Sequence[int]) -> tuple[int, str] | None:
    """The next stage that a spare takes from a peer that holds several, and the spare; `None` if there is none.

    The peer with most stages gives one, of equals the one with the lowest id. It gives the stage that the spare wants,
    else the highest that the spare can take. The leader keeps stage 0."""
    held: dict[str, list[int]] = {}
    for stage, peer in enumerate(holders):
        held.setdefault(peer, []).append(stage)
    crowded = sorted((peer for peer in held if peer and len(held[peer]) > 1), key=lambda p: (-len(held[p]), p))
    for spare in spares:
        for giver in crowded:
            stages = [stage for stage in held[giver] if stage > 0 and spare.fits(stage, costs)]
            if stages:
                return max(stages, key=lambda stage: (stage == spare.wanted, stage)), spare.peer
    return None
