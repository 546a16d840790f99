"""The stages that this node holds for its crew: how each comes here, is kept, and leaves.

    take(order)   own layers of the base model -> weights from the first source that has them -> Worker
    updated()     after an update: sometimes renew the replica of a neighbour, or write a checkpoint
    leave(stage)  forget it
    hand_over()   this node goes: have others keep what was trained here

Sources (`recovery.paths` puts them in order): a peer that has the stage in memory, a neighbour's replica, the same
stage of another crew, mean or copy of neighbours (CheckFree, CheckFree+), a checkpoint of this node's, the base model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import torch
from torch import Tensor

from protocol.crew import MAX_KEPT, Holding, Kept, Plan, Source
from protocol.errors import ProtocolError, RemoteProtocolError
from protocol.lineage import NO_RUN, Lineage, leads_to, read_lineage, shared
from swarm_node.averaging.cohort import cohort_of
from swarm_node.config import NodeConfig
from swarm_node.errors import CheckpointError, UserError
from swarm_node.grpo.optimizer import Optimizer
from swarm_node.grpo.trainer import default_learning_rate
from swarm_node.pipeline.compute.partition import Span, parts_of
from swarm_node.pipeline.compute.stage_model import ADAPTED, Stage, load_stage
from swarm_node.pipeline.compute.worker import Worker
from swarm_node.pipeline.membership.actions import BuildStage, Spans
from swarm_node.pipeline.membership.leader import counted
from swarm_node.pipeline.recovery.checkfree import RATE, Neighbour, checkfree
from swarm_node.pipeline.recovery.stage_files import StageFile, stage_files
from swarm_node.pipeline.recovery.weight_transfer import PER_PEER, StageWeights, Wanted, WeightTransfer, layer_of
from swarm_node.pipeline.stage_cohort import averaged
from swarm_node.policy.adapters import lora_config, with_adapter
from swarm_node.policy.engines.native import SUPPORTED, Slice
from swarm_node.policy.engines.transformers import ModelSlice
from swarm_node.policy.loading import Plan as Loading
from swarm_node.policy.loading import skeleton
from swarm_node.policy.policy import digest_of, lines
from swarm_node.policy.probes import is_windowed
from swarm_node.storage.checkpoints import CheckpointStore, read_checkpoint

MANY_STAGES, EVERY = 4, 20
"""With so many stages, all weights trained, a copy of them is due every so many updates; else after each."""
WAIT_S = 0.1
SLOWER, MOST_S = 1.05, 1.0
"""Whoever is asked whether it has a stage by now is asked ever less often: not MAX_ASKS times in two minutes."""
AGAIN_S = 0.5
ASK_S = 2.0
"""A peer that is asked to keep a stage answers within so long, or another is asked."""
TRIES = 4
"""Times that a peer is asked which says that it is not to give a stage away."""
FAR = 10.0
"""A stage of another crew is further from the start than so many times the start's own norm: it is no trained one."""


@dataclass(frozen=True)
class Unavailable(Exception):
    """A source that does not have what it was said to have."""

    why: str


