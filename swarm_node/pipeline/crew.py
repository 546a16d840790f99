"""A node in a crew: holds stages of a policy that several peers hold together, and leads them if it has the first.

    enter the swarm -> StageTransport (who holds what) --orders--> HeldStages (stages come and go)
                         |                                   |
                         | messages                          v
                         +----------------------> Worker.handle -> answers     until the lead says that the run is over
                         |
                         +-- holds stage 0 --> Run: the usual rounds, with StagedPolicy and StagedOptimizer

Whoever leads runs the node's own loop; everybody else answers messages. A peer that leads no more, because another does
with better right, goes back to answering. What is lost and how it came back is said by the lead.
"""

from __future__ import annotations

import math
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor

from protocol.crew import Holding, Progress, Settings, Source, crew_id, crew_key
from protocol.errors import RemoteProtocolError
from protocol.lineage import NO_RUN
from protocol.messages import PROTOCOL_VERSION, CrewCard, PeerCard
from protocol.transports.base import Handler, Transport
from swarm_node.averaging import Averager
from swarm_node.averaging.cohort import leave_cohort
from swarm_node.config import NodeConfig
from swarm_node.errors import StopRequested, SwarmNodeError, UserError
from swarm_node.observability.cgroups import free_main_memory
from swarm_node.pipeline.compute.fingerprint import architecture
from swarm_node.pipeline.compute.partition import UNKNOWN
from swarm_node.pipeline.compute.stage_model import weights_digest
from swarm_node.pipeline.compute.worker import attend
from swarm_node.pipeline.driver import Driver
from swarm_node.pipeline.footprint import Footprint, free_memory
from swarm_node.pipeline.join_command import JoinCommand
from swarm_node.pipeline.membership.actions import BuildStage, DropStage, PeerSpec, Spans, StartLeading, StopLeading
from swarm_node.pipeline.messages import StageLost
from swarm_node.pipeline.recovery.held_stages import HeldStages
from swarm_node.pipeline.recovery.replicas import EVERY, replica_every
from swarm_node.pipeline.recovery.sources import elsewhere, sources, tell
from swarm_node.pipeline.recovery.stage_checkpoints import newest, stage_files
from swarm_node.pipeline.recovery.weight_transfer import WeightTransfer
from swarm_node.pipeline.settings import agreed, limits, settings_of
from swarm_node.pipeline.stage_cohort import MOST_S, StageCohort
from swarm_node.pipeline.staged_optimizer import StagedOptimizer
from swarm_node.pipeline.staged_policy import StagedPolicy
from swarm_node.pipeline.status_text import Aftermath, StatusText
from swarm_node.pipeline.transport import StageTransport
from swarm_node.policy.adapters import ARCHITECTURE
from swarm_node.policy.loading import Plan, load_tokenizer, prepare
from swarm_node.policy.probes import is_windowed
from swarm_node.storage.checkpoints import check_room
from swarm_node.storage.run_settings import RunSettings
from swarm_node.storage.rundir import RunDir
from swarm_node.swarm.join import JoinedSwarm
from swarm_node.types import Stop

TICK_S = 0.5
LOOK_S = 0.5
"""Longest between two looks at orders and messages."""
LAST_WORD_S = 5.0
"""The others hear that the run is over, and leave."""
GATHER_S = 20.0
"""How long a node that leaves waits until others have its stages, and a lead for the weights of theirs; for the former,
after a signal or a notice, as long as is left, ..."""
SAVE_S = 4.0
"""... but for so much, in which this one and those that it has started save what they hold."""
SETTLE_S = 1.0
"""How long a node that leaves waits for an update that the others may be making already."""
SLACK_S = 5.0
"""A lost stage that its neighbours could take on is there by then, or somebody else has to come."""
ABSENT_S = 15.0
"""So much longer does a node with checkpoints of later stages wait for another to begin the crew: one of the first."""
STATUS_S = 2.0
"""Between two writings of the status of a node that does not lead."""
MAX_SHOWN = 500
"""Peers in it."""
FRESH = 100
"""Updates that a copy of a stage may be behind and still be better than what is made of its neighbours."""
TURNS = 2**32
"""Passes and generations that a lead may count before its numbers would be those of the next lead."""


class Deposed(SwarmNodeError):
    """Another peer leads this crew now."""


