"""A stage at work: messages in, messages out. It never acts on its own and never waits.

    training     Forward ... Forward, Backward ...      in the order of `schedule`, as soon as the next one has come
                 GradientNormRequest -> (TiedGradient to and fro) -> GradientNorm       after the last microbatch
                 Apply -> StageStatus                   an update; a repeated Apply only gets the answer
    rebuilding   Share -> TiedMatrix -> ... -> StageStatus                  after one of the two ends was rebuilt
    sampling     Prefill, Step, Step, ...               see `stage_sampling`
    afterwards   Reset                                  forget what a turn has left behind

What a microbatch leaves behind between forward and backward is kept by (microbatch, place) of the present turn. A
message of an earlier turn is dropped.

Embedding and head may be one matrix, which the first and the last stage both hold. Each adds the other's gradient to
its own, so both make the same update; the squares of that gradient count at the first. After one of them was rebuilt,
the other sends it the matrix, and both begin with new moments for it (`tied_weights`).

Where an activation or a gradient is not finite, zeros travel in its place. The stage then answers that its gradient is
not finite, so no stage applies it. It also answers how long the gradients were that other stages sent it, so that it is
not blamed for theirs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from msgspec.structs import replace
from torch import Tensor

from swarm_node.averaging.codecs import bounded
from swarm_node.grpo.optimizer import Optimizer
from swarm_node.pipeline.compute.schedule import Operation, Route, route, schedule
from swarm_node.pipeline.compute.stage_model import Stage
from swarm_node.pipeline.compute.stage_sampling import StageSampler
from swarm_node.pipeline.compute.tensor_codec import rounded, sendable
from swarm_node.pipeline.compute.tied_weights import TiedWeights
from swarm_node.pipeline.messages import LEADER, StageMessage
from swarm_node.policy.logprobs import head_logprobs
from swarm_node.policy.oom import is_out_of_memory
from swarm_protocol import pipeline as heads
from swarm_protocol.errors import RemoteProtocolError


@dataclass
class _Pass:
    """A turn over microbatches that leaves a gradient behind."""

    head: heads.Forward  # of the message that began it; turn, microbatches and order are those of all its messages
    stages: int
    operations: tuple[Operation, ...]
    done: int = 0  # number of operations that are done
    waiting: dict[Operation, StageMessage] = field(default_factory=dict)  # messages whose operation is not next yet
    held: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = field(default_factory=dict)
    """Input and output of a place, by (microbatch, place)."""

    def route(self, microbatch: int) -> Route:
        return route(self.stages, microbatch, self.head.swapped)

    def backward_of(self, head: heads.Backward | heads.LossGradient, gradient: Tensor) -> Operation:
        """The operation that a gradient belongs to. Raises RemoteProtocolError if nothing like it is held here."""
        place = head.place if isinstance(head, heads.Backward) else len(self.route(head.microbatch)) - 1
        held = self.held.get((head.microbatch, place))
        if held is None:
            raise RemoteProtocolError("order", f"a gradient of microbatch {head.microbatch}, which is not held here")
        if held[1].shape != gradient.shape:
            raise RemoteProtocolError("shape", f"a gradient {list(gradient.shape)} of {list(held[1].shape)}")
        return Operation("B", head.microbatch, place)


class Worker:
    """One stage of a policy and its optimiser."""

    def __init__(
        self, stage: Stage, optimizer: Optimizer, codec: heads.ActivationCodec = "float32", native: bool = False
    ) -> None:
        """`codec`: how values travel, since both ends of a tied matrix must know the same ones. `native`: sample with
        the native engine."""
        self.stage = stage
        self.optimizer = optimizer
        self.codec = codec
        self.index = stage.span.index
        self.count = stage.span.count
        self.updates = optimizer.updates  # updates of the crew that are in its weights; set by the builder of a stage
        self.new = True  # see `StageStatus`: it has neither been told how far the crew is nor begun a gradient
        self.omega = 0.0  # norm, before clipping, of its layers' gradient in the last update (CheckFree's weight)
        self.reference: Stage | None = None
        """The stage before training, for the KL term. With an adapter there is none: the adapter is switched off."""
        self.tied: TiedWeights | None = None  # the trained matrix that the stage at the other end holds too
        if stage.shared is not None:
            self.tied = TiedWeights(stage.shared, stage.named()[stage.shared], self.count - 1 - self.index)
        self._device, self._dtype = stage.device, stage.dtype
        self._turn = 0
        self._forgotten = 0  # turns up to this one
        self._pass: _Pass | None = None
        self._sampler = StageSampler(stage, native)
        self._total = 0  # number of the sum that its gradient is
        self._spoiled = False  # a part of the sum is not finite
        self._came: dict[int, float] = {}  # stage -> squares of what it added to the sum
        self._norm: float | None = None  # of its layers' gradient, once it has been asked for

    def averaged(self) -> dict[str, Tensor]:
        """The live weights that are averaged with other crews; a matrix that two stages hold is averaged at the first
        only."""
        weights = self.optimizer.weights()
        if self.index > 0 and self.tied is not None:
            del weights[self.tied.name]
        return weights

    # ----------------------------------------------------------------- messages

    def handle(self, message: StageMessage) -> list[StageMessage]:
        """Do what can be done now. Returns the messages that follow.

        Raises RemoteProtocolError (order, shape, values), with no gradient changed, for a message that makes no sense.
        """
        head = message.head
        match head:
            case heads.Forward() | heads.Backward() | heads.LossGradient() | heads.Prefill() | heads.Step():
                if not self._is_present(head.turn):
                    return []
                try:
                    return self._work(message)
                except (RuntimeError, MemoryError) as exc:
                    if not is_out_of_memory(exc):
                        raise
                    self._forget(head.turn)
                    return [StageMessage(LEADER, heads.TurnFailed(head.turn, self.index, "memory"))]
            case heads.GradientNormRequest():
                return self._gradient_norm(head)
            case heads.TiedGradient():
                return self._add_tied(head, message.tensors[0])
            case heads.Apply():
                return self._apply(head)
            case heads.SetUpdates():
                self.updates, self.new = head.update, False
                return [self._status()]
            case heads.Share():
                return self._share(head)
            case heads.TiedMatrix():
                return self._take(head, message.tensors[0])
            case heads.StatusRequest():
                return [self._status()]
            case heads.Reset():
                self._forget(head.turn)
                return []
        raise RemoteProtocolError("order", f"a {type(head).__name__} is not for a stage")

    def finished(self, turn: int) -> bool:
        """Whether every microbatch of that turn has come back."""
        return self._pass is not None and self._pass.head.turn == turn and self._pass.done == len(self._pass.operations)

    @property
    def midway(self) -> bool:
        """Whether other stages may be making an update that is still to be made here."""
        return self._norm is not None

    def keep_reference(self) -> None:
        """Keep the present weights for the KL term."""
        if not self.stage.is_lora:
            self.reference = copy.deepcopy(self.stage).requires_grad_(False).eval()

    def _is_present(self, turn: int) -> bool:
        """Whether it is the present turn: the latest seen, and not forgotten. A later one becomes the present turn."""
        if turn < self._turn or turn <= self._forgotten:
            return False
        if turn > self._turn:
            self._drop()
            self._turn = turn
        return True

    def _forget(self, turn: int) -> None:
        self._forgotten = max(self._forgotten, turn)
        if self._turn <= turn:
            self._drop()

    def _drop(self) -> None:
        self._pass = None
        self._sampler.drop()

    def _work(self, message: StageMessage) -> list[StageMessage]:
        head = message.head
        match head:
            case heads.Prefill():
                return [self._sampler.prefill(message, head)]
            case heads.Step():
                return [self._sampler.step(message, head)]
            case heads.Forward(total=0):
                return self._forward(message, head)
        return self._in_order(message)

    # ----------------------------------------------------------------- microbatches

    def _in_order(self, message: StageMessage) -> list[StageMessage]:
        """Keep the message until its operation is next, and do all operations that can be done."""
        head, run = message.head, self._pass
        if isinstance(head, heads.Forward):
            if run is None:
                run = self._begin(head)
            began = run.head.microbatches, run.head.swapped, self._total
            if (head.microbatches, head.swapped, head.total) != began:
                raise RemoteProtocolError("order", f"microbatch {head.microbatch} is of another pass")
            operation = Operation("F", head.microbatch, head.place)
        elif run is None:
            raise RemoteProtocolError("order", "a gradient of a microbatch that never came")
        else:
            assert isinstance(head, heads.Backward | heads.LossGradient)
            operation = run.backward_of(head, message.tensors[0])
        if operation in run.waiting or operation not in run.operations[run.done :]:
            raise RemoteProtocolError("order", f"{operation} is not to be done, or was before")
        run.waiting[operation] = message
        out: list[StageMessage] = []
        while run.done < len(run.operations) and run.operations[run.done] in run.waiting:
            operation = run.operations[run.done]
            message = run.waiting.pop(operation)
            if isinstance(message.head, heads.Forward):
                out += self._forward(message, message.head)
            else:
                out += self._backward(message, operation, run)
            run.done += 1
        return out

    def _begin(self, head: heads.Forward) -> _Pass:
        if head.total < self._total:
            raise RemoteProtocolError("order", f"sum {head.total} after {self._total}")
        if head.total > self._total:
            self.optimizer.zero_grad()
            self._total, self._spoiled, self._norm, self.new = head.total, False, None, False
            self._came.clear()
            if self.tied is not None:
                self.tied.begin()
        operations = schedule(self.count, head.microbatches, head.swapped)[self.index]
        self._pass = _Pass(head, self.count, operations)
        return self._pass

    def _forward(self, message: StageMessage, head: heads.Forward) -> list[StageMessage]:
        x, row, col, target, *packed = message.tensors
        way = route(self.count, head.microbatch, head.swapped)
        visit = way[head.place]
        positions, mask = (t.to(self._device) for t in packed) if packed else (None, None)
        gradient = head.total > 0
        source: Tensor | None = None
        entropies: Tensor | None = None
        with torch.set_grad_enabled(gradient), self._module(head.reference) as module:
            if visit.embed:
                out = module.hidden(x.to(self._device))
            else:
                out = source = x.detach().to(self._device, self._dtype).requires_grad_(gradient)
            if visit.layers:
                out = module.layers(out, positions, mask)
            if visit.head:
                hidden = module.final(out[row.to(self._device), col.to(self._device)])
                target = target.to(self._device)
                out, entropies = head_logprobs(module.head, hidden, target, head.temperature, head.entropy)
        if gradient and self._pass is not None:
            self._pass.held[head.microbatch, head.place] = source, out
        given = self._finite(out.detach())
        if not visit.head:
            following = replace(head, place=head.place + 1)
            return [StageMessage(way[following.place].stage, following, (given, *message.tensors[1:]))]
        tensors = (given,) if entropies is None else (given, self._finite(entropies))
        return [StageMessage(LEADER, heads.Logprobs(head.turn, head.microbatch, entropies is not None), tensors)]

    def _backward(self, message: StageMessage, operation: Operation, run: _Pass) -> list[StageMessage]:
        _, i, place = operation
        source, out = run.held.pop((i, place))
        way = run.route(i)
        if place < len(way) - 1:  # the leader knows what it sent itself
            self._note(way[place + 1].stage, message.tensors[0])
        if out.requires_grad:  # an embedding that is not trained has no gradient
            out.backward(message.tensors[0].to(out.device, out.dtype))
        if place == 0:
            return []
        assert source is not None and source.grad is not None
        before = way[place - 1].stage
        return [StageMessage(before, heads.Backward(run.head.turn, i, place - 1), (self._finite(source.grad),))]

    @contextmanager
    def _module(self, reference: bool) -> Iterator[Stage]:
        """The stage; with `reference`, the stage as it was before training."""
        if not reference:
            yield self.stage
        elif self.stage.is_lora:
            adapted = hasattr(self.stage.model, "peft_config")
            with self.stage.model.disable_adapter() if adapted else nullcontext():
                yield self.stage
        else:
            assert self.reference is not None, "keep_reference() was not called"
            yield self.reference

    def _note(self, sender: int, gradient: Tensor) -> None:
        """Count the squares of a gradient that another stage sent; no more once this stage has spoiled the sum, since
        its zeros make others' gradients long."""
        if not self._spoiled:
            norm = gradient.norm().item()
            self._came[sender] = self._came.get(sender, 0.0) + norm * norm

    def _finite(self, values: Tensor) -> Tensor:
        """`values` with zeros where they cannot be sent; any zero spoils the gradient."""
        self._spoiled |= not bounded(values)
        return sendable(values)

    # ----------------------------------------------------------------- updates

    def _gradient_norm(self, head: heads.GradientNormRequest) -> list[StageMessage]:
        if head.total < self._total:
            return []
        run = self._pass
        if head.total > self._total or (run is not None and run.done < len(run.operations)):
            raise RemoteProtocolError("order", f"sum {head.total} is not complete here")
        return [self._squares()] if self.tied is None else self._exchange(self.tied)

    def _add_tied(self, head: heads.TiedGradient, rows: Tensor) -> list[StageMessage]:
        """Add rows of the other end's gradient to the own ones."""
        if head.total < self._total:
            return []
        tied = self._its_tied()
        if head.total > self._total:
            raise RemoteProtocolError("order", f"sum {head.total} has not begun here")
        tied.came(head.block, rows)
        if self.index == 0:  # the other end's is blamed; its own may be long because of what came to it
            self._note(tied.other, rows)
        return self._exchange(tied) if tied.begun else []

    def _exchange(self, tied: TiedWeights) -> list[StageMessage]:
        """The next messages about the gradient of the tied matrix."""
        blocks = tied.advance(lambda rows: rounded(self._finite(rows), self.codec))
        out = [StageMessage(tied.other, heads.TiedGradient(self._total, block), (rows,)) for block, rows in blocks]
        return [*out, self._squares()] if tied.added else out

    def _its_tied(self) -> TiedWeights:
        if self.tied is None:
            raise RemoteProtocolError("order", f"stage {self.index} has nothing tied that is trained")
        return self.tied

    def _squares(self) -> StageMessage:
        """The sum of squares of the gradient, for the leader; a tied matrix counts at the first stage only."""
        no_layer = [name for name in self.stage.named() if ".layers." not in name]
        self._norm = math.sqrt(self.optimizer.squares(no_layer))
        squares = self.optimizer.squares([] if self.tied is None or self.index == 0 else [self.tied.name])
        squares = math.inf if self._spoiled else squares
        came = tuple((stage, _known(of_it)) for stage, of_it in sorted(self._came.items()))
        return StageMessage(LEADER, heads.GradientNorm(self._total, self.index, _known(squares), came))

    def _apply(self, head: heads.Apply) -> list[StageMessage]:
        if head.update > self.updates:
            if self._norm is None:
                raise RemoteProtocolError("order", f"update {head.update} before its gradient is complete")
            self.optimizer.apply(head.scale, head.rate)
            self.updates, self.omega, self._norm = head.update, self._norm, None
        return [self._status()]

    def _share(self, head: heads.Share) -> list[StageMessage]:
        tied = self._its_tied()
        rows = tied.give(head.block)
        if head.block == 0:
            self.optimizer.renew(tied.name, tied.parameter.detach(), head.keep)
        return [StageMessage(tied.other, heads.TiedMatrix(head.keep, head.block), (rows,))]

    def _take(self, head: heads.TiedMatrix, rows: Tensor) -> list[StageMessage]:
        """Take rows of the other end's matrix; it replaces the own one when all rows have come."""
        tied = self._its_tied()
        matrix = tied.take(head.block, rows)
        if matrix is None:
            return [StageMessage(tied.other, heads.Share(head.keep, head.block + 1))]
        self.optimizer.renew(tied.name, matrix, head.keep)
        return [self._status(taken=True)]

    def _status(self, taken: bool = False) -> StageMessage:
        return StageMessage(LEADER, heads.StageStatus(self.index, self.updates, self.omega, taken, self.new))