class HeldStages:
    """Stages held here, by number: `workers`."""

    def __init__(
        self,
        config: NodeConfig,
        loading: Loading,
        weight_transfer: WeightTransfer,
        folder: Path,
        me: str,
        stands: Callable[[BuildStage], bool],
        say: Callable[[str], None],
    ) -> None:
        """`loading`: what the policy is and how it is loaded. `folder` is for checkpoints. `stands` says whether an
        order is still to be carried out."""
        self.config = config
        self.reference = bool(config.grpo.beta)
        """Stages that come keep their weights of before training."""
        self.weight_transfer = weight_transfer
        self.workers: dict[int, Worker] = {}
        self.starts: dict[int, str] = {}
        """Digests of stages before any training, by number: equal for those who hold the same stage of one model."""
        self._loading = loading
        self._parts = parts_of(loading.config)
        self._shapes = shapes(config, loading)
        self._folder = folder
        self._me = me
        self._stands = stands
        self._say = say
        self._optimizers: dict[int, Optimizer] = {}
        self._stores: dict[int, CheckpointStore] = {}
        self._saved: dict[int, int] = {}
        self._looked: dict[int, int] = {}
        """Updates of stages when it was last considered whether a checkpoint is due."""
        self._cramped: set[int] = set()
        """Stages of which no replica fits here, as was said."""
        self._spans: Spans = ()
        self.asked: dict[int, int] = {}
        """Stages that a peer which leaves has asked this one to keep -> mark of the plan by which it held them; they
        are kept until there is an update by another."""
        self.run = NO_RUN
        """Of which these stages are: files of another count only up to where they forked."""
        self._left_out = 0
        """Files that do not count."""
        self.round = 0
        """Of the run, as its stages are now."""

    # ----------------------------------------------------------------- what is here

    @property
    def updates(self) -> int:
        """Behind the stage here that has most."""
        return max((worker.updates for worker in self.workers.values()), default=0)

    def optimizer(self, stage: int) -> Optimizer:
        return self._optimizers[stage]

    def holding(self) -> Holding:
        """For the others. From any thread."""
        files = dict.fromkeys(Kept(file.stage, file.updates) for file in self._files())
        return Holding(
            tuple(Kept(stage, worker.updates) for stage, worker in sorted(self.workers.copy().items())),
            tuple(Kept(stage, state.updates) for stage, state in sorted(self.weight_transfer.replicas.copy().items())),
            tuple(files)[:MAX_KEPT],
        )

    # ----------------------------------------------------------------- coming and going

    def go_by(self, config: NodeConfig, reference: bool) -> None:
        """From now on, also with the stages that are here already."""
        self.config, self.reference = config, reference
        for stage, worker in self.workers.items():
            worker.codec = config.pipeline.wire
            self._optimizers[stage].go_by(config.grpo)
            if reference and worker.reference is None and not self._loading.lora:
                worker.reference = load_stage(config.policy, worker.stage.span, self._say).requires_grad_(False)

    def go_to(self, run: Lineage) -> bool:
        """The crew's run is that one: whether it is another, rather than what the one until now has gone on to. Stages
        and copies that do not count are let go, stages when they are written."""
        if run == self.run:
            return False
        held, onward = counted(self.holding(), self.run, run), leads_to(self.run, run)
        for stage in self.workers.keys() - {kept.stage for kept in held.live}:
            self.save(stage)
            if not onward:  # else the crew, which has counted it too, orders what becomes of it
                self.leave(stage)
        self.weight_transfer.forget({kept.stage for kept in held.replicas})
        self._saved = {stage: n for stage, n in self._saved.items() if n <= shared(self.run, run)}
        self.run = run
        if not onward:
            self._looked.clear()
            self.round = 0
        left_out = len(stage_files(self._folder)) - len(self._files())
        if left_out > self._left_out:
            self._say(f"checkpoints in {self._folder} that do not count, being of another run or branch: {left_out}")
        self._left_out = left_out
        return not onward

    def take(self, order: BuildStage, spans: Spans) -> tuple[int, Source] | str:
        """Build a stage: its updates and how it was come by, or why it cannot be. `spans`: layers of all stages."""
        self._spans = spans
        span = Span(order.stage, len(spans), *order.layers, int(self._loading.config.num_hidden_layers))
        stage = load_stage(self.config.policy, span, self._say)
        self.starts[order.stage] = digest_of(lines(stage.named(trainable=False).items(), adapters=True))
        optimizer = self._new_optimizer(stage)
        worker = Worker(stage, optimizer, self.config.pipeline.wire, self._is_native(stage))
        if self.reference:
            worker.keep_reference()
        why = "no source was given"
        for source in sorted(order.sources, key=partial(self._rank, order.sources)):
            if not self._stands(order):
                return "it is not wanted any more"
            try:
                self._come_by(worker, optimizer, source, order)
            except (ProtocolError, CheckpointError, Unavailable, UserError, ValueError) as error:
                why = str(error)  # UserError: a file that may not be read
                self._say(f"{stage.span} could not be had as {source.way}: {why}")
                continue
            self.workers[order.stage], self._optimizers[order.stage] = worker, optimizer
            self.weight_transfer.hold(order.stage, partial(self._state, order.stage), optimizer.still)
            return worker.updates, source
        return why

    def leave(self, stage: int) -> None:
        """Another peer has it now."""
        self.workers.pop(stage, None)
        self._optimizers.pop(stage, None)
        self.weight_transfer.let_go(stage)

    def _new_optimizer(self, stage: Stage) -> Optimizer:
        trained = sum(tensor.numel() for tensor in self._shapes.values())
        rate = self.config.grpo.learning_rate or default_learning_rate(self._loading.lora, trained)
        shared = [] if stage.shared is None else [stage.shared]
        return Optimizer(stage.named().items(), self.config.grpo, rate, shared)

    # ----------------------------------------------------------------- sources

    def _rank(self, sources: Sequence[Source], source: Source) -> bool:
        """In the order given; but a checkpoint here that is as new as the first has the optimiser's moments as well."""
        mine = source.way == "snapshot" and source.peers == (self._me,)
        return not (mine and source.updates == sources[0].updates)

    def recall(self, spans: Spans) -> int:
        """Before anything is held here: read the newest checkpoints of stages of these layers, so that whoever takes
        such a stage can have it from this peer. The round after which they were made; 0 = there are none."""
        for file in self._files():
            if file.stage in self.weight_transfer.replicas or file.spans != spans:
                continue
            try:
                checkpoint = read_checkpoint(file.path, partial(self._not_of, self._span(file.stage, spans)))
            except CheckpointError as error:
                self._say(f"checkpoint {file.path.name} of stage {file.stage} refused: {error}")
                continue
            state = StageWeights(checkpoint.tensors["policy"], checkpoint.round, float(checkpoint.state["omega"]))
            self.weight_transfer.replicas[file.stage] = state
            self.round = max(self.round, int(checkpoint.state["round"]))
        return self.round

    def _come_by(self, worker: Worker, optimizer: Optimizer, source: Source, order: BuildStage) -> None:
        """Give `worker` its weights; Unavailable, ProtocolError or CheckpointError, with nothing lost, if they are not
        to be had so."""
        span, mine, spans = worker.stage.span, worker.stage.named(), self._spans
        whole = Wanted(span.index, span.first, span.end, rest=True)
        match source.way:
            case "base":
                return
            case "snapshot":
                self._from_file(worker, optimizer, source)
                return
            case "live" | "replica" | "cohort":
                if source.way == "cohort":
                    self._check_cohort(worker, optimizer, source.peers[0])
                wanted = Wanted(whole.stage, whole.first, whole.end, True, replica=source.way == "replica")
                state = self._fetch(source.peers[0], wanted, mine, order)
                made, updates = dict(state.tensors), state.updates
            case "mean" | "copy":
                states = [
                    self._fetch(peer, Wanted(stage, *spans[stage], rest=False), self.shapes_of(stage, spans), order)
                    for peer, stage in zip(source.peers, source.stages, strict=True)
                ]
                neighbours = [Neighbour(state.tensors, state.omega) for state in states]
                before, after = (neighbours[0], neighbours[-1]) if source.way == "mean" else (neighbours[0], None)
                made = checkfree(before, after, span.end - span.first, span.first)
                rest = [name for name in mine if layer_of(name) is None]
                if rest:
                    ends = Wanted(span.index, 0, 0, rest=True, replica=True)
                    made |= self._fetch(source.peers[0], ends, mine, order).tensors
                updates = max(state.updates for state in states)
        if made.keys() != mine.keys():
            raise Unavailable(f"{len(made)} tensors of {len(mine)} are kept there")
        if source.way == "cohort":
            check_near(made, optimizer.weights())
        with torch.no_grad():
            for name, tensor in optimizer.weights().items():
                tensor.copy_(made[name])
        optimizer.publish()
        worker.updates = optimizer.updates = updates
        if source.way in ("mean", "copy"):
            optimizer.rate_scale = RATE
        else:
            worker.omega = state.omega

    def _check_cohort(self, worker: Worker, optimizer: Optimizer, peer: str) -> None:
        """Unavailable unless its card says that this very stage's weights are averaged with its own. It shows the
        cohort of one stage, though it may hold several."""
        config, start = self.config.averaging, self.start_of(worker)
        if config.method == "none":
            raise Unavailable("nothing is averaged with other crews")
        cohort = cohort_of(config, self.weight_transfer.place[0], start, averaged(worker, optimizer))
        card = self.weight_transfer.transport.members().get(peer)
        if card is None or card.cohort != cohort:
            raise Unavailable(f"peer …{peer[-8:]} is not in the cohort of this stage")

    def start_of(self, worker: Worker) -> str:
        """What `worker`'s stage was before any training, for `cohort_of`."""
        scale = self.config.policy.lora_alpha if worker.stage.is_lora else ""
        return f"{self.starts[worker.index]} {scale}"

    def _fetch(self, peer: str, wanted: Wanted, like: Mapping[str, Tensor], order: BuildStage) -> StageWeights:
        if peer == self._me:
            return self._own(wanted, like)
        fetch, tries = self.weight_transfer.fetch(peer, wanted, like), 1
        while True:
            try:
                return fetch.result(WAIT_S)
            except NotYet:
                if not self._stands(order):
                    raise Unavailable("it is not wanted any more") from None
            except RemoteProtocolError as error:
                if error.reason not in ("stranger", "busy") or tries == TRIES:
                    raise
                time.sleep(AGAIN_S)  # it may not have heard of the plan yet by which this peer takes the stage
                fetch, tries = self.weight_transfer.fetch(peer, wanted, like), tries + 1

    def _own(self, wanted: Wanted, like: Mapping[str, Tensor]) -> StageWeights:
        state = self.weight_transfer.replicas.get(wanted.stage) if wanted.replica else None
        if state is None and wanted.stage in self.workers and not wanted.replica:
            state = self._state(wanted.stage)
        if state is None:
            raise Unavailable(f"stage {wanted.stage} is not here")
        inside = {
            name: tensor
            for name, tensor in state.tensors.items()
            if (wanted.rest if (layer := layer_of(name)) is None else wanted.first <= layer < wanted.end)
        }
        return StageWeights(inside, state.updates, state.omega)

    def _state(self, stage: int) -> StageWeights:
        worker = self.workers[stage]
        return StageWeights(self._optimizers[stage].weights(), worker.updates, worker.omega)

    def shapes_of(self, stage: int, spans: Spans) -> dict[str, Tensor]:
        """What a stage trains, without values (on the meta device)."""
        first, end = spans[stage]
        ends = {0} if stage == 0 else set()
        ends |= {1} if stage == len(spans) - 1 else set()
        return {
            name: tensor
            for name, tensor in self._shapes.items()
            if (ends & self._ends_of(name) if (layer := layer_of(name)) is None else first <= layer < end)
        }

    def _ends_of(self, name: str) -> set[int]:
        """At which ends of the policy a tensor of no layer is: 0 = first stage, 1 = last."""
        if name.removeprefix(ADAPTED).startswith(self._parts.embedding.removesuffix(".weight")):
            return {0, 1} if self._loading.config.tie_word_embeddings else {0}
        return {1}

    # ----------------------------------------------------------------- after an update

    def updated(self, plan: Plan) -> None:
        """Between two updates."""
        for stage, worker in self.workers.items():
            every, looked = self.config.checkpoints.every, self._looked.get(stage, 0)
            self._looked[stage] = worker.updates
            if worker.updates // every <= looked // every:  # all stages after the same updates
                continue
            if self.store(stage).busy:  # nobody waits for a slow disk
                self._say(f"no checkpoint of stage {stage} after update {worker.updates}: the last is not written yet")
            else:
                self.save(stage)
        apart = replica_every(self.config, self._loading.lora)
        kept = {stage: part for stage in kept_for(plan, self._me) if (part := replicated(self.config, stage))}
        for stage, mark in self.asked.copy().items():  # another thread adds to it
            if mark != plan.mark:
                self.asked.pop(stage, None)
        self.weight_transfer.forget(kept.keys() | self.asked.keys())
        for stage, part in kept.items():
            known = self.weight_transfer.replicas.get(stage)
            if known is None or not known.updates <= self.updates < known.updates + apart:
                like = self.shapes_of(stage, plan.spans)
                if part == "rest":
                    like = {name: tensor for name, tensor in like.items() if layer_of(name) is None}
                size = 4 * sum(tensor.numel() for tensor in like.values())
                if known is None and 0 < self.weight_transfer.room() < 2 * size:  # the rest is for whoever works here
                    if stage not in self._cramped:
                        self._say(f"no replica of stage {stage} is kept here: its {size / 2**30:.2g} GiB do not fit")
                    self._cramped.add(stage)
                    continue
                self.weight_transfer.keep(stage, plan.assignments[stage].peer, like)

    def save(self, stage: int) -> None:
        """Checkpoint of a stage, written in the background."""
        worker, store = self.workers[stage], self.store(stage)
        if not worker.updates or (self._saved.get(stage) == worker.updates and not store.failed):
            return
        optimizer = self._optimizers[stage]
        store.wait()
        with optimizer.still():  # this may be another thread than that which trains
            tensors = {"policy": optimizer.weights(), "optimizer": optimizer.state_dict()}
            store.save(worker.updates, tensors, self._kept_state(worker.stage.span, worker.omega))
        self._saved[stage] = worker.updates

    def save_soon(self) -> bool:
        """Checkpoints of the stages here, but of none whose last one is not written yet: nobody waits for a slow disk.
        Whether that was all."""
        idle = [stage for stage in self.workers if not self.store(stage).busy]
        for stage in idle:
            self.save(stage)
        return len(idle) == len(self.workers)

    def _kept_state(self, span: Span, omega: float) -> dict[str, object]:
        return {
            "run": self.run,
            "time": time.time(),
            "architecture": self.weight_transfer.place[1],
            "span": str(span),
            "spans": self._spans,
            "omega": omega,
            "round": self.round,
        }

    def save_all(self) -> None:
        """Checkpoints of all stages here; they are on disk when it returns. UserError if one of them could not be."""
        for store in list(self._stores.values()):
            store.wait()  # if that fails, it is written again
        for stage in list(self.workers):
            self.save(stage)
        stores = list(self._stores.values())
        for store in stores:
            store.wait()
        for store in stores:
            store.close()

    def hand_over(self, plan: Plan, left_s: Callable[[], float]) -> dict[int, tuple[str, str]]:
        """Before this peer goes: have another of the crew keep each stage that was trained here. By stage: who does, or
        nobody, and why not. `left_s` says how much longer it may take."""
        asked = {stage: takers(plan, stage, self._me) for stage, worker in self.workers.items() if worker.updates}
        found = {stage: ("", "there is no time") for stage, peers in asked.items() if peers}
        pause = WAIT_S
        while asked and left_s() > 0:
            for stage, peers in list(asked.items())[:PER_PEER]:  # no peer is given more at a time
                if not peers:
                    del asked[stage]
                    continue
                updates, timeout = self.workers[stage].updates, min(ASK_S, max(WAIT_S, left_s()))
                try:
                    if self.weight_transfer.offer(peers[0], stage, updates, timeout).result(timeout) >= updates:
                        found[stage] = peers[0], ""
                        del asked[stage]
                except (ProtocolError, NotYet) as error:
                    found[stage] = "", str(error) or "no answer"
                    del peers[0]
            time.sleep(min(pause, max(0.0, left_s())))
            pause = min(SLOWER * pause, MOST_S)
        return found

    def gather(self, plan: Plan, seconds: float) -> dict[int, str]:
        """At the end of a run: put the weights of stages that others hold beside those of the stages here, for whoever
        exports the policy; one after the other, since all together may be more than this machine holds. The stages that
        could not be had in time, and why. They are on disk when it returns."""
        until = time.monotonic() + seconds
        wanted = {stage: seat.peer for stage, seat in enumerate(plan.assignments) if stage not in self.workers}
        missing = {}
        for stage, peer in wanted.items():
            like = self.shapes_of(stage, plan.spans)
            fetch = self.weight_transfer.fetch(peer, Wanted(stage, *plan.spans[stage], True), like)
            try:
                weights = fetch.result(max(0.0, until - time.monotonic()))
            except NotYet:
                missing[stage] = f"no answer within {seconds:g} s"
            except ProtocolError as error:
                missing[stage] = str(error)
            else:
                self._write(stage, plan.spans, weights)
        return missing

    def save_copies(self, plan: Plan) -> dict[int, int]:
        """Nobody may be left who has them: write replicas kept here that are of whole stages and newer than any file.
        Updates of each; they are on disk when it returns."""
        files = {file.stage: file.updates for file in sorted(self._files(), key=lambda file: file.updates)}
        copies = {
            stage: state
            for stage, state in sorted(self.weight_transfer.replicas.items())
            if stage < len(plan.assignments)
            and state.tensors.keys() == self.shapes_of(stage, plan.spans).keys()
            and state.updates > files.get(stage, 0)
        }
        for stage, state in copies.items():
            self._write(stage, plan.spans, state)
        return {stage: state.updates for stage, state in copies.items()}

    def _write(self, stage: int, spans: Spans, state: StageWeights) -> None:
        """A checkpoint of a stage that another peer held."""
        span = Span(stage, len(spans), *spans[stage], int(self._loading.config.num_hidden_layers))
        self.store(stage).save(state.updates, {"policy": state.tensors}, self._kept_state(span, state.omega))
        self.store(stage).wait()

    def _from_file(self, worker: Worker, optimizer: Optimizer, source: Source) -> None:
        stage = worker.stage.span
        if source.peers != (self._me,):
            raise Unavailable("the checkpoint is not on this machine")
        files = [file for file in self._files() if (file.stage, file.updates) == (stage.index, source.updates)]
        if not files:
            raise Unavailable(f"there is no checkpoint after update {source.updates}")
        checkpoint = read_checkpoint(files[0].path, partial(self._not_of, str(stage)))
        weights = checkpoint.tensors["policy"]
        mine = optimizer.weights()
        if mine.keys() != weights.keys() or any(mine[name].shape != weights[name].shape for name in mine):
            raise CheckpointError("its tensors are not those of this stage")
        if moments := checkpoint.tensors.get("optimizer"):  # of a stage that another peer held there are none
            optimizer.load_state_dict(moments, checkpoint.round)
        with torch.no_grad():
            for name, tensor in mine.items():
                tensor.copy_(weights[name])
        optimizer.publish()
        worker.updates, worker.omega = checkpoint.round, float(checkpoint.state["omega"])
        optimizer.updates = worker.updates

    def store(self, stage: int) -> CheckpointStore:
        """Of a stage's checkpoints."""
        if stage not in self._stores:
            # One made at a time of its own must not cost the update that the others of the crew have as well.
            keep = self.config.checkpoints.keep + 1
            self._stores[stage] = CheckpointStore(self._folder / str(stage), keep, self._say)
        return self._stores[stage]

    def _files(self) -> list[StageFile]:
        """Checkpoints of this run in the folder, newest first."""
        return [file for file in stage_files(self._folder) if file.counts(self.run)]

    def _not_of(self, span: str, state: dict[str, object]) -> str | None:
        """Why a checkpoint is not of that stage of this run, or `None`."""
        ours = shared(read_lineage(state.get("run")), self.run) >= 0
        if not ours or state.get("architecture") != self.weight_transfer.place[1] or "round" not in state:
            return "it is of another run"
        return None if state.get("span") == span else f"it is {state.get('span')}"

    def _span(self, stage: int, spans: Spans) -> str:
        return str(Span(stage, len(spans), *spans[stage], int(self._loading.config.num_hidden_layers)))

    # ----------------------------------------------------------------- engines

    @torch.inference_mode()
    def _is_native(self, stage: Stage) -> bool:
        """Whether the native engine gives what the model's own layers give."""
        backbone = stage.base.get_decoder()
        rollouts = self.config.rollouts
        longest = rollouts.max_prompt_tokens + rollouts.max_new_tokens
        if rollouts.engine == "transformers" or stage.base.config.model_type not in SUPPORTED:
            return False
        if is_windowed(stage.base.config, longest):
            return False
        x = torch.randn(1, 5, stage.base.config.hidden_size, generator=torch.Generator().manual_seed(0))
        x = x.to(stage.device, stage.dtype)
        outs = []
        for engine in (Slice(backbone, False), ModelSlice(backbone)):
            cache = engine.cache([5], 2, 2)
            outs.append([cache.prefill(x), cache.forward(x[:, :2].flatten(0, 1), 0)])
        tolerance = 1e-3 if stage.dtype == torch.float32 else 0.25
        return all(
            bool((a - b).abs().max() <= tolerance * max(1.0, float(b.abs().max()))) for a, b in zip(*outs, strict=True)
        )


