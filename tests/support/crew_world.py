"""Several crew memberships in one process on a virtual clock: channels, cards, building machines, and faults."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, combinations

from msgspec.structs import replace

from swarm_node.pipeline.membership.actions import (
    Action,
    BuildStage,
    Close,
    Connect,
    Costs,
    DropStage,
    PeerLink,
    PeerSpec,
    Say,
    Send,
    Spans,
    StartLeading,
    StopLeading,
)
from swarm_node.pipeline.membership.leader import Leader
from swarm_node.pipeline.membership.leader_search import FIRST_ANSWER_S
from swarm_node.pipeline.membership.leadership import CrewRole
from swarm_node.pipeline.membership.member import CrewMembership
from swarm_node.pipeline.membership.roster import GATHER_S
from swarm_node.pipeline.recovery.sources import rank_sources, tell
from swarm_protocol.crew import (
    CREW_METHOD,
    STAGE_METHOD,
    Holding,
    Kept,
    Plan,
    Progress,
    Record,
    Settings,
    Source,
    crew_key,
    decode_record,
    encode_record,
)
from swarm_protocol.lineage import NO_RUN, Lineage, shared
from swarm_protocol.messages import PROTOCOL_VERSION, CrewCard, PeerCard

SWARM = "5a" * 32
ARCHITECTURE = "00112233445566aa"
STEP_S = 0.25
CARD_S = 60.0
"""A card lives so long after its last renewal."""
SILENCE_S = 4.0
BUILD_S = 100.0
"""Nothing takes so long to build, unless it hangs."""
TURNS = 2**32
RUN = (("5c" * 8, 0),)
"""Of peers that have files."""
SETTINGS = Settings(
    "float32", False, "auto", 0, False, prompt=16, length=8, microbatch=64, decay=0.0, betas=(0.9, 0.999)
)

FORMING_S = 25.0
DIAL_FAILS_S = 15.0
"""Longer than p2pd takes to say that it cannot reach somebody."""
OTHER = (("0e" * 8, 0),)
"""A run."""
MENDING_S = SILENCE_S + FIRST_ANSWER_S + GATHER_S + 8.0
"""Everything that may have to be waited for when peers vanish silently, and some seconds to say and build things."""


def spec(me: str, stages: int, started: float = 0.0, crew: str = "red", **changes: object) -> PeerSpec:
    place = {
        "me": me,
        "name": f"name-of-{me}",
        "swarm": SWARM,
        "crew": crew,
        "key": crew_key(SWARM, crew),
        "architecture": ARCHITECTURE,
        "settings": SETTINGS,
        "spans": tuple((2 * stage, 2 * stage + 2) for stage in range(stages)),
        "sources": ways,
        "tell": tell,
        "costs": each_costs_one,
        "divide": by_memory,
        "started": started,
    }
    return PeerSpec(**(place | changes))  # type: ignore[arg-type]


def ways(stage: int, spans: Spans, holdings: Mapping[str, Holding], updates: int, settings: Settings) -> list[Source]:
    return rank_sources(stage, spans, holdings, updates, plus=settings.swap)


def each_costs_one(spans: Collection[object]) -> list[int]:
    return [1] * len(spans)


def a_layer_costs_one(spans: Spans) -> list[int]:
    return [end - first for first, end in spans]


def by_memory(room: Sequence[float]) -> Spans:
    """Two layers for each stage, dealt to whoever has room for most more."""
    room = [most or float("inf") for most in room]
    layers = [1] * len(room)
    while sum(layers) < 2 * len(room):
        stage = max(range(len(room)), key=lambda stage: room[stage] - layers[stage])
        layers[stage] += 1
    if any(held > most for held, most in zip(layers, room, strict=True)):
        raise ValueError("no room")
    ends = [*accumulate(layers)]
    return tuple((end - held, end) for held, end in zip(layers, ends, strict=True))


@dataclass(eq=False)
class Machine:
    """A peer: its crew, what it has in memory, and what it was told to do."""

    crew: CrewMembership
    memory: dict[int, int] = field(default_factory=dict)
    """Stage -> updates of its weights."""
    building: dict[int, tuple[float, BuildStage]] = field(default_factory=dict)
    """Stage -> when it will be there, and the order; as long as it stands."""
    new: set[int] = field(default_factory=set)
    """Stages that have not been told how far the crew is since they were built."""
    turns: Counter[int] = field(default_factory=Counter)
    """Stage -> the last turn that it has heard of: it drops what is of earlier ones."""
    trained: Counter[int] = field(default_factory=Counter)
    """Stage -> updates that it has really made here."""
    begun: list[int] = field(default_factory=list)
    """Of a lead whose crew has been whole: the last turn, and the updates of the crew."""
    built: Counter[int] = field(default_factory=Counter)
    """Stage -> how often it was built here."""
    ways: list[tuple[int, str]] = field(default_factory=list)
    leads: bool = False
    said: list[str] = field(default_factory=list)
    held_s: float = 0.0
    side: int = 0


class World:
    """All machines. Equal seeds, equal events."""

    def __init__(self, seed: int, stages: int, plus: bool = False, costs: Costs = each_costs_one) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.stages = stages
        self.plus = plus
        self.costs = costs
        self.machines: dict[str, Machine] = {}
        self.card_store: dict[str, tuple[float, int, CrewCard]] = {}
        """Peer -> when its card was renewed, on which side of a split, the card."""
        self.far: dict[PeerLink, tuple[str, PeerLink]] = {}
        """End of a channel -> whose the other one is, and it."""
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = self.segments = 0
        self.arrives: dict[PeerLink, float] = {}
        self.trained_at: dict[str, float] = {}
        self.builds_s = 0.2, 2.0
        """A stage takes between these."""
        self.opens_s = 0.0
        """A channel between stages takes up to this much longer than a message."""

    # ----------------------------------------------------------------- who is there

    def start(self, peer: str, holding: Holding | None = None, **changes: object) -> Machine:
        changes.setdefault("settings", replace(SETTINGS, swap=self.plus))
        self.count += 1
        changes.setdefault("run", RUN if holding else NO_RUN)
        changes.setdefault("draw", self.draw)
        changes.setdefault("costs", self.costs)
        place = spec(peer, self.stages, started=self.now, **changes)  # type: ignore[arg-type]
        machine = Machine(None)  # type: ignore[arg-type]
        machine.crew = CrewMembership(place, self.now, held_s=lambda: self.held_s(machine))
        assert machine.crew.report(holding or Holding(), self.now) == []
        self.machines[peer] = machine
        self.publish(peer)
        return machine

    def draw(self) -> str:
        self.segments += 1
        return f"{self.segments:016x}"

    def held_s(self, machine: Machine) -> float:
        """A stage that never will be built is one that nothing is done about."""
        return BUILD_S * sum(ready > self.now + BUILD_S for ready, _ in machine.building.values()) or machine.held_s

    def kill(self, peer: str, silent: bool = False) -> None:
        """Without a goodbye; `silent` = not even the connections break."""
        del self.machines[peer]
        for link, (other, far) in list(self.far.items()):
            if other == peer and far in self.far:
                self.cut(link, silent)

    def cut(self, link: PeerLink, silent: bool) -> None:
        """Both ends of a channel hear of it, sooner or later."""
        other, far = self.far.pop(link)
        owner, _ = self.far.pop(far)
        for who, end in ((owner, link), (other, far)):
            self.at(self.rng.uniform(1.0, SILENCE_S) if silent else 0.0, partial(self.tell_closed, who, end, "gone"))

    def split(self, *groups: Collection[str]) -> None:
        for peer, machine in self.machines.items():
            machine.side = next((i for i, group in enumerate(groups) if peer in group), len(groups))
        for link in list(self.far):
            if link in self.far and self.apart(self.far[link][0], self.far[self.far[link][1]][0]):
                self.cut(link, silent=True)

    def heal(self) -> None:
        for machine in self.machines.values():
            machine.side = 0

    def apart(self, a: str, b: str) -> bool:
        return a not in self.machines or b not in self.machines or self.machines[a].side != self.machines[b].side

    # ----------------------------------------------------------------- time

    def at(self, delay: float, event: Callable[[], None]) -> None:
        self.count += 1
        self.events.append((self.now + delay, self.count, event))

    def run(self, seconds: float, check: Callable[[], None] = lambda: None) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += STEP_S
            due = sorted(event for event in self.events if event[0] <= self.now)
            self.events = [event for event in self.events if event[0] > self.now]
            for _, _, event in due:
                event()
                check()
            for peer in list(self.machines):
                if peer in self.machines:
                    self.live(peer)
                    check()

    def live(self, peer: str) -> None:
        """A step of one machine: cards, building, training."""
        machine = self.machines[peer]
        crew = machine.crew
        renewed, _, card = self.card_store[peer]
        if card != crew.card and self.now >= renewed + 1.0 or self.now >= renewed + 15.0:
            self.publish(peer)
        self.act(peer, crew.cards(self.seen_by(peer), self.now))
        self.act(peer, crew.tick(self.now))
        for stage, (ready, order) in list(machine.building.items()):
            if not crew.following.stands(order):
                del machine.building[stage]
                self.withdrawn(peer, order)
            elif ready <= self.now:
                del machine.building[stage]
                self.build(peer, order)
        lead = crew.leader
        if lead is not None and crew.whole and self.now >= self.trained_at.get(peer, 0.0) + 1.0:
            self.trained_at[peer] = self.now
            self.train(machine)
            self.act(peer, crew.at_rest(self.now))

    def train(self, machine: Machine) -> None:
        """One update of all stages of the crew that this one leads, as the pipeline does it: stages drop turns that are
        not new, and take an update that they have made for made."""
        crew = machine.crew
        assert crew.plan is not None and crew.leader is not None
        holders = [self.machines.get(seat.peer) for seat in crew.plan.assignments]
        there = [one for one in holders if one is not None and one.crew.plan is not None]
        if len(there) < len(holders) or any(one.crew.plan.mark != crew.plan.mark for one in there):  # type: ignore[union-attr]
            return
        begins = not machine.begun
        if begins:
            machine.begun = [crew.plan.term * TURNS, crew.leader.updates]
        machine.begun[0] += 1
        turn, updates = machine.begun
        for stage, holder in enumerate(there):
            if holder.turns[stage] >= turn:
                return  # it takes part in nothing
            holder.turns[stage] = turn
        for stage, holder in enumerate(there):
            if begins or stage in holder.new:
                holder.memory[stage] = updates
                holder.new.discard(stage)
            holder.trained[stage] += holder.memory[stage] == updates
            holder.memory[stage] = max(updates + 1, holder.memory[stage])
        machine.begun[1] += 1
        for holder in there:
            live = tuple(Kept(s, n) for s, n in holder.memory.items())
            self.act(
                holder.crew.spec.me, holder.crew.report(replace(holder.crew.following.holding, live=live), self.now)
            )
        round = crew.following.progress.round + 1 if crew.following.progress else 1
        self.act(crew.spec.me, crew.advance(Progress(round, 0.0), self.now))

    def build(self, peer: str, order: BuildStage) -> None:
        """From the first source that works."""
        machine = self.machines[peer]
        for source in order.sources:
            models = source.stages or (order.stage,)
            if source.way in ("live", "mean", "copy") and not all(
                giver in self.machines and not self.apart(peer, giver) and model in self.machines[giver].memory
                for giver, model in zip(source.peers, models, strict=True)
            ):
                continue
            if source.way == "snapshot" and (
                source.peers != (peer,) or not self.has(peer, order.stage, source.updates)
            ):
                continue
            updates = source.updates
            if source.way == "live":
                updates = self.machines[source.peers[0]].memory[order.stage]
            self.seat(peer, order, updates, source)
            return
        self.act(peer, machine.crew.unable(order, "no way works", self.now))

    def has(self, peer: str, stage: int, updates: int) -> bool:
        """Whether a file that was told of is there."""
        return True

    def withdrawn(self, peer: str, order: BuildStage) -> None:
        """Whoever builds a stage notices in the end that it is not wanted any more."""
        if peer in self.machines:
            self.act(peer, self.machines[peer].crew.unable(order, "it is not wanted any more", self.now))

    def seat(self, peer: str, order: BuildStage, updates: int, source: Source) -> None:
        machine, stage = self.machines[peer], order.stage
        machine.memory[stage] = updates
        machine.turns[stage] = 0
        machine.new.add(stage)
        machine.built[stage] += 1
        machine.ways.append((stage, source.way))
        self.act(peer, machine.crew.built(order, updates, source, self.now))

    # ----------------------------------------------------------------- cards

    def publish(self, peer: str) -> None:
        machine = self.machines[peer]
        self.card_store[peer] = self.now, machine.side, machine.crew.card

    def seen_by(self, peer: str) -> dict[str, PeerCard]:
        """Cards on the same side of a split, two seconds late."""
        side = self.machines[peer].side
        return {
            other: PeerCard(PROTOCOL_VERSION, SWARM, at, "node", ["trainer"], crew=card)
            for other, (at, where, card) in self.card_store.items()
            if other != peer and where == side and at + 2.0 <= self.now < at + CARD_S
        }

    # ----------------------------------------------------------------- channels

    def act(self, peer: str, actions: list[Action]) -> None:
        for action in actions:
            machine = self.machines[peer]
            match action:
                case Connect(link=link):
                    self.connect(peer, link)
                case Send(link=link, record=record):
                    self.send(peer, link, record)
                case Close(link=link):
                    if link in self.far:
                        other, far = self.far.pop(link)
                        self.far.pop(far, None)
                        self.at(self.delay(far), partial(self.tell_closed, other, far, "closed"))
                case Say(text=text):
                    machine.said.append(text)
                case BuildStage(stage=stage):
                    if stage in machine.building:
                        self.at(0.1, partial(self.withdrawn, peer, machine.building[stage][1]))
                    machine.building[stage] = self.now + self.rng.uniform(*self.builds_s), action
                case DropStage(stage=stage):
                    machine.memory.pop(stage, None)
                case StartLeading():
                    machine.leads, machine.begun = True, []
                case StopLeading():
                    machine.leads, machine.begun = False, []

    def connect(self, peer: str, link: PeerLink) -> None:
        if self.apart(peer, link.peer):
            wait = 0.1 if link.peer not in self.machines else 5.0
            self.at(wait, partial(self.tell_closed, peer, link, "cannot be reached"))
            return
        far = PeerLink(peer, link.method)
        self.far[link], self.far[far] = (link.peer, far), (peer, link)
        if self.opens_s and link.method == STAGE_METHOD:
            self.arrives[far] = self.now + self.rng.uniform(0.0, self.opens_s)
        self.at(self.delay(far), partial(self.tell_opened, link.peer, far))

    def send(self, peer: str, link: PeerLink, record: Record) -> None:
        if link in self.far:
            other, far = self.far[link]
            self.at(self.delay(far), partial(self.tell, other, far, decode_record(encode_record(record))))

    def delay(self, end: PeerLink) -> float:
        """In order for each end."""
        arrives = max(self.arrives.get(end, 0.0), self.now + self.rng.uniform(0.0, 0.4))
        self.arrives[end] = arrives
        return arrives - self.now

    def tell(self, peer: str, link: PeerLink, record: Record) -> None:
        if link in self.far and peer in self.machines:
            self.act(peer, self.machines[peer].crew.heard(link, record, self.now))

    def tell_opened(self, peer: str, link: PeerLink) -> None:
        if link in self.far and peer in self.machines:
            self.act(peer, self.machines[peer].crew.opened(link, self.now))

    def tell_closed(self, peer: str, link: PeerLink, why: str) -> None:
        if peer in self.machines:
            self.act(peer, self.machines[peer].crew.closed(link, why, self.now))

    # ----------------------------------------------------------------- what must be so

    def crews(self) -> dict[int, dict[str, CrewMembership]]:
        """Side of a split -> its peers."""
        sides: dict[int, dict[str, CrewMembership]] = {}
        for peer, machine in self.machines.items():
            sides.setdefault(machine.side, {})[peer] = machine.crew
        return sides

    def settled(self, side: int = 0) -> bool:
        """One lead, whom all others follow, and every stage held by who should."""
        crews = self.crews().get(side, {})
        leads = [peer for peer, crew in crews.items() if crew.role == CrewRole.LEADING]
        if len(leads) != 1 or not crews[leads[0]].whole:
            return False
        plan = crews[leads[0]].plan
        assert plan is not None
        return all(
            crew.plan is not None and crew.plan.mark == plan.mark and crew.plan.spares == plan.spares and crew.whole
            for crew in crews.values()
        ) and all(
            seat.peer in crews and i in crews[seat.peer].following.live for i, seat in enumerate(plan.assignments)
        )

    def plan(self, side: int = 0) -> Plan:
        """Of the lead of a settled crew."""
        assert self.settled(side), self.story()
        plan = next(crew.plan for crew in self.crews()[side].values() if crew.role == CrewRole.LEADING)
        assert plan is not None
        return plan

    def learns(self) -> bool:
        """A settled crew: every stage makes updates, and all the same ones."""

        def trained() -> list[int]:
            return [sum(machine.trained[stage] for machine in self.machines.values()) for stage in range(self.stages)]

        before = trained()
        self.run(8.0)  # a stage may change hands meanwhile
        holders = [self.machines[seat.peer] for seat in self.plan().assignments]
        updates = {machine.memory[stage] for stage, machine in enumerate(holders)}
        return len(updates) == 1 and all(now >= then + 2 for then, now in zip(before, trained(), strict=True))

    def story(self) -> str:
        """For the message of a test that fails."""
        lines = [f"t = {self.now}"]
        for peer, machine in self.machines.items():
            crew, plan = machine.crew, machine.crew.plan
            seats = plan and [seat.peer for seat in plan.assignments]
            lines.append(
                f"{peer} side {machine.side} {crew.role} term {crew.leadership.term} whole {crew.whole} plan {seats} "
                f"{plan and (plan.term, plan.number, plan.spares)} live {crew.following.live} "
                f"building {list(machine.building)}"
            )
            lines += [f"      {text}" for text in machine.said[-8:]]
        return "\n".join(lines)


@dataclass(frozen=True)
class File:
    stage: int
    updates: int
    run: Lineage
    past: dict[int, Leader]
    """Update -> who had it made."""


class DiskWorld(World):
    """Machines also write files, and find them again; it is known by whom each update of a stage was really made."""

    def __init__(self, seed: int, stages: int) -> None:
        super().__init__(seed, stages)
        self.disks: dict[str, list[File]] = {}
        self.pasts: dict[tuple[Machine, int], dict[int, Leader]] = {}
        self.loaded = 0
        """Files."""

    def start(self, peer: str, holding: Holding | None = None, **changes: object) -> Machine:
        files = self.disks.setdefault(peer, [])
        run = files[-1].run if files else NO_RUN
        return super().start(peer, Holding(checkpoints=self.counted(peer, run)), run=run, **changes)

    def counted(self, peer: str, run: Lineage) -> tuple[Kept, ...]:
        files = [file for file in self.disks[peer] if file.updates <= shared(file.run, run)]
        return tuple(dict.fromkeys(Kept(file.stage, file.updates) for file in reversed(files)))

    def file(self, peer: str, stage: int, updates: int) -> File | None:
        run, files = self.machines[peer].crew.following.run, reversed(self.disks[peer])
        ours = (file for file in files if (file.stage, file.updates) == (stage, updates))
        return next((file for file in ours if updates <= shared(file.run, run)), None)

    def has(self, peer: str, stage: int, updates: int) -> bool:
        return self.file(peer, stage, updates) is not None

    def live(self, peer: str) -> None:
        super().live(peer)
        if peer in self.machines:
            crew = self.machines[peer].crew
            files = replace(crew.following.holding, checkpoints=self.counted(peer, crew.following.run))
            if files != crew.following.holding:
                self.act(peer, crew.report(files, self.now))

    def train(self, machine: Machine) -> None:
        before = {peer: Counter(one.trained) for peer, one in self.machines.items()}
        super().train(machine)
        for peer, one in self.machines.items():
            for stage in one.trained - before[peer]:
                updates, past = one.memory[stage], self.pasts.setdefault((one, stage), {})
                past = {n: lead for n, lead in past.items() if n < updates} | {updates: machine.crew.leader}
                self.pasts[one, stage] = past
                if updates % 5 == 0:
                    self.disks[peer].append(File(stage, updates, one.crew.following.run, past))

    def seat(self, peer: str, order: BuildStage, updates: int, source: Source) -> None:
        past: dict[int, Leader] = {}
        if source.way == "live":
            past = self.pasts.get((self.machines[source.peers[0]], order.stage), {})
        elif source.way == "snapshot":
            file = self.file(peer, order.stage, source.updates)
            assert file is not None
            past = file.past
            self.loaded += 1
        self.pasts[self.machines[peer], order.stage] = past
        super().seat(peer, order, updates, source)

    def check(self) -> None:
        """No two stages of a crew have made the same update for different leads."""
        for machine in self.machines.values():
            if machine.crew.leader is None or not machine.crew.whole:
                continue
            assert machine.crew.plan is not None
            seats = [(self.machines.get(seat.peer), i) for i, seat in enumerate(machine.crew.plan.assignments)]
            pasts = [self.pasts.get((one, i), {}) for one, i in seats if one is not None and i in one.memory]
            for one, other in combinations(pasts, 2):
                apart = [n for n in one.keys() & other.keys() if one[n] is not other[n]]
                assert not apart, f"updates {apart}\n{self.story()}"


def crew_links(world: World, peer: str) -> list[PeerLink]:
    """Ends at `peer` of channels to a lead."""
    return [far for other, far in world.far.values() if other == peer and far.method == CREW_METHOD]


def crew(stages: int, *peers: str, seed: int = 0, **changes: object) -> World:
    """A crew that is whole."""
    world = World(seed, stages, **{name: changes.pop(name) for name in list(changes) if name == "plus"})  # type: ignore[arg-type]
    for peer in peers:
        world.start(peer, **changes)
        world.run(0.5)
    world.run(FORMING_S)
    assert world.settled(), world.story()
    return world


def holders(world: World) -> list[str]:
    return [row.peer for row in world.plan().assignments]


def heard(machine: Machine, text: str) -> int:
    return sum(text in said for said in machine.said)


def holders_of(crew: CrewMembership) -> list[str]:
    assert crew.plan is not None
    return [row.peer for row in crew.plan.assignments]