def _known(squares: float) -> float | None:
    return squares if math.isfinite(squares) else None


def attend(
    message: StageMessage,
    workers: Mapping[int, Worker],
    send: Callable[[StageMessage], None],
    refused: Callable[[RemoteProtocolError], None],
) -> StageMessage | None:
    """Have the worker of a stage here deal with a message, and send its answers. A message for the leader is returned.

    A message that makes no sense is told to `refused` and dropped; its turn, if it has one, fails.
    """
    if message.stage == LEADER:
        return message
    try:
        worker = workers.get(message.stage)
        if worker is None:
            raise RemoteProtocolError("stage", f"stage {message.stage} is not here, or not yet")
        answers = worker.handle(message)
    except RemoteProtocolError as error:
        refused(error)
        answers = refused_turn(message.stage, message.head)
    for answer in answers:
        send(answer)
    return None


def refused_turn(stage: int, head: heads.Head) -> list[StageMessage]:
    """What the leader is told if a message for `stage` makes no sense there."""
    if not isinstance(head, heads.Forward | heads.Backward | heads.LossGradient | heads.Prefill | heads.Step):
        return []  # the leader asks again, or another stage that waits for an answer lets it know
    return [StageMessage(LEADER, heads.TurnFailed(head.turn, stage, "refused"))]