def replicated(config: NodeConfig, stage: int) -> Literal["whole", "rest", ""]:
    """What of a stage a neighbour keeps a replica of: `rest` = the tensors of no layer, where a copy of the neighbour
    stands in for the layers (CheckFree+)."""
    pipeline = config.pipeline
    stood_in_for, end = pipeline.swap and pipeline.stages >= MANY_STAGES, stage in (0, pipeline.stages - 1)
    whole = {"auto": not stood_in_for, "on": True, "ends": end, "off": False}[pipeline.replica]
    return "whole" if whole else "rest" if pipeline.swap and end else ""


def replica_every(config: NodeConfig, lora: bool) -> int:
    """Updates from one replica to the next."""
    return config.pipeline.replica_every or (1 if lora or config.pipeline.stages < MANY_STAGES else EVERY)


def kept_for(plan: Plan, me: str) -> list[int]:
    """Stages of others whose replica this peer keeps: whoever holds the stage beside one also keeps another's."""
    seats = enumerate(plan.assignments)
    holders = msgspec.structs.replace(plan, spares=())
    return [stage for stage, seat in seats if takers(holders, stage, seat.peer)[:1] == [me]]


def keeper(stage: int, count: int) -> int:
    """Whose holder keeps a replica of `stage`, unless it holds that as well: the next one's, for the last stage that of
    the one before."""
    return stage + 1 if stage < count - 1 else max(0, count - 2)


