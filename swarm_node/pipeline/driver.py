"""The lead's end of a pipeline: a policy and an optimiser that are spread over stages, as the rest of a node sees them.

    generate   prompts in as many waves as stages; each wave: Prefill -> ... -> Tokens, Step -> ... -> Tokens, ...
    passes     Forward of every microbatch -> ... -> Logprobs -> (loss, by whoever asked) -> LossGradient -> ...
    step       GradientNormRequest to all, sums of squares back, Apply (the same scale and rate) to all

Nothing here runs by itself: whoever calls is served from `MessageTransport.receive`, and the stages held here are
worked on in between. The loss of a microbatch is computed while other stages compute other microbatches.

A stage that is lost makes `passes` and `step` raise StageLost; then

    driver.again(lost)            makes the crew whole (`on_lost`) and has every stage forget what was under way

and all of it is done again: the accumulation of the step from a zero gradient (`grpo.Trainer` does that), or the
generation, with the same uniform numbers (`StagedPolicy` does that). But once an Apply has been sent there is no way
back: every stage makes the update that has not, none twice, and one that was lost before it had goes without. Who was
lost is what the stages themselves say (`StageStatus.new`): one that only missed messages still has its gradient.

A stage that refuses what it is sent ends the turn as well; after `TRIES` of them in a row that work is given up.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from statistics import median_high

import torch
from msgspec.structs import replace
from torch import Tensor

from protocol.errors import RemoteProtocolError
from protocol.pipeline import (
    Apply,
    Codec,
    Forward,
    GradientNorm,
    GradientNormRequest,
    Logprobs,
    LossGradient,
    Reset,
    SetUpdates,
    Share,
    StageStatus,
    StatusRequest,
    Tokens,
    TurnFailed,
)
from swarm_node.averaging.codecs import bounded
from swarm_node.errors import Unworkable
from swarm_node.pipeline.compute.waves import Waves
from swarm_node.pipeline.compute.worker import Worker, attend
from swarm_node.pipeline.messages import LEAD, Message, MessageTransport, StageLost, size
from swarm_node.policy.engines.base import Completion
from swarm_node.policy.logprobs import TokenBatch
from swarm_node.types import Sampling

TICK_S = 0.5
"""How long one look for messages takes at most."""
TRIES = 3
"""Turns that a stage refuses one after the other before what is asked for is given up."""


class Refused(StageLost):
    """A stage refuses a message of the work under way; no stage is lost. Doing it again may not help."""

    def __init__(self, stage: int) -> None:
        super().__init__((), f"stage {stage} refuses what it is sent")


class Driver:
    """Drives the stages of a crew."""

    def __init__(
        self,
        transport: MessageTransport,
        workers: Mapping[int, Worker],
        on_lost: Callable[[StageLost], None],
        codec: Codec = "float32",
        swapped: bool = False,
        refused: Callable[[RemoteProtocolError], None] = lambda error: None,
        patience_s: float = 120.0,
        first_turn: int = 0,
    ) -> None:
        """`workers`: the stages held here, by number, stage 0 among them. `on_lost` makes the crew whole again; it may
        change `workers`. `swapped`: CheckFree+. `refused` is told of messages that make no sense. `patience_s`: after
        so long without a message all stages are asked how far they are; who does not answer as long again is lost.
        `first_turn`: turns are counted from there, so that a new lead's are not taken for old ones."""
        self.transport = transport
        self.workers = workers
        self.on_lost = on_lost
        self.codec = codec
        self.swapped = swapped
        self.refused = refused
        self.patience_s = patience_s
        self.states: dict[int, StageStatus] = {}
        """What each stage last said of itself."""
        self.spoiled = False
        """Whether the loss had a gradient that is not finite."""
        self.updates = workers[0].updates
        """That the crew has made."""
        self.total = first_turn
        """Number of the sum that gradients are added to."""
        self._turn = first_turn  # number of the last pass or generation
        self._refusals = 0  # turns that ended so, since the last update or generation
        self._heard = time.monotonic()
        self._bytes = self._tokens = 0
        self._waited = self._trained = 0.0

    @property
    def stages(self) -> int:
        return self.transport.count

    def figures(self) -> dict[str, float]:
        """Since they were last asked for: bytes sent to other peers for each token (sampled, or in a row of a pass),
        and the share of train steps that this peer waited."""
        figures: dict[str, float] = {}
        if self._tokens:
            figures["stages/bytes_per_token"] = self._bytes / self._tokens
        if self._trained:
            figures["stages/bubble"] = self._waited / self._trained
        self._bytes = self._tokens = 0
        self._waited = self._trained = 0.0
        return figures

    def again(self, lost: StageLost) -> set[int]:
        """After StageLost: have the crew made whole, and what was under way forgotten; the stages that were rebuilt.
        Unworkable if what was under way was refused too often."""
        rebuilt: set[int] = set()
        while True:
            try:
                if isinstance(lost, Refused):
                    self._count_refusal(lost)
                else:
                    self.on_lost(lost)
                self._turn += 1  # nothing that is still said of the old one counts
                self._to_all(Reset(self._turn))
                new = {stage for stage, state in self._ask().items() if state.new}
                for stage in sorted(new):
                    self._send(Message(stage, SetUpdates(self.updates)))
                rebuilt |= new
                self._share(rebuilt)
                return rebuilt
            except StageLost as another:
                lost = another

    def _count_refusal(self, refused: Refused) -> None:
        self._refusals += 1
        if self._refusals < TRIES:
            return
        self._refusals = 0
        self._turn += 1
        self._to_all(Reset(self._turn))
        raise Unworkable(f"{refused.why}, {TRIES} times")

    def agree(self, least: int = 0) -> None:
        """Have all stages count the updates alike, whatever they were rebuilt from: what most of them say, or `least`.
        A stage that counted more than the others would take their next updates for old ones. Raises StageLost."""
        states = self._ask()
        self.updates = max(least, median_high([state.updates for state in states.values()]))
        for stage, state in states.items():
            if state.updates != self.updates or state.new:
                self._send(Message(stage, SetUpdates(self.updates)))

    def _ask(self) -> dict[int, StageStatus]:
        """What every stage says of itself. Raises StageLost."""
        self.states.clear()
        self._to_all(StatusRequest())
        while len(self.states) < self.stages:
            self._next()
        return dict(self.states)

    def _share(self, rebuilt: set[int]) -> None:
        """If one of two stages that hold the same matrix was rebuilt, have it take the other's. Raises StageLost."""
        last = self.stages - 1
        if not rebuilt.isdisjoint((0, last)):
            self._give_matrix(last if 0 in rebuilt and last not in rebuilt else 0, keep=False)

    def join_ends(self, averaged: bool) -> None:
        """If the first and the last stage hold one matrix, have them hold the same: that of the first, if it was
        `averaged` with others', else that of the one with more updates. Raises StageLost."""
        giver = 0
        if not averaged and self.stages > 1:
            states = self._ask()
            first, last = states[0].updates, states[self.stages - 1].updates
            if not first and not last:
                return  # both have the base model's
            giver = self.stages - 1 if last > first else 0
        self._give_matrix(giver, keep=averaged)

    def _give_matrix(self, giver: int, keep: bool) -> None:
        """From the first to the last stage, or the other way, if both hold it."""
        if self.workers[0].tied_name is None:
            return
        self._send(Message(giver, Share(keep)))
        while (message := self._next()) is None or not isinstance(message.head, StageStatus) or not message.head.taken:
            pass

    # ----------------------------------------------------------------- passes

    def passes(
        self, batches: Iterable[TokenBatch], temperature: float, entropy: bool, reference: bool, gradient: bool
    ) -> Iterator[tuple[TokenBatch, Tensor, Tensor | None]]:
        """As `Policy.passes`, in the order in which microbatches come back. Raises StageLost; torch.OutOfMemoryError if
        a stage is short of memory."""
        todo = list(batches)
        with self._new_turn() as turn:
            total = self.total if gradient else 0
            expected, sent = set(range(len(todo))), 0
            while expected:
                # with a gradient, the schedule says how many are let in
                while sent < len(todo) and (gradient or sent - (len(todo) - len(expected)) < 2 * self.stages):
                    head = Forward(turn, total, sent, len(todo), 0, temperature, entropy, reference, self.swapped)
                    self._forward(head, todo[sent])
                    sent += 1
                message = self._next(gradient)
                if message is None or not isinstance(message.head, Logprobs) or message.head.turn != turn:
                    continue
                i = message.head.microbatch
                if i not in expected or not self._fits(message, todo[i], entropy):
                    self.refused(RemoteProtocolError("order", f"log-probabilities of microbatch {i} as nobody wanted"))
                    continue
                expected.remove(i)
                logprobs, *entropies = (t.to(todo[i].target.device) for t in message.tensors)
                logprobs = logprobs.detach().requires_grad_(gradient)
                start = time.perf_counter()
                yield todo[i], logprobs, entropies[0] if entropy else None
                if gradient:
                    self._trained += time.perf_counter() - start
                    self._send(Message(self.stages - 1, LossGradient(turn, i), (self._upstream(logprobs),)))
            while gradient and todo and not self.workers[0].finished(turn):
                self._next(train=True)

    def _forward(self, head: Forward, batch: TokenBatch) -> None:
        tensors = [batch.input_ids, batch.row, batch.col, batch.target]
        if batch.attention_mask is not None:
            assert batch.position_ids is not None
            tensors += [batch.position_ids, batch.attention_mask]
            head = replace(head, packed=True)
        self._tokens += batch.input_ids.numel()
        self._send(Message(0, head, tuple(tensors)))

    def _fits(self, message: Message, batch: TokenBatch, entropy: bool) -> bool:
        return len(message.tensors) == 1 + entropy and all(t.shape == batch.target.shape for t in message.tensors)

    def _upstream(self, logprobs: Tensor) -> Tensor:
        """Gradient of the loss; zeros if it is not finite, which spoils the step."""
        if logprobs.grad is None:
            return torch.zeros_like(logprobs)
        if not bounded(logprobs.grad):
            self.spoiled = True
            return torch.zeros_like(logprobs)
        return logprobs.grad

    # ----------------------------------------------------------------- samples

    @torch.inference_mode()
    def generate(
        self, prompts: list[list[int]], n: int, sampling: Sampling, uniform: Tensor, eos: Tensor
    ) -> list[Completion]:
        """See `BatchEngine.decode`. Raises StageLost; torch.OutOfMemoryError if a stage is short of memory."""
        waves = Waves(prompts, n, sampling, uniform, eos, self.stages)
        with self._new_turn() as turn:
            for message in waves.begin(turn):
                self._send(message)
            self._tokens += sum(map(len, prompts))
            while not waves.done:
                answer = self._next()
                if answer is None or not isinstance(answer.head, Tokens) or answer.head.turn != turn:
                    continue
                head, (token, logprob) = answer.head, (t.cpu() for t in answer.tensors)
                if not waves.expects(head, token):
                    self.refused(RemoteProtocolError("order", f"token {head.step} of wave {head.wave} was not wanted"))
                    continue
                self._tokens += len(token)
                following = waves.take(head, token, logprob)
                if following is not None:
                    self._send(following)
            self._to_all(Reset(turn))
            self._refusals = 0
        return waves.samples()

    # ----------------------------------------------------------------- updates

    def norm(self) -> float:
        """Of the whole gradient, once all passes are done; nan if it is not finite. Raises StageLost."""
        self._to_all(GradientNormRequest(self.total))
        squares: dict[int, float | None] = {}
        while len(squares) < self.stages:
            message = self._next(train=True)
            if message is not None and isinstance(message.head, GradientNorm) and message.head.total == self.total:
                squares[message.head.stage] = message.head.squares
        found = [square for square in squares.values() if square is not None]
        return math.sqrt(sum(found)) if len(found) == self.stages and not self.spoiled else math.nan

    def apply(self, update: int, scale: float, rate: float) -> None:
        """Have every stage make that update, but for those that are rebuilt meanwhile. Raises StageLost if there is
        one before any has been told."""
        rebuilt: set[int] = set()
        told = False
        while True:
            try:
                self.states.clear()
                for stage in range(self.stages):
                    self._send(Message(stage, SetUpdates(update) if stage in rebuilt else Apply(update, scale, rate)))
                    told = True
                while any(k not in self.states or self.states[k].updates < update for k in range(self.stages)):
                    self._next(train=True)
                self._share(rebuilt)
                self._refusals = 0
                return
            except StageLost as lost:
                if not told:
                    raise
                rebuilt |= self.again(lost)

    def zero(self) -> None:
        """Begin another sum of gradients; stages begin it when they hear of its first microbatch."""
        self.total += 1
        self.spoiled = False

    # ----------------------------------------------------------------- messages

    @contextmanager
    def _new_turn(self) -> Iterator[int]:
        """Number of a new turn. If it is given up here, all stages are told."""
        self._turn += 1
        turn = self._turn
        try:
            yield turn
        except StageLost:
            raise
        except BaseException:
            for stage in range(self.stages):
                with suppress(StageLost):  # whoever needs it next will notice
                    self._send(Message(stage, Reset(turn)))
            raise

    def _to_all(self, head: GradientNormRequest | Apply | StatusRequest | Reset) -> None:
        for stage in range(self.stages):
            self._send(Message(stage, head))

    def _send(self, message: Message) -> None:
        if message.stage != LEAD and message.stage not in self.workers:
            self._bytes += size(message, self.codec)
        self._heard = time.monotonic()
        self.transport.send(message)

    def _next(self, train: bool = False) -> Message | None:
        """Deal with one message. Returns it if it is for the lead; `None` also if none comes for a while.

        train  count the time for `figures`
        """
        start = time.perf_counter()
        came = self.transport.receive(min(TICK_S, self.patience_s))
        waited = time.perf_counter() - start
        if came is None and time.monotonic() - self._heard > self.patience_s:
            self._find_lost()
        message = self._attend(came)
        if train:
            self._waited += waited
            self._trained += time.perf_counter() - start
        if message is not None and isinstance(message.head, TurnFailed) and message.head.turn == self._turn:
            if message.head.what == "refused":
                raise Refused(message.head.stage)
            raise torch.OutOfMemoryError(f"out of memory at stage {message.head.stage}")
        return message

    def _attend(self, message: Message | None) -> Message | None:
        """Have a stage here deal with a message; one for the lead is given back, and a status noted."""
        if message is None:
            return None
        self._heard = time.monotonic()
        message = attend(message, self.workers, self._send, self.refused)
        if message is not None and isinstance(message.head, StageStatus):
            self.states[message.head.stage] = message.head
        return message

    def _find_lost(self) -> None:
        """Nothing has come for long: ask all stages, and raise StageLost for those that do not answer."""
        self.states.clear()
        self._to_all(StatusRequest())
        end = time.monotonic() + self.patience_s
        while len(self.states) < self.stages and time.monotonic() < end:
            self._attend(self.transport.receive(min(TICK_S, self.patience_s)))
        missing = set(range(self.stages)) - self.states.keys()
        why = "no answer" if missing else "all answer, but what is under way does not arrive"
        raise StageLost(missing, why)
