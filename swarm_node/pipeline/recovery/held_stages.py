"""The stages that this node holds for its crew: how each comes here, is kept, and leaves."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from swarm_node.config import NodeConfig
from swarm_node.errors import CheckpointError
from swarm_node.observability.reasons import words
from swarm_node.pipeline.compute.partition import Span, shapes_of_stage, trained_shapes
from swarm_node.pipeline.compute.stage_model import load_stage
from swarm_node.pipeline.compute.worker import Worker
from swarm_node.pipeline.membership.actions import BuildStage, Spans
from swarm_node.pipeline.membership.roster import counted
from swarm_node.pipeline.recovery.rebuild import StageBuilder, cohort_start
from swarm_node.pipeline.recovery.replicas import Replicas, offer_stages
from swarm_node.pipeline.recovery.stage_checkpoints import StageCheckpoints
from swarm_node.pipeline.recovery.weight_transfer import StageWeights, Wanted, WeightTransfer
from swarm_node.policy.loading import Plan as Loading
from swarm_node.say import Warned
from swarm_protocol.crew import MAX_KEPT, Holding, Kept, Plan, Source
from swarm_protocol.errors import ProtocolError
from swarm_protocol.lineage import Lineage, leads_to, shared
from swarm_protocol.transports.transfer import reason_of


@dataclass(eq=False)
class HeldStages:
    """Stages held here, by number: `workers`."""

    config: NodeConfig
    loading: Loading  # the policy, and how it is loaded
    weight_transfer: WeightTransfer
    folder: Path  # for checkpoints
    stands: Callable[[BuildStage], bool]  # whether an order is still to be carried out
    say: Callable[[str], None]
    workers: dict[int, Worker] = field(default_factory=dict)
    starts: dict[int, str] = field(default_factory=dict)  # digests of stages before any training, by number

    def __post_init__(self) -> None:
        config, transfer, say = self.config, self.weight_transfer, self.say
        self.reference = bool(config.grpo.beta)  # whether stages that come keep their weights of before training
        self.checkpoints = StageCheckpoints(self.folder, transfer.place[1], config.checkpoints.keep, say)
        self.replicas = Replicas(transfer, self.shapes_of, say)
        self._shapes = trained_shapes(config.policy, self.loading)
        self._builder = StageBuilder(self.loading, self._shapes, transfer, self.checkpoints, self.stands, say)
        self._looked: dict[int, int] = {}  # updates of stages when it was last considered whether a checkpoint is due
        self._saved: dict[int, int] = {}  # updates of the last checkpoint of each stage
        self._spans: Spans = ()

    @property
    def updates(self) -> int:
        """Updates of the stage here that has most."""
        return max((worker.updates for worker in self.workers.values()), default=0)

    def start_of(self, worker: Worker) -> str:
        """What a stage was before any training, for `cohort_of`."""
        return cohort_start(self.config, worker.stage, self.starts[worker.index])

    def shapes_of(self, stage: int, spans: Spans) -> dict[str, Tensor]:
        """The tensors that a stage trains, by name, without values (on the meta device)."""
        return shapes_of_stage(self._shapes, self.loading.config, stage, spans)

    def holding(self) -> Holding:
        """What this peer has, for the others of the crew. From any thread."""
        files = dict.fromkeys(Kept(file.stage, file.updates) for file in self.checkpoints.files())
        return Holding(
            tuple(Kept(stage, worker.updates) for stage, worker in sorted(self.workers.copy().items())),
            tuple(Kept(stage, state.updates) for stage, state in sorted(self.weight_transfer.replicas.copy().items())),
            tuple(files)[:MAX_KEPT],
        )

    def go_by(self, config: NodeConfig, reference: bool) -> None:
        """Use these options from now on, also for the stages that are here already."""
        self.config, self.reference = config, reference
        for worker in self.workers.values():
            worker.codec = config.pipeline.wire
            worker.optimizer.go_by(config.grpo)
            if reference and worker.reference is None and not self.loading.lora:
                worker.reference = load_stage(config.policy, worker.stage.span, self.say).requires_grad_(False)

    def go_to(self, run: Lineage) -> bool:
        """The crew is on that run. Returns whether it is another run, rather than a continuation of the one until now.

        Stages and replicas that do not count there are let go; stages are saved first."""
        ours = self.checkpoints.run
        if run == ours:
            return False
        held, onward = counted(self.holding(), ours, run), leads_to(ours, run)
        for stage in self.workers.keys() - {kept.stage for kept in held.live}:
            self.save(stage)
            if not onward:  # else the crew, which has counted it too, orders what becomes of it
                self.leave(stage)
        self.weight_transfer.forget({kept.stage for kept in held.replicas})
        self.checkpoints.go_to(run)
        self._saved = {stage: updates for stage, updates in self._saved.items() if updates <= shared(ours, run)}
        if not onward:
            self._looked.clear()
            self.checkpoints.round = 0
        return not onward

    def take(self, order: BuildStage, spans: Spans) -> tuple[int, Source] | str:
        """Build a stage. Returns its updates and the source that worked, or why it could not be built."""
        self._spans = spans
        built = self._builder.build(order, spans, self.config, self.reference)
        if isinstance(built, str):
            return built
        worker = self.workers[order.stage] = built.worker
        self.starts[order.stage] = built.start

        def live() -> StageWeights:
            return StageWeights(worker.optimizer.weights(), worker.updates, worker.omega)

        self.weight_transfer.hold(order.stage, live, worker.optimizer.still)
        return worker.updates, built.source

    def leave(self, stage: int) -> None:
        """Let a stage go: another peer holds it now."""
        self.workers.pop(stage, None)
        self.weight_transfer.let_go(stage)

    def recall(self, spans: Spans) -> int:
        """Before anything is held here: keep the newest checkpoints of stages of these layers as replicas.

        Peers that take such a stage can have it from here. Returns the round of the run after which the checkpoints
        were made; 0 = there are none."""
        for file in self.checkpoints.files():
            if file.stage in self.weight_transfer.replicas or file.spans != spans:
                continue
            try:
                checkpoint = self.checkpoints.read(file, Span.of(file.stage, spans))
            except CheckpointError as error:
                self.say(Warned(f"checkpoint {file.path.name} of stage {file.stage} refused: {error}"))
                continue
            state = StageWeights(checkpoint.tensors["policy"], checkpoint.round, float(checkpoint.state["omega"]))
            self.weight_transfer.replicas[file.stage] = state
            self.checkpoints.round = max(self.checkpoints.round, int(checkpoint.state["round"]))
        return self.checkpoints.round

    def updated(self, plan: Plan) -> None:
        """Between two updates: write checkpoints and renew replicas that are due."""
        every = self.config.checkpoints.every
        for stage, worker in self.workers.items():
            looked = self._looked.get(stage, 0)
            self._looked[stage] = worker.updates
            if worker.updates // every <= looked // every:  # all stages after the same updates
                continue
            if self.checkpoints.store(stage).busy:  # training does not wait for a slow disk
                self.say(f"no checkpoint of stage {stage} after update {worker.updates}: the last is not written yet")
            else:
                self.save(stage)
        self.replicas.renew(plan, self.config, self.loading.lora, self.updates)

    def save(self, stage: int) -> None:
        """Write a checkpoint of a stage in the background, unless its last update has been saved."""
        worker, store = self.workers[stage], self.checkpoints.store(stage)
        if not worker.updates or (self._saved.get(stage) == worker.updates and not store.failed):
            return
        store.wait()
        optimizer = worker.optimizer
        with optimizer.still():  # this may be another thread than the one that trains
            tensors = {"policy": optimizer.weights(), "optimizer": optimizer.state_dict()}
            self.checkpoints.save(stage, self._spans, worker.updates, worker.omega, tensors)
        self._saved[stage] = worker.updates

    def save_soon(self) -> bool:
        """Save the stages here, except those whose last checkpoint is not written yet. Returns whether that was all."""
        idle = [stage for stage in self.workers if not self.checkpoints.store(stage).busy]
        for stage in idle:
            self.save(stage)
        return len(idle) == len(self.workers)

    def save_all(self) -> None:
        """Save all stages here; they are on disk when this returns. Raises UserError if one could not be written."""
        self.checkpoints.wait()  # a checkpoint that fails is written again
        for stage in list(self.workers):
            self.save(stage)
        self.checkpoints.close()

    def hand_over(self, plan: Plan, left_s: Callable[[], float]) -> dict[int, tuple[str, str]]:
        """See `offer_stages`."""
        updates = {stage: worker.updates for stage, worker in self.workers.items()}
        return offer_stages(self.weight_transfer, plan, updates, left_s)

    def gather(self, plan: Plan, seconds: float) -> dict[int, str]:
        """At the end of a run: save the weights of stages that other peers hold, for an export of the policy.

        Stages are fetched one after the other, since all together may be more than this machine holds, or else taken
        from a replica that is as new as the stages here. Returns the stages that are not on disk then, and why."""
        until = time.monotonic() + seconds
        missing = {}
        for stage, assignment in enumerate(plan.assignments):
            if stage in self.workers:
                continue
            like = self.shapes_of(stage, plan.spans)
            fetch = self.weight_transfer.fetch(assignment.peer, Wanted(stage, *plan.spans[stage], True), like)
            try:
                weights = fetch.result(max(0.0, until - time.monotonic()))
            except (NotYet, ProtocolError) as error:
                replica = self.weight_transfer.replicas.get(stage)
                if replica is None or replica.updates < self.updates or replica.tensors.keys() != like.keys():
                    missing[stage] = "no answer in time" if isinstance(error, NotYet) else words(reason_of(error)[0])
                    continue
                weights = replica
            self._save_copy(stage, plan.spans, weights)
        return missing

    def save_copies(self, plan: Plan) -> dict[int, int]:
        """Save replicas of whole stages that are newer than any checkpoint here: no other peer may have them.

        They are on disk when this returns. Returns the updates of each."""
        files = {file.stage: file.updates for file in reversed(self.checkpoints.files())}
        copies = {
            stage: state
            for stage, state in sorted(self.weight_transfer.replicas.items())
            if stage < len(plan.assignments)
            and state.tensors.keys() == self.shapes_of(stage, plan.spans).keys()
            and state.updates > files.get(stage, 0)
        }
        for stage, state in copies.items():
            self._save_copy(stage, plan.spans, state)
        return {stage: state.updates for stage, state in copies.items()}

    def _save_copy(self, stage: int, spans: Spans, state: StageWeights) -> None:
        self.checkpoints.save(stage, spans, state.updates, state.omega, {"policy": state.tensors})
        self.checkpoints.store(stage).wait()
