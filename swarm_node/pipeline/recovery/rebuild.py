"""Build a stage: its layers of the base model, then weights from the first source that has them.

    live, replica   the stage's weights, from a peer that holds it or keeps a replica of it
    cohort          the same, from a peer of another crew that averages this stage
    mean, copy      layers of the neighbours (`checkfree`); tensors of no layer from a replica
    snapshot        a checkpoint of this node, with the optimiser's moments
    base            nothing: the base model stays

`recovery.sources` puts the sources in order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_node.averaging.cohort import cohort_of
from swarm_node.config import NodeConfig
from swarm_node.errors import CheckpointError, UserError
from swarm_node.grpo.optimizer import Optimizer
from swarm_node.grpo.trainer import default_learning_rate
from swarm_node.pipeline.compute.partition import Span, layer_of, shapes_of_stage
from swarm_node.pipeline.compute.stage_model import Stage, load_stage
from swarm_node.pipeline.compute.stage_sampling import is_native_exact
from swarm_node.pipeline.compute.worker import Worker
from swarm_node.pipeline.membership.actions import BuildStage, Spans
from swarm_node.pipeline.recovery.checkfree import RATE, Neighbour, checkfree
from swarm_node.pipeline.recovery.stage_checkpoints import StageCheckpoints
from swarm_node.pipeline.recovery.weight_transfer import StageWeights, Wanted, WeightTransfer
from swarm_node.policy.digests import lines, model_digest
from swarm_node.policy.loading import Plan as Loading
from swarm_node.say import Warned
from swarm_protocol.crew import Source
from swarm_protocol.errors import ProtocolError, RemoteProtocolError

WAIT_S = 0.1  # between two looks whether a stage that is being fetched is still wanted
REFETCH_S = 0.5
"""Before a peer that refused is asked again: it may not yet know the plan by which this peer takes the stage."""
TRIES = 4  # times that a peer is asked for a stage
FAR = 10.0  # weights of another crew must not be further from the start than so many times the start's own norm


class Unavailable(Exception):
    """A source does not have what it was said to have."""


@dataclass(frozen=True)
class Built:
    """A stage that was built."""

    worker: Worker
    source: Source  # the source that worked
    start: str  # digest of the stage before any training: equal for peers that hold the same stage of one model


@dataclass(frozen=True)
class StageBuilder:
    """Builds stages that this peer is to hold."""

    loading: Loading
    shapes: Mapping[str, Tensor]  # all tensors that the policy trains
    transfer: WeightTransfer
    checkpoints: StageCheckpoints
    stands: Callable[[BuildStage], bool]  # whether an order is still to be carried out
    say: Callable[[str], None]

    def build(self, order: BuildStage, spans: Spans, config: NodeConfig, reference: bool) -> Built | str:
        """Build a stage, or say why it cannot be built. `reference`: it keeps its weights of before training."""
        stage = load_stage(config.policy, Span.of(order.stage, spans), self.say)
        start = model_digest(lines(stage.named(trainable=False).items(), adapters=True))
        native = is_native_exact(stage, config.rollouts)
        worker = Worker(stage, self._new_optimizer(stage, config), config.pipeline.wire, native)
        if reference:
            worker.keep_reference()
        # a checkpoint here that is as new as the first source has the optimiser's moments as well: it comes before
        best = Source("snapshot", (self.transfer.me,), updates=order.sources[0].updates)
        for source in sorted(order.sources, key=lambda source: source != best):
            if not self.stands(order):
                return "it is not wanted any more"
            try:
                if source.way == "cohort":
                    self._check_cohort(worker, start, source.peers[0], config)
                if source.way == "snapshot":
                    self._load_checkpoint(worker, source)
                elif source.way != "base":
                    self._load(worker, source, order, spans)
            except (ProtocolError, CheckpointError, Unavailable, UserError, ValueError) as error:
                why = str(error)  # UserError: a file that may not be read
                self.say(Warned(f"{stage.span} could not be built from {source.way}: {why}"))
                continue
            return Built(worker, source, start)
        return why

    def _new_optimizer(self, stage: Stage, config: NodeConfig) -> Optimizer:
        trained = sum(tensor.numel() for tensor in self.shapes.values())
        rate = config.grpo.learning_rate or default_learning_rate(self.loading.lora, trained)
        shared = [] if stage.shared is None else [stage.shared]
        return Optimizer(stage.named().items(), config.grpo, rate, shared)

    def _load(self, worker: Worker, source: Source, order: BuildStage, spans: Spans) -> None:
        """Give `worker` weights of other peers. If that fails, `worker` stays as it is."""
        span, mine = worker.stage.span, worker.stage.named()
        if source.way in ("mean", "copy"):
            weights = self._from_neighbours(worker, source, order, spans)
        else:
            wanted = Wanted(span.index, span.first, span.end, rest=True, replica=source.way == "replica")
            weights = self._fetch(source.peers[0], wanted, mine, order)
        if weights.tensors.keys() != mine.keys():
            raise Unavailable(f"it has {len(weights.tensors)} tensors instead of {len(mine)}")
        if source.way == "cohort":
            check_near(weights.tensors, worker.optimizer.weights())
        _write(worker, weights.tensors, weights.updates)
        if source.way in ("mean", "copy"):
            worker.optimizer.rate_scale = RATE
        else:
            worker.omega = weights.omega

    def _from_neighbours(self, worker: Worker, source: Source, order: BuildStage, spans: Spans) -> StageWeights:
        """CheckFree, or CheckFree+ at an end."""
        span, mine = worker.stage.span, worker.stage.named()
        states = []
        for peer, stage in zip(source.peers, source.stages, strict=True):
            like = shapes_of_stage(self.shapes, self.loading.config, stage, spans)
            states.append(self._fetch(peer, Wanted(stage, *spans[stage], rest=False), like, order))
        neighbours = [Neighbour(state.tensors, state.omega) for state in states]
        after = neighbours[-1] if source.way == "mean" else None
        made = checkfree(neighbours[0], after, span.end - span.first, span.first)
        if any(layer_of(name) is None for name in mine):
            ends = Wanted(span.index, 0, 0, rest=True, replica=True)
            made |= self._fetch(source.peers[0], ends, mine, order).tensors
        return StageWeights(made, max(state.updates for state in states), 0.0)

    def _check_cohort(self, worker: Worker, start: str, peer: str, config: NodeConfig) -> None:
        """Raise Unavailable unless the peer's card shows the cohort of this very stage.

        A card shows the cohort of one stage, though its peer may hold several."""
        if config.averaging.method == "none":
            raise Unavailable("nothing is averaged with other crews")
        start = cohort_start(config, worker.stage, start)
        cohort = cohort_of(config.averaging, self.transfer.place[0], start, worker.averaged())
        card = self.transfer.transport.members().get(peer)
        if card is None or card.cohort != cohort:
            raise Unavailable(f"peer …{peer[-8:]} is not in the cohort of this stage")

    def _fetch(self, peer: str, wanted: Wanted, like: Mapping[str, Tensor], order: BuildStage) -> StageWeights:
        if peer == self.transfer.me:
            if (own := self.transfer.own(wanted)) is None:
                raise Unavailable(f"stage {wanted.stage} is not here")
            return own
        fetch, tries = self.transfer.fetch(peer, wanted, like), 1
        while True:
            try:
                return fetch.result(WAIT_S)
            except NotYet:
                if not self.stands(order):
                    raise Unavailable("it is not wanted any more") from None
            except RemoteProtocolError as error:
                if error.reason not in ("stranger", "busy") or tries == TRIES:
                    raise
                time.sleep(REFETCH_S)
                fetch, tries = self.transfer.fetch(peer, wanted, like), tries + 1

    def _load_checkpoint(self, worker: Worker, source: Source) -> None:
        if source.peers != (self.transfer.me,):
            raise Unavailable("the checkpoint is not on this machine")
        key = worker.index, source.updates
        file = next((file for file in self.checkpoints.files() if (file.stage, file.updates) == key), None)
        if file is None:
            raise Unavailable(f"there is no checkpoint after update {source.updates}")
        checkpoint = self.checkpoints.read(file, worker.stage.span)
        weights, optimizer = checkpoint.tensors["policy"], worker.optimizer
        mine = optimizer.weights()
        if mine.keys() != weights.keys() or any(mine[name].shape != weights[name].shape for name in mine):
            raise CheckpointError("its tensors are not those of this stage")
        if moments := checkpoint.tensors.get("optimizer"):  # there are none of a stage that another peer held
            optimizer.load_state_dict(moments, checkpoint.round)
        _write(worker, weights, checkpoint.round)
        worker.omega = float(checkpoint.state["omega"])


def cohort_start(config: NodeConfig, stage: Stage, start: str) -> str:
    """What a stage was before any training, for `cohort_of`; `start` is its digest."""
    return f"{start} {config.policy.lora_alpha if stage.is_lora else ''}"


def check_near(weights: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> None:
    """Raise Unavailable if `weights` are absurdly far from the `start` that they are said to be trained from."""
    apart = sum(float((weights[name] - tensor.cpu()).double().square().sum()) for name, tensor in start.items())
    size = sum(float(tensor.double().square().sum()) for tensor in start.values())
    if not apart <= FAR**2 * size:
        raise Unavailable("its weights are absurdly far from those that it began with")


@torch.no_grad()
def _write(worker: Worker, weights: Mapping[str, Tensor], updates: int) -> None:
    for name, tensor in worker.optimizer.weights().items():
        tensor.copy_(weights[name])
    worker.optimizer.publish()
    worker.updates = worker.optimizer.updates = updates