def takers(plan: Plan, stage: int, me: str) -> list[str]:
    """Who may keep `stage` when this peer, which holds it, goes, first in line first: whoever keeps its replica, the
    other neighbour, the other holders, spares."""
    count = len(plan.assignments)
    stages = [keeper(stage, count), *([stage - 1] if stage else []), *range(count)]
    peers = [*(plan.assignments[one].peer for one in stages), *plan.spares]
    return [peer for peer in dict.fromkeys(peers) if peer != me]


def shapes(config: NodeConfig, loading: Loading) -> dict[str, Tensor]:
    """What the whole policy trains, by name, without values (on the meta device)."""
    model = skeleton(loading.config)
    if not loading.lora:
        return {name: parameter.data for name, parameter in model.named_parameters()}
    with torch.device("meta"):
        adapted = with_adapter(model, lora_config(config.policy), config.policy)
    return {name: parameter.data for name, parameter in adapted.named_parameters() if parameter.requires_grad}


def check_near(weights: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> None:
    """Unavailable if `weights` are absurdly far from the `start` that they are said to have been trained from."""
    apart = sum(float((weights[name] - tensor.cpu()).double().square().sum()) for name, tensor in start.items())
    size = sum(float(tensor.double().square().sum()) for tensor in start.values())
    if not apart <= FAR**2 * size:
        raise Unavailable("its weights are absurdly far from those that it began with")
