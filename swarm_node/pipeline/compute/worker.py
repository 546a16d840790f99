"""A stage at work: messages in, messages out. It never acts on its own and never waits.

    training     Forward ... Forward, Backward ...   in the order of `schedule`, whenever what is next has come
                 GradientNormRequest -> (TiedGradient to and fro) -> GradientNorm          once every microbatch has
                 come back Apply -> StageStatus                                           an update; again: nothing but
                 the answer
    Share -> TiedMatrix -> ... -> StageStatus                      after one of the two ends was rebuilt (see below)
    sampling     Prefill, Step, Step, ... -> the next stage               the last one draws and tells the lead
    afterwards   Reset                                                    what a turn has left behind is forgotten

What a microbatch leaves behind between forward and backward is held by (microbatch, place) of the present turn; a
message of an earlier turn is dropped. Embedding and head may be one matrix, which the first and the last stage both
hold: each adds the other's gradient to its own, so both make the same update; its squares count at the first. After
one of them was rebuilt, the other gives it the matrix, and both begin with new moments for that (`tied`).

Where an activation or a gradient is not finite, zeros travel in its place and the stage answers that its gradient is
not finite, so that nobody applies it: just as in one process.
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

from protocol.errors import RemoteProtocolError
from protocol.pipeline import (
    Apply,
    Backward,
    Codec,
    Forward,
    GradientNorm,
    GradientNormRequest,
    Head,
    Logprobs,
    LossGradient,
    Prefill,
    Reset,
    SetUpdates,
    Share,
    StageStatus,
    StatusRequest,
    Step,
    TiedGradient,
    TiedMatrix,
    TurnFailed,
)
from swarm_node.averaging.codecs import bounded
from swarm_node.grpo.optimizer import Optimizer
from swarm_node.pipeline.compute.schedule import Operation, Route, route, schedule
from swarm_node.pipeline.compute.stage_model import Stage
from swarm_node.pipeline.compute.stage_sampling import StageSampler
from swarm_node.pipeline.compute.tensor_codec import rounded, sendable
from swarm_node.pipeline.compute.tied_weights import TiedWeights
from swarm_node.pipeline.messages import LEAD, Message
from swarm_node.policy.logprobs import head_logprobs
from swarm_node.policy.oom import is_out_of_memory


@dataclass
class _Pass:
    """A turn over microbatches that leaves a gradient behind."""

    turn: int
    microbatches: int
    swapped: bool
    operations: tuple[Operation, ...]
    done: int = 0
    """How many of them."""
    came: set[Operation] = field(default_factory=set)
    """What a message has come for."""
    waiting: dict[Operation, Message] = field(default_factory=dict)
    """Of those, what it is not the time for yet."""
    held: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = field(default_factory=dict)
    """What went into a place, and what came out, by (microbatch, place)."""

    def route(self, microbatch: int, stages: int) -> Route:
        return route(stages, microbatch, self.swapped)


class Worker:
    """Does what one stage has to do."""

    def __init__(self, stage: Stage, optimizer: Optimizer, codec: Codec = "float32", native: bool = False) -> None:
        """`codec` is that of the wire: of some things both ends must know the same; `native` = sample with the native
        engine, where that gives the model's own numbers."""
        self.stage = stage
        self.optimizer = optimizer
        self.codec = codec
        self.index = stage.span.index
        self.count = stage.span.count
        self.updates = optimizer.updates
        """Updates of the crew that are in its weights; whoever rebuilds it sets this."""
        self.new = True
        """It has neither been told how far the crew is nor begun a gradient: see `StageStatus`."""
        self.omega = 0.0
        """Norm, before clipping, of its layers' gradient in the last update (CheckFree's weight)."""
        self.reference: Stage | None = None
        """The stage before training, for the KL term; not needed by an adapter, which is switched off for it."""
        self.longest_held = 0
        """Most microbatches held at a time so far."""
        self.tied = (
            TiedWeights(name, stage.named()[name], self.count - 1 - self.index) if (name := stage.shared) else None
        )
        self._device, self._dtype = stage.device, stage.dtype
        self._turn = 0
        self._forgotten = 0  # turns up to this one
        self._pass: _Pass | None = None
        self._sampler = StageSampler(stage, native)
        self._total = 0  # which sum its gradient is
        self._spoiled = False
        self._norm: float | None = None  # of its layers' gradient, once it has been asked for

    # ----------------------------------------------------------------- messages

    def handle(self, message: Message) -> list[Message]:
        """Do what there is to do now, and say what follows from it.

        Raises RemoteProtocolError, with no gradient changed, for a message that makes no sense: order, shape, values.
        """
        head = message.head
        match head:
            case Forward() | Backward() | LossGradient() | Prefill() | Step():
                if not self._is_present(head.turn):
                    return []
                try:
                    return self._work(message)
                except (RuntimeError, MemoryError) as exc:
                    if not is_out_of_memory(exc):
                        raise
                    self._forget(head.turn)
                    return [Message(LEAD, TurnFailed(head.turn, self.index, "memory"))]
            case GradientNormRequest():
                return self._squares(head)
            case TiedGradient():
                return self._add(head, message.tensors[0])
            case Apply():
                return self._apply(head)
            case SetUpdates():
                self.updates, self.new = head.update, False
                return [self._state()]
            case Share():
                return self._share(head)
            case TiedMatrix():
                return self._take(head, message.tensors[0])
            case StatusRequest():
                return [self._state()]
            case Reset():
                self._forget(head.turn)
                return []
        raise RemoteProtocolError("order", f"a {type(head).__name__} is not for a stage")

    def finished(self, turn: int) -> bool:
        """Whether every microbatch of that turn has come back."""
        return self._pass is not None and self._pass.turn == turn and self._pass.done == len(self._pass.operations)

    @property
    def idle(self) -> bool:
        """No activations or caches of a turn are held."""
        return self._pass is None and self._sampler.idle

    @property
    def midway(self) -> bool:
        """The others may be making an update that is still to be made here."""
        return self._norm is not None

    def keep_reference(self) -> None:
        """Remember the present weights for the KL term."""
        if not self.stage.is_lora:
            self.reference = copy.deepcopy(self.stage).requires_grad_(False).eval()

    def _is_present(self, turn: int) -> bool:
        """Whether it is the present turn: the latest seen, and not to be forgotten."""
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
        """Nothing is under way any more."""
        self._pass = None
        self._sampler.drop()

    def _work(self, message: Message) -> list[Message]:
        head = message.head
        if isinstance(head, Prefill):
            return [self._sampler.prefill(message, head)]
        if isinstance(head, Step):
            return [self._sampler.step(message, head)]
        if isinstance(head, Forward) and not head.total:
            return self._forward(message, head)
        return self._in_order(message)

    # ----------------------------------------------------------------- microbatches

    def _in_order(self, message: Message) -> list[Message]:
        """Keep the message until its operation is next; do all operations that can be done."""
        head, run = message.head, self._pass
        if isinstance(head, Forward):
            if run is None:
                run = self._begin(head)
            if (head.microbatches, head.swapped) != (run.microbatches, run.swapped) or head.total != self._total:
                raise RemoteProtocolError("order", f"microbatch {head.microbatch} is of another pass")
            operation = Operation("F", head.microbatch, head.place)
        elif run is None:
            raise RemoteProtocolError("order", "a gradient of a microbatch that never came")
        else:
            operation = self._backward_of(message, run)
        if operation not in run.operations or operation in run.came:
            raise RemoteProtocolError("order", f"{operation} is not to be done, or was before")
        run.came.add(operation)
        run.waiting[operation] = message
        out: list[Message] = []
        while run.done < len(run.operations) and run.operations[run.done] in run.waiting:
            operation = run.operations[run.done]
            message = run.waiting.pop(operation)
            if isinstance(message.head, Forward):
                out += self._forward(message, message.head)
            else:
                out += self._backward(message, operation, run)
            run.done += 1
        return out

    def _begin(self, head: Forward) -> _Pass:
        if head.total < self._total:
            raise RemoteProtocolError("order", f"sum {head.total} after {self._total}")
        if head.total > self._total:
            self.optimizer.zero_grad()
            self._total, self._spoiled, self._norm, self.new = head.total, False, None, False
            if self.tied is not None:
                self.tied.begin()
        operations = schedule(self.count, head.microbatches, head.swapped)[self.index]
        self._pass = _Pass(head.turn, head.microbatches, head.swapped, operations)
        return self._pass

    def _backward_of(self, message: Message, run: _Pass) -> Operation:
        """Which operation a gradient is for; RemoteProtocolError if it is not one of what was given."""
        head = message.head
        assert isinstance(head, (Backward, LossGradient))
        place = head.place if isinstance(head, Backward) else len(run.route(head.microbatch, self.count)) - 1
        held = run.held.get((head.microbatch, place))
        if held is None:
            raise RemoteProtocolError("order", f"a gradient of microbatch {head.microbatch}, which is not held here")
        if held[1].shape != message.tensors[0].shape:
            raise RemoteProtocolError("shape", f"a gradient {list(message.tensors[0].shape)} of {list(held[1].shape)}")
        return Operation("B", head.microbatch, place)

    def _forward(self, message: Message, head: Forward) -> list[Message]:
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
                out, entropies = head_logprobs(
                    module.head, hidden, target.to(self._device), head.temperature, head.entropy
                )
        if gradient and self._pass is not None:
            self._pass.held[head.microbatch, head.place] = source, out
            self.longest_held = max(self.longest_held, len(self._pass.held))
        given = self._finite(out.detach())
        if not visit.head:
            following = Message(
                way[head.place + 1].stage, replace(head, place=head.place + 1), (given, *message.tensors[1:])
            )
            return [following]
        tensors = (given,) if entropies is None else (given, self._finite(entropies))
        return [Message(LEAD, Logprobs(head.turn, head.microbatch, entropies is not None), tensors)]

    def _backward(self, message: Message, operation: Operation, run: _Pass) -> list[Message]:
        _, i, place = operation
        source, out = run.held.pop((i, place))
        if out.requires_grad:  # an embedding that is not trained has no gradient
            out.backward(message.tensors[0].to(out.device, out.dtype))
        if place == 0:
            return []
        assert source is not None and source.grad is not None
        before = run.route(i, self.count)[place - 1].stage
        return [Message(before, Backward(run.turn, i, place - 1), (self._finite(source.grad),))]

    @contextmanager
    def _module(self, reference: bool) -> Iterator[Stage]:
        """The stage, or as it was before training."""
        if not reference:
            yield self.stage
        elif self.stage.is_lora:
            adapted = hasattr(self.stage.model, "peft_config")
            with self.stage.model.disable_adapter() if adapted else nullcontext():
                yield self.stage
        else:
            assert self.reference is not None, "keep_reference() was not called"
            yield self.reference

    def _finite(self, values: Tensor) -> Tensor:
        """`values`, or zeros where they cannot be sent; then the gradient is spoiled."""
        self._spoiled |= not bounded(values)
        return sendable(values)

    # ----------------------------------------------------------------- updates

    def _squares(self, head: GradientNormRequest) -> list[Message]:
        if head.total < self._total:
            return []
        run = self._pass
        if head.total > self._total or (run is not None and run.done < len(run.operations)):
            raise RemoteProtocolError("order", f"sum {head.total} is not complete here")
        return [self._squared()] if self.tied is None else self._exchange(self.tied)

    def _add(self, head: TiedGradient, rows: Tensor) -> list[Message]:
        """To the own rows of the gradient."""
        if head.total < self._total:
            return []
        tied = self._its_tied()
        if head.total > self._total:
            raise RemoteProtocolError("order", f"sum {head.total} has not begun here")
        tied.came(head.block, rows)
        return self._exchange(tied) if tied.begun else []

    def _exchange(self, tied: TiedWeights) -> list[Message]:
        """What is next of the gradients of the matrix that two stages hold."""
        blocks = tied.advance(lambda rows: rounded(self._finite(rows), self.codec))
        out = [Message(tied.other, TiedGradient(self._total, block), (rows,)) for block, rows in blocks]
        return [*out, self._squared()] if tied.added else out

    @property
    def tied_name(self) -> str | None:
        """The trained matrix that another stage holds too."""
        return None if self.tied is None else self.tied.name

    def _its_tied(self) -> TiedWeights:
        if self.tied is None:
            raise RemoteProtocolError("order", f"stage {self.index} has nothing tied that is trained")
        return self.tied

    def _squared(self) -> Message:
        outside = [name for name in self.stage.named() if ".layers." not in name]
        self._norm = math.sqrt(self.optimizer.squares(outside))
        name = self.tied_name
        squares = self.optimizer.squares([name] if name is not None and self.index > 0 else [])
        finite = not self._spoiled and math.isfinite(squares)
        return Message(LEAD, GradientNorm(self._total, self.index, squares if finite else None))

    def _apply(self, head: Apply) -> list[Message]:
        if head.update > self.updates:
            if self._norm is None:
                raise RemoteProtocolError("order", f"update {head.update} before its gradient is complete")
            self.optimizer.apply(head.scale, head.rate)
            self.updates, self.omega, self._norm = head.update, self._norm, None
        return [self._state()]

    def _share(self, head: Share) -> list[Message]:
        """Give rows of the matrix to the stage at the other end."""
        tied = self._its_tied()
        rows = tied.give(head.block)
        if head.block == 0:
            self.optimizer.renew(tied.name, tied.parameter.detach(), head.keep)
        return [Message(tied.other, TiedMatrix(head.keep, head.block), (rows,))]

    def _take(self, head: TiedMatrix, rows: Tensor) -> list[Message]:
        """Rows of the other end's matrix; that counts when all have come."""
        tied = self._its_tied()
        matrix = tied.take(head.block, rows)
        if matrix is None:
            return [Message(tied.other, Share(head.keep, head.block + 1))]
        self.optimizer.renew(tied.name, matrix, head.keep)
        return [self._state(taken=True)]

    def _state(self, taken: bool = False) -> Message:
        return Message(LEAD, StageStatus(self.index, self.updates, self.omega, taken, self.new))


def attend(
    message: Message,
    workers: Mapping[int, Worker],
    send: Callable[[Message], None],
    refused: Callable[[RemoteProtocolError], None],
) -> Message | None:
    """Have a message dealt with that came for a stage held here; it is given back if it is for the lead.

    One that makes no sense is told to `refused` and dropped; if it was of a turn, that cannot go on.
    """
    if message.stage == LEAD:
        return message
    try:
        worker = workers.get(message.stage)
        if worker is None:
            raise RemoteProtocolError("stage", f"stage {message.stage} is not here, or not yet")
        answers = worker.handle(message)
    except RemoteProtocolError as error:
        refused(error)
        answers = refusal(message.stage, message.head)
    for answer in answers:
        send(answer)
    return None


def refusal(stage: int, head: Head) -> list[Message]:
    """What the lead is told if a message for `stage` is of no use there."""
    if not isinstance(head, Forward | Backward | LossGradient | Prefill | Step):
        return []  # the lead asks again, or hears from who else waits for an answer
    return [Message(LEAD, TurnFailed(head.turn, stage, "refused"))]