class Ear:
    """Subscriptions of the `Member` that a node is while it leads: each takes the place of the one before."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._subscribed: set[str] = set()
        self._handlers: dict[str, Handler] = {}

    def subscribe(self, topic: str, handler: Handler) -> None:
        """As the transport's, which is for good."""

        def heard(data: bytes) -> None:
            now = self._handlers.get(topic)
            if now is not None:
                now(data)

        self._handlers[topic] = handler
        if topic not in self._subscribed:
            self._subscribed.add(topic)
            self._transport.subscribe(topic, heard)

    def end(self) -> None:
        """Nobody listens any more."""
        self._handlers.clear()


class CrewNode:
    """This node's part in its crew."""

    def __init__(
        self,
        config: NodeConfig,
        entered: JoinedSwarm,
        run: RunDir,
        say: Callable[..., None],
        stack: ExitStack,
        asked: NodeConfig | None = None,
    ) -> None:
        """`asked`: what its user asked for, in the fields that are set; by default `config`. UserError for a policy
        that cannot be cut so, or a stage that there is not."""
        if not config.pipeline.crew:
            raise UserError("give the crew a name that its other machines are given too, and nobody else: --crew NAME")
        if config.seed is None:
            config = config.model_copy(update={"seed": entered.seed})
        self.own = config
        """As its user wants it."""
        self.config = config
        """As it goes with the crew's settings, once these are known."""
        self.settings = settings_of(config)
        """How the crew works, as far as this node knows."""
        self.entered = entered
        self.run = run
        self.say = say
        self.run_settings = RunSettings(run, config, asked or config, say)
        self.run_settings.begin(trained=run.exists)  # as soon as there is a stage, its directory is that of a run
        self.loading = prepare(config.policy, alone=False)
        pipeline = config.pipeline
        manifest = entered.manifest
        swarm = manifest.swarm_id
        self.footprint = Footprint(config, self.loading)
        self.architecture = architecture_of(config, self.loading)
        self.transport = entered.transport
        self.ear = Ear(self.transport)
        files = run.path / "stages"
        found = stage_files(files)
        ours = [file for file in found if file.architecture == self.architecture]
        usable = [file for file in ours if file.run and len(file.spans) == pipeline.stages]
        if found and not ours:
            raise UserError(f"{files} has stages of another model, or trained otherwise: choose another --run-dir")
        last = newest(usable)
        kept = {file.stage for file in usable if last is not None and file.counts(last.run)}
        absent_s = ABSENT_S if kept and 0 not in kept else 0.0
        key = crew_key(swarm, pipeline.crew)

        def ways(
            stage: int, spans: Spans, holdings: Mapping[str, Holding], updates: int, settings: Settings
        ) -> Sequence[Source]:
            def others(stage: int) -> dict[str, int]:
                """Peers of other crews that hold the same stage and average it, if this crew does; those first that
                have made about as many updates as it has, since others may have made theirs up."""
                if config.averaging.method == "none":
                    return {}
                members = {peer: card for peer, card in self.transport.members().items() if card.cohort}
                found = elsewhere(members, crew_id(key), self.architecture, pipeline.stages, spans[stage], stage)
                return dict(sorted(found.items(), key=lambda one: (abs(one[1] - updates), one[0])))

            usual = 2 * max(EVERY, replica_every(self.config, self.loading.lora))
            return sources(stage, spans, holdings, updates, others=others, plus=settings.swap, usual=usual, fresh=FRESH)

        spec = PeerSpec(
            me=self.transport.peer_id,
            name=config.name or "node",
            swarm=swarm,
            crew=pipeline.crew,
            key=key,
            architecture=self.architecture,
            settings=self.settings,
            spans=last.spans if last is not None else self.footprint.divide([UNKNOWN] * pipeline.stages),
            run=last.run if last is not None else NO_RUN,
            round=last.round if last is not None else 0,
            sources=ways,
            tell=partial(tell, adapters=self.loading.lora),
            costs=self.footprint.costs,
            divide=self.footprint.divide,
            wanted=None if pipeline.stage == "auto" else pipeline.stage,
            capacity=round(pipeline.capacity_gb * 2**30) or free_memory(),
            started=time.time() + absent_s,  # of two leads that begin at once, it gives way
            spare_wait_s=pipeline.spare_wait_s,
            stall_s=pipeline.stall_s,
            absent_s=absent_s,
        )

        model = self.loading.config
        self.stage_transport = StageTransport(
            self.transport,
            spec,
            partial(limits, width=model.hidden_size, vocabulary=model.vocab_size),
            lambda text: say(self.status_text.named(text)),
        )
        self.status_text = StatusText(self.transport, self.stage_transport, pipeline.crew, config.name or "node")
        stack.callback(self.stage_transport.close)
        self._stop: Stop | None = None
        self._leaves = False
        self.weight_transfer = WeightTransfer(
            self.transport,
            swarm,
            self.architecture,
            self._may_have,
            self._in_crew,
            shelf=self.shelf,
            shelved=lambda: self.stage_transport.report(self.held_stages.holding()),
            room=free_main_memory,
        )
        self.held_stages = HeldStages(
            config, self.loading, self.weight_transfer, files, self.transport.peer_id, self.stage_transport.stands, say
        )
        self.held_stages.go_to(spec.run)
        recalled = self.held_stages.recall(spec.spans)
        self.stage_transport.report(self.held_stages.holding())
        self.cohort = StageCohort(
            config.averaging,
            swarm,
            manifest.averaging_period_s,
            self.held_stages,
            self.transport,
            say,
            most_s=min(MOST_S, pipeline.stall_s / 4),
        )
        self.driver: Driver | None = None
        self.policy: StagedPolicy
        self.optimizer: StagedOptimizer
        self.progress = Progress(recalled, 0.0)
        """Of the crew, as last heard or told, or as it was at the newest checkpoint here."""
        others = [*config.network.bootstrap, *manifest.bootstrap]
        self.join_command = JoinCommand(self.transport.peer_id, swarm, config, others, entered.model)
        self._losses = 0.0
        """When the crew was last whole."""
        self._holders: tuple[str, ...] = ()
        """Of the stages, then."""
        self._leads = False
        self._updates: dict[int, int] = {}
        """Of the stages here, when that was last told."""
        self._whole_since = math.inf
        """When the crew was first whole, `time.monotonic`."""
        self._advised = False
        """Checkpoints are due, since this machine may well be taken back soon."""
        self._averaged = 0
        """Changes that others' weights made to stage 0 while this node led."""
        self._announced: Any = None
        self._aftermath = Aftermath(say)
        ended = threading.Event()
        ticking = threading.Thread(target=self._tick, args=(ended,), name="crew", daemon=True)
        ticking.start()
        stack.callback(ticking.join)
        stack.callback(ended.set)

    # ----------------------------------------------------------------- whoever does not lead

    def follow(self, stop: Stop, show: Callable[[int, float], None] = lambda round, reward: None) -> bool:
        """Answer messages until this node is to lead (True), or the run is over (False). StopRequested by a signal.
        `show` is told of each round that the lead has done, and its reward."""
        told, self._stop = "", stop
        while True:
            stop.check()
            if stop.advised:
                stop.advised, self._advised = False, True
            self._heed()
            self._obey()
            if self.stage_transport.whole and not self._leads and (whole := self.status_text.whole()) != told:
                told = whole
                self._begin()
                self.say(whole)
            if self._leads:
                self.cohort.leave()
            else:
                self.cohort.look()
            self.announce()
            if self._leads and self.minutes_over:
                self.say(f"{self.config.minutes:g} minutes are over: somebody else has to lead the crew")
                return False
            if self._leads:
                return True
            if self.stage_transport.progress is not None and self.stage_transport.progress != self.progress:
                self.progress = self.stage_transport.progress
                self.held_stages.checkpoints.round = self.progress.round
                if self.progress.over:
                    self.say(f"the run of crew {self.config.pipeline.crew} is over after round {self.progress.round}")
                    return False
                show(self.progress.round, self.progress.reward)
                if not self.held_stages.workers and self.stage_transport.plan is not None:
                    self.held_stages.updated(
                        self.stage_transport.plan
                    )  # what was kept for who has left is with another by now
            message = self.stage_transport.receive(LOOK_S)
            if message is None:
                continue
            left = attend(message, self.held_stages.workers, self.stage_transport.send, self._refused)
            assert left is None, "only the lead is sent what is for the lead"
            self.cohort.step()
            self._after_update()

    def _after_update(self) -> None:
        plan = self.stage_transport.plan
        updates = {stage: worker.updates for stage, worker in self.held_stages.workers.items()}
        if updates != self._updates and plan is not None:
            if any(made > self._updates.get(stage, made) for stage, made in updates.items()):
                self.run_settings.trained()
            self._updates = updates
            self.held_stages.checkpoints.round = max(
                self.held_stages.checkpoints.round, self.progress.round + (self.driver is None)
            )
            self.held_stages.updated(plan)
            self.stage_transport.report(self.held_stages.holding())
            self.announce()

    def _heed(self) -> None:
        """If they are due: checkpoints of the stages here, as soon as the last are written."""
        if self._advised and self.held_stages.save_soon():
            self._advised = False
            self.stage_transport.report(self.held_stages.holding())

    def _obey(self) -> None:
        """Do what is to be done about stages. Deposed if this node does not lead any more."""
        self._go_by_plan()
        for order in self.stage_transport.orders():
            match order:
                case StartLeading():
                    self._leads = True
                case StopLeading():
                    self._leads = False
                    if self.driver is not None:
                        raise Deposed("another peer leads this crew now")
                case DropStage(stage):
                    self._go_by_plan()  # it may be a new one since; what is of another branch is written first
                    self.held_stages.leave(stage)
                case BuildStage():
                    self._take(order)
            self.stage_transport.report(self.held_stages.holding())

    def _go_by_plan(self) -> None:
        """The crew's settings may be others than this node's own, and its run another than that of the files here."""
        plan = self.stage_transport.plan
        if plan is None:
            return
        if plan.run != self.held_stages.checkpoints.run:
            if self.held_stages.go_to(plan.run):
                self.progress = Progress(0, 0.0)
            self.stage_transport.report(self.held_stages.holding())
        if plan.settings == self.settings:
            return
        self.settings = plan.settings
        self.config, changed = agreed(self.own, self.settings)
        self.footprint.config, self.footprint.reference = self.config, self.settings.reference
        self.held_stages.go_by(self.config, self.settings.reference)
        if changed:
            self.say(f"crew {self.config.pipeline.crew} goes by its lead's options: {', '.join(changed)}")

    def _take(self, order: BuildStage) -> None:
        self._go_by_plan()  # it may be a new one since
        plan = self.stage_transport.plan
        if plan is None or not self.stage_transport.stands(order):
            return
        try:
            taken = self.held_stages.take(order, plan.spans)
        except UserError as error:
            taken = str(error)
        if isinstance(taken, str):
            self.stage_transport.unable(order, taken)
        else:
            updates, source = taken
            self.stage_transport.seated(order, updates, source)
            self._updates = {}

    # ----------------------------------------------------------------- the lead

    def take_lead(self, stop: Stop) -> None:
        """Wait until every stage is held: then there are `policy` and `optimizer`. Deposed, or StopRequested by a
        signal."""
        began, self._stop = time.monotonic(), stop
        while not self.stage_transport.mend(LOOK_S):
            stop.check()
            self._obey()
            self.announce()
            self._waiting(began)
            if not self._leads:
                raise Deposed("another peer leads this crew now")
        config, plan = self.config, self.stage_transport.plan
        assert plan is not None
        self.driver = Driver(
            self.stage_transport,
            self.held_stages.workers,
            self._mend,
            config.pipeline.wire,
            config.pipeline.swap,
            self._refused,
            config.pipeline.stall_s,
            first_turn=plan.term * TURNS,
        )
        self._holders = self.status_text.holders
        tokenizer = load_tokenizer(config.policy)
        self.policy = StagedPolicy(self.driver, tokenizer, config.policy, self.say, self.settings.microbatch)
        self.policy.packing = not is_windowed(self.loading.config, longest_row(config))
        self.policy.start_digest = self.held_stages.starts[0]
        self.optimizer = StagedOptimizer(self.driver)
        self.progress = self.stage_transport.progress or self.progress
        stop.allow()
        self.driver.updates = self.stage_transport.updates  # stage 0 may have been rebuilt, and know of none
        self._join_ends(averaged=False)
        self._surely(partial(self.driver.agree, plan.run[-1][1]))  # what the run goes on from, whatever was lost
        stop.hold()
        self.policy.version = self.driver.updates
        self._begin()
        self.say(f"{self.status_text.whole()}; {self.driver.updates} updates so far")
        if self._lost():
            self._aftermath.lost(f"the lead of crew {config.pipeline.crew} was lost", self.progress)

    def round_over(self, round: int, reward: float, averager: Averager | None) -> None:
        """At the lead, between two rounds: replicas and checkpoints; a stage may change hands. `averager` is of stage
        0."""
        if averager is not None:
            self.cohort.say_which(sorted(self.held_stages.workers))
            changes = averager.counts["exchanges"] + averager.replaced
            if changes != self._averaged:
                self._averaged = changes
                self._join_ends(averaged=True)
        self._aftermath.round_over(round, reward)
        self.progress = Progress(round, self._aftermath.reward)
        self.held_stages.checkpoints.round = round
        self.stage_transport.tell(self.progress)
        self._after_update()
        if self._stop is not None and self._stop.advised:  # which the run takes back once it has saved as well
            self._advised = True
        self._heed()
        self.stage_transport.at_rest()

    def _join_ends(self, averaged: bool) -> None:
        """`Driver.join_ends`, whatever is lost meanwhile."""
        assert self.driver is not None
        self._surely(partial(self.driver.join_ends, averaged))

    def _surely(self, act: Callable[[], None]) -> None:
        """Do it, again whenever a stage is lost meanwhile."""
        assert self.driver is not None
        while True:
            try:
                act()
                return
            except StageLost as lost:
                self.driver.again(lost)

    def gather(self, stop: Stop) -> None:
        """At the lead, at its end: write the weights of the stages that others hold beside those of its own, as far as
        they answer. After a signal there is little time for it; one that comes meanwhile ends it."""
        plan = self.stage_transport.plan
        if plan is None or not self.held_stages.updates:
            return
        for stage in self.held_stages.workers:
            self.held_stages.save(stage)
        if len(self.held_stages.workers) == len(plan.assignments):
            return
        self.say("fetching the weights of the other stages, so that the policy can be exported here")
        try:
            if not stop.requested:
                stop.allow()
            missing = self.held_stages.gather(plan, max(0.0, min(GATHER_S, stop.left_s - SAVE_S)))
            stop.hold()
        except StopRequested:
            self.say("stopping without the weights of all stages: the run directories of their holders have them")
            return
        for stage, why in sorted(missing.items()):
            self.say(f"the weights of stage {stage} are not here ({why}): the run directory of its holder has them")
        if not missing:
            run = shlex.quote(str(self.run.path))
            self.say(f"the weights of all stages are here: `swarm-node export {run} DIR` makes a model of them")

    def over(self) -> None:
        """At the lead: all rounds are done, so the others need not wait for another lead."""
        self.stage_transport.tell(Progress(self.progress.round, self.progress.reward, over=True))
        until = time.monotonic() + LAST_WORD_S
        while self.stage_transport.connected and time.monotonic() < until:
            time.sleep(TICK_S / 10)

    def hand_over(self, stop: Stop) -> None:
        """Before this node leaves a crew that may go on: have others of it keep the stages that it holds, as they are
        after the last update, so that nothing is lost."""
        if self._leaves:
            return
        self._leaves = True
        if self.driver is None and not self._leads:
            self._settle()
        for stage in self.held_stages.workers:
            self.held_stages.save(stage)
        plan = self.stage_transport.plan
        if plan is None or self._is_over or not self.join_command.open:
            return
        until = time.monotonic() + GATHER_S

        def left_s() -> float:
            told = stop.left_s
            return until - time.monotonic() if math.isinf(told) else told - SAVE_S

        found = self.held_stages.hand_over(plan, left_s)
        for stage, (peer, why) in sorted(found.items()):
            if peer:
                self.say(f"{self.status_text.called(peer)} keeps stage {stage} for whoever holds it next")
            else:
                self.say(self.status_text.named(f"nobody keeps stage {stage} ({why}): it is in {self.run.path}"))

    def _settle(self) -> None:
        """Make the update that the others may be making already."""
        until = time.monotonic() + SETTLE_S
        while any(worker.midway for worker in self.held_stages.workers.values()):
            message = self.stage_transport.receive(until - time.monotonic())
            if message is None:
                return
            attend(message, self.held_stages.workers, self.stage_transport.send, self._refused)
            self._after_update()

    def leave(self, stop: Stop) -> None:
        """At the end: what is held here is kept by others and on disk, and whatever becomes of the crew is not this
        node's affair."""
        try:
            self.hand_over(stop)
        finally:
            plan = self.stage_transport.plan
            if plan is not None and not self.stage_transport.whole:
                for stage, updates in self.held_stages.save_copies(plan).items():
                    self.say(
                        f"the copy of stage {stage} that was kept here, after update {updates}, is in {self.run.path} "
                        "now"
                    )
            self.held_stages.save_all()
            self.stage_transport.close()

    def metrics(self) -> dict[str, float]:
        """`stages/*` of the round that ends."""
        return ({} if self.driver is None else self.driver.calls.figures()) | self.stage_transport.metrics()

    def _mend(self, lost: StageLost) -> None:
        """Have lost stages rebuilt, here or elsewhere; returns when the crew is whole. Deposed if this is not the lead
        any more; StopRequested by a signal, also where training holds it: every stage is by itself."""
        began, before = time.monotonic(), self._holders
        self.stage_transport.doubt(lost)
        while not self.stage_transport.mend(LOOK_S):
            if self._stop is not None:
                self._stop.check()
            self._obey()
            self._waiting(began)
        self._obey()  # a stage that has passed to another is let go
        holders = self._holders = self.status_text.holders
        passed = [stage for stage, peer in enumerate(holders) if peer != before[stage]]
        if self._lost():
            back = passed or sorted(lost.stages)
            stages = ", ".join(map(str, back))
            by = ", ".join(dict.fromkeys(self.status_text.called(holders[stage]) for stage in back))
            self.say(f"stage {stages} is back after {time.monotonic() - began:.1f} s, held by {by}")
            self._aftermath.lost(f"stage {stages} was lost", self.progress)
        elif passed:
            self.say(
                "; ".join(f"stage {stage} passed to {self.status_text.called(holders[stage])}" for stage in passed)
            )
        else:
            self.say(self.status_text.named(f"crew {self.config.pipeline.crew} does a step again: {lost.why}"))

    def _lost(self) -> bool:
        """Whether any stage was lost since this was last asked."""
        before, self._losses = self._losses, self.stage_transport.metrics().get("stages/lost", 0.0)
        return self._losses > before

    def leave_lead(self) -> None:
        """Go back to answering; stage 0 is let go with what worked on it."""
        self.driver, self._leads = None, False
        self.__dict__.pop("policy", None)
        self.__dict__.pop("optimizer", None)
        self.ear.end()
        leave_cohort(self.transport)

    # ----------------------------------------------------------------- what others see

    def announce(self) -> None:
        """Until the crew is whole and this node leads it: then its card is `Member`'s affair."""
        card, layers = self.on_card()
        shown = card, self.held_stages.updates, self.cohort.id
        if self.driver is not None or shown == self._announced:
            return
        self._announced = shown
        self.transport.announce(
            PeerCard(
                protocol=PROTOCOL_VERSION,
                swarm=self.entered.manifest.swarm_id,
                created=time.time(),
                name=self.config.name or "node",
                roles=["trainer"],
                cohort=self.cohort.id,
                family=self.loading.config.model_type,
                policy_version=self.held_stages.updates,
                stages=layers,
                crew=card,
            )
        )

    def on_card(self) -> tuple[CrewCard, tuple[int, int] | None]:
        """Of the membership card: the crew, and the first and the last layer held."""
        card, plan = self.stage_transport.card, self.stage_transport.plan
        held = [] if plan is None else [plan.spans[stage] for stage in card.held]
        return card, (held[0][0], held[-1][1] - 1) if held else None

    def _may_have(self, peer: str, stage: int) -> bool:
        """Whether weights of a stage are for that peer: one of this crew, or, if they are averaged with other crews',
        of any that holds the same policy."""
        if self._in_crew(peer):
            return True
        card = self.transport.members().get(peer)
        if self.config.averaging.method == "none" or card is None or card.crew is None:
            return False
        return card.crew.architecture == self.architecture

    def shelf(self, peer: str, stage: int) -> Mapping[str, Tensor]:
        """Names and shapes of a stage that this node is to keep, since its holder leaves; RemoteProtocolError if it
        will not."""
        plan = self.stage_transport.plan
        if plan is None or stage not in plan.held_by(peer):
            raise RemoteProtocolError("stranger", f"stage {stage} is another's")
        if self._leaves or self._is_over or (self._stop is not None and self._stop.requested):
            raise RemoteProtocolError("leaving", "this node leaves as well")
        if stage in self.held_stages.workers:
            raise RemoteProtocolError("stage", f"stage {stage} is here")
        self.held_stages.replicas.asked[stage] = plan.mark
        return self.held_stages.shapes_of(stage, plan.spans)

    @property
    def _is_over(self) -> bool:
        """All rounds are done."""
        return self.stage_transport.progress is not None and self.stage_transport.progress.over

    def _in_crew(self, peer: str) -> bool:
        """Whether it is one of this crew."""
        plan = self.stage_transport.plan
        return plan is not None and bool(plan.held_by(peer) or peer in plan.spares)

    def _refused(self, error: RemoteProtocolError) -> None:
        self.stage_transport.counts[f"refused/{error.reason}"] += 1

    def status(self) -> dict[str, Any]:
        """Of the crew, as `swarm-node status` shows it. From any thread."""
        return self.status_text.status(self.held_stages, self.progress)

    def waiting(self) -> str:
        """What keeps the crew from going on, in words; empty = nothing does, or it never began. From any thread."""
        return self.status_text.missing() if self._whole_since < math.inf else ""

    def _write_status(self) -> None:
        """Of a node that does not lead; of one that does, the run writes more."""
        members, averager = self.transport.members(), self.cohort.averager
        self.run.write_status(
            {
                "swarm": self.entered.manifest.swarm_id,
                "swarm_name": self.entered.manifest.name,
                "time": time.time(),
                "peer": self.transport.peer_id,
                "name": self.config.name or "node",
                "addresses": self.transport.addresses,
                "traffic": dict(self.transport.stats()),
                "averaging": None if averager is None else averager.status(),
                "peers": {
                    peer: {
                        "name": card.name,
                        "present": True,
                        "trains": "trainer" in card.roles,
                        "policy_version": card.policy_version,
                    }
                    for peer, card in sorted(members.items())[:MAX_SHOWN]
                },
                "link": self.join_command.link,
                "crew": self.status(),
            }
        )

    def _tick(self, ended: threading.Event) -> None:
        written = 0.0
        while not ended.wait(TICK_S):
            self.stage_transport.tick()
            members, absent = self.transport.members(), self.stage_transport.absent
            here = {peer: card for peer, card in members.items() if peer not in absent}
            self.join_command.renew(self.transport.addresses, here, self.stage_transport.plan)
            if self.driver is None and time.monotonic() - written > STATUS_S:
                written = time.monotonic()
                self._write_status()

    # ----------------------------------------------------------------- what people read

    def _waiting(self, since: float) -> None:
        """Nobody has come for a stage: say how to."""
        formed = self.stage_transport.plan is not None
        if not formed or time.monotonic() >= since + self.config.pipeline.spare_wait_s + SLACK_S:
            self.invite()

    def invite(self) -> None:
        """Say what to type on another machine, if that has not been said."""
        self.join_command.tell(self._whole_since < math.inf, self.say)

    def check_room(self, everybody: bool = False) -> None:
        """UserError if the disk has no room for two checkpoints of the stage that this node is to hold; of the smallest
        one, if it is to hold any. `everybody`: of all stages, whose processes are on this machine."""
        pipeline = self.config.pipeline
        each = self.footprint.checkpoints(self.footprint.divide([UNKNOWN] * pipeline.stages))
        own = min(each) if pipeline.stage == "auto" else each[pipeline.stage]
        files = self.run.path / "stages"
        check_room(files, sum(each) if everybody else own, len(stage_files(files)))

    def _begin(self) -> None:
        """The crew is whole: from the first time on, minutes count."""
        self._whole_since = min(self._whole_since, time.monotonic())

    @property
    def minutes_over(self) -> bool:
        """This node has been in its crew for as long as it was told to."""
        minutes = self.config.minutes
        return minutes is not None and time.monotonic() - self._whole_since > 60 * minutes


def architecture_of(config: NodeConfig, loading: Plan) -> str:
    """16 hexadecimal digits: equal for those who hold stages of one policy."""
    text = loading.config.get_text_config()
    model = [getattr(text, key, None) for key in (*ARCHITECTURE, "tie_word_embeddings")]
    policy = config.policy
    trained = [policy.lora_rank, policy.lora_alpha, policy.lora_targets] if loading.lora else []
    return architecture(model, weights_digest(loading), trained, str(loading.dtype))


def longest_row(config: NodeConfig) -> int:
    """Most tokens of a prompt and one answer."""
    return config.rollouts.max_prompt_tokens + config.rollouts.max_new_tokens
