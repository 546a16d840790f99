"""The leader's end of a pipeline: passes, samples and updates of all stages.

    passes     Forward of every microbatch -> ... -> Logprobs -> (loss, by the caller) -> LossGradient -> ...
    generate   Prefill of every wave of prompts -> ... -> Tokens, Step -> ... -> Tokens, ...
    step       GradientNormRequest to all, sums of squares back, Apply (the same scale and rate) to all

Nothing here runs by itself. While a caller waits, messages are received and the stages held here do their work. The
loss of a microbatch is computed while other stages compute other microbatches.

A lost stage makes `passes` and `step` raise StageLost. Then `again` makes the crew whole and has every stage
forget the work under way, and the caller does that work again: `grpo.Trainer` the step from a zero gradient,
`StagedEngine` the generation with the same uniform numbers. But once an Apply has been sent, the update is made. Every
stage makes it once; a stage that was lost before goes without. A stage itself says whether it was lost
(`StageStatus.new`): one that only missed messages still has its gradient.

A stage that refuses a message ends the turn as well. After `TRIES` such turns in a row the work is given up, if there
is other work. If that goes on, if there is no other, or if what is under way never arrives though all stages answer, a
stage is given up (`hindrances`).

A step is skipped if a stage says of its gradient what cannot be: it is not finite, or absurdly longer than others';
and of the last stage, if the loss over its log-probabilities has a gradient that is not finite. So is a stage that
sends another a gradient absurdly longer than the loss's; what follows from that at other stages is not their fault. The
stage is named, and lost if that happens `TRIES` times within `RECENT` steps, or `OFTEN` times within `LONG`. What is
merely unusual is used, and the stage is named: a long gradient makes the step of all stages short.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import pairwise
from statistics import median_high, median_low
from typing import TypeVar

import torch
from msgspec.structs import replace
from torch import Tensor

from swarm_node.averaging.codecs import bounded
from swarm_node.errors import Unworkable
from swarm_node.pipeline.compute.schedule import route
from swarm_node.pipeline.compute.waves import Waves
from swarm_node.pipeline.hindrances import Hindrances
from swarm_node.pipeline.messages import StageLost, StageMessage
from swarm_node.pipeline.stage_calls import NothingArrives, StageCalls, TurnRefused
from swarm_node.policy.engines.base import Completion
from swarm_node.policy.logprobs import TokenBatch
from swarm_node.say import Say, Warned
from swarm_node.types import Sampling
from swarm_protocol import pipeline as heads
from swarm_protocol.errors import RemoteProtocolError

T = TypeVar("T")
TRIES = 3  # turns that end in a refusal, one after the other, before the work is given up; see also `RECENT`
RECENT = 10  # steps within which a stage is lost that says `TRIES` times what cannot be
OFTEN, LONG = 10, 100  # as `TRIES` and `RECENT`, of a stage that says it now and then
MOST_SQUARES = 1e6  # times their median that a stage's squares may be: its norm is a thousand times the others'
UNUSUAL_SQUARES = 1e3  # times their median from which on a stage is named
MOST_USUAL = 1e24  # squares that are usual in no training
MOST_SENT = 1e12  # times those of the loss's gradient that squares of a gradient between stages may be


class Driver:
    """Drives the stages of a crew; to a trainer it is the optimiser of all of them."""

    def __init__(
        self,
        calls: StageCalls,
        on_lost: Callable[[StageLost], None],
        swapped: bool = False,
        say: Say = lambda sentence: None,
    ) -> None:
        """`on_lost` makes the crew whole again; it may change the stages held here. `swapped`: odd microbatches take
        another order of stages (CheckFree+). `say` is told of stages whose gradients are unusual."""
        self.calls = calls
        self.workers = calls.workers
        self.stages = calls.stages
        self.on_lost = on_lost
        self.swapped = swapped
        self._say = say
        self.spoiled = False  # whether the loss had a gradient that is not finite
        self._loss_squares = 0.0  # of the gradient of the loss
        self.updates = calls.workers[0].updates  # updates that the crew has made
        self.total = calls.turn  # number of the sum that gradients are added to
        ways = (route(self.stages, i, swapped) for i in range(4))  # they recur
        self._ways = {(b.stage, a.stage) for way in ways for a, b in pairwise(way)} | {(self.stages - 1, 0)}
        """(sender, receiver) of gradients, those of a tied matrix among them."""
        self.decay = 1.0  # factor of the schedule on the learning rate
        self.unusable = ""  # see `AnyOptimizer`
        self._refusals = 0  # turns that ended in one, since the last update or generation
        self._hindrances = Hindrances()
        self._doubted: deque[Collection[int]] = deque(maxlen=LONG)  # by step: stages that said what cannot be
        self._unusual: deque[Collection[int]] = deque(maxlen=RECENT)  # by step: stages whose gradients were unusual

    # ----------------------------------------------------------------- after a loss

    def again(self, lost: StageLost, others: bool = False) -> set[int]:
        """After StageLost: make the crew whole, and have every stage forget the work under way.

        Returns the stages that were rebuilt. `others`: raises Unworkable if that work was refused too often, as other
        work may succeed."""
        rebuilt: set[int] = set()
        while True:
            try:
                lost = self._judged(lost, others)
                if not isinstance(lost, TurnRefused):
                    self.on_lost(lost)
                self.calls.forget()
                new = {stage for stage, status in self.calls.ask().items() if status.new}
                for stage in sorted(new):
                    self.calls.send(StageMessage(stage, heads.SetUpdates(self.updates)))
                rebuilt |= new
                self._share(rebuilt)
                return rebuilt
            except StageLost as another:
                lost = another

    def despite_losses(self, act: Callable[[], T]) -> T:
        """The result of `act`, which is done again whenever a stage is lost meanwhile."""
        while True:
            try:
                return act()
            except StageLost as lost:
                self.again(lost)

    def _judged(self, lost: StageLost, others: bool) -> StageLost:
        """`lost`, or the loss of a stage that is given up as work has failed too often. Unworkable: see `again`; also
        if all stages that may be at fault are held here."""
        away = set(range(self.stages)) - self.workers.keys()
        if isinstance(lost, NothingArrives):
            stage = self._hindrances.blamed("nothing arrives", away, self.stages - 1)
        elif isinstance(lost, TurnRefused):
            self._refusals += 1
            if self._refusals < TRIES:
                return lost
            self._refusals = 0
            near = {lost.stage}.union(*(ends for ends in self._ways if lost.stage in ends))
            stage = self._hindrances.blamed("refused", near & away, lost.stage, TRIES if others else 1)
            if stage is None:
                self.calls.forget()
                raise Unworkable(f"{lost.why}, {TRIES} times")
        else:
            return lost
        return lost if stage is None else StageLost({stage}, f"{lost.why}, again and again")

    def agree(self, least: int = 0) -> None:
        """Set the count of updates in all stages to what most of them say, or to `least`. Raises StageLost.

        A stage that counted more than the others would take their next updates for old ones."""
        statuses = self.calls.ask()
        self.updates = max(least, median_high([status.updates for status in statuses.values()]))
        for stage, status in statuses.items():
            if status.updates != self.updates or status.new:
                self.calls.send(StageMessage(stage, heads.SetUpdates(self.updates)))

    def join_ends(self, averaged: bool) -> None:
        """If the first and the last stage hold one matrix, make the two copies equal. Raises StageLost.

        The copy of the first stage counts if it was `averaged` with others', else that of the end with more updates."""
        giver = 0
        if not averaged and self.stages > 1:
            statuses = self.calls.ask()
            first, last = statuses[0].updates, statuses[self.stages - 1].updates
            if not first and not last:
                return  # both copies are the base model's
            giver = self.stages - 1 if last > first else 0
        self._give_matrix(giver, keep=averaged)

    def _share(self, rebuilt: set[int]) -> None:
        """If an end was rebuilt, and both hold one matrix, have it take the other end's. Raises StageLost."""
        last = self.stages - 1
        if not rebuilt.isdisjoint((0, last)):
            self._give_matrix(last if 0 in rebuilt and last not in rebuilt else 0, keep=False)

    def _give_matrix(self, giver: int, keep: bool) -> None:
        """Have one end send the matrix to the other, if both hold it."""
        if self.workers[0].tied is None:
            return
        self.calls.send(StageMessage(giver, heads.Share(keep)))
        while (answer := self.calls.answer(heads.StageStatus)) is None or not answer[0].taken:
            pass

    # ----------------------------------------------------------------- passes

    def passes(
        self, batches: Iterable[TokenBatch], temperature: float, entropy: bool, reference: bool, gradient: bool
    ) -> Iterator[tuple[TokenBatch, Tensor, Tensor | None]]:
        """See `Policy.passes`; microbatches are in the order in which they come back.

        Raises StageLost; StageOutOfMemory."""
        todo, calls = list(batches), self.calls
        with calls.new_turn() as turn:
            total = self.total if gradient else 0
            expected, sent = set(range(len(todo))), 0
            while expected:
                # With a gradient, the schedule limits how many are under way.
                while sent < len(todo) and (gradient or sent - (len(todo) - len(expected)) < 2 * self.stages):
                    head = heads.Forward(turn, total, sent, len(todo), 0, temperature, entropy, reference, self.swapped)
                    calls.tokens += todo[sent].input_ids.numel()
                    calls.send(_forward(head, todo[sent]))
                    sent += 1
                answer = calls.answer(heads.Logprobs, gradient)
                if answer is None:
                    continue
                i, tensors = answer[0].microbatch, answer[1]
                wanted = [todo[i].target.shape] * (1 + entropy) if i in expected else None
                if [t.shape for t in tensors] != wanted:
                    calls.refused(RemoteProtocolError("order", f"log-probabilities of microbatch {i} were not wanted"))
                    continue
                expected.remove(i)
                logprobs, *entropies = (t.to(todo[i].target.device) for t in tensors)
                logprobs = logprobs.detach().requires_grad_(gradient)
                start = time.perf_counter()
                yield todo[i], logprobs, entropies[0] if entropy else None
                if gradient:
                    calls.trained_s += time.perf_counter() - start
                    calls.send(StageMessage(self.stages - 1, heads.LossGradient(turn, i), (self._upstream(logprobs),)))
            while gradient and todo and not self.workers[0].finished(turn):
                calls.next(train=True)

    def _upstream(self, logprobs: Tensor) -> Tensor:
        """Gradient of the loss; zeros if it is not finite, and then the step is spoiled."""
        if logprobs.grad is not None and bounded(logprobs.grad):
            self._loss_squares += logprobs.grad.norm().item() ** 2
            return logprobs.grad
        self.spoiled |= logprobs.grad is not None
        return torch.zeros_like(logprobs)

    # ----------------------------------------------------------------- samples

    @torch.inference_mode()
    def generate(
        self, prompts: list[list[int]], n: int, sampling: Sampling, uniform: Tensor, eos: Tensor
    ) -> list[Completion]:
        """See `BatchEngine.decode`. Raises StageLost; StageOutOfMemory."""
        waves, calls = Waves(prompts, n, sampling, uniform, eos, self.stages), self.calls
        with calls.new_turn() as turn:
            for message in waves.begin(turn):
                calls.send(message)
            calls.tokens += sum(map(len, prompts))
            while not waves.done:
                answer = calls.answer(heads.Tokens)
                if answer is None:
                    continue
                head, (token, logprob) = answer[0], (t.cpu() for t in answer[1])
                if not waves.expects(head, token):
                    calls.refused(RemoteProtocolError("order", f"token {head.step} of wave {head.wave} was not wanted"))
                    continue
                calls.tokens += len(token)
                following = waves.take(head, token, logprob)
                if following is not None:
                    calls.send(following)
            calls.to_all(heads.Reset(turn))
            self._refusals = 0
            self._hindrances.done("nothing arrives")
        return waves.samples()

    # ----------------------------------------------------------------- updates

    def zero_grad(self) -> None:
        """Begin another sum of gradients; stages begin it with its first microbatch."""
        self.total += 1
        self.spoiled, self._loss_squares = False, 0.0

    def step(self) -> tuple[float, float]:
        """See `Optimizer.step`. After StageLost the gradient must be computed again, from `zero_grad` on."""
        optimizer = self.workers[0].optimizer
        norm, rate = self._norm(), optimizer.rate() * self.decay
        if math.isfinite(norm):
            self._apply(min(1.0, optimizer.grad_clip / norm) if norm else 1.0, rate)
        self.zero_grad()
        return norm, rate

    def state_dict(self) -> dict[str, Tensor]:
        """Nothing: each stage has checkpoints of its own."""
        return {}

    def load_state_dict(self, tensors: dict[str, Tensor], updates: int) -> None:
        """Nothing, see `state_dict`."""

    def _norm(self) -> float:
        """Norm of the whole gradient, once all passes are done; nan if it is not finite, or a stage says what cannot
        be. Raises StageLost, also for a stage that does so again and again."""
        self.calls.to_all(heads.GradientNormRequest(self.total))
        squares: dict[int, float | None] = {}
        sent: dict[tuple[int, int], float | None] = {}
        while len(squares) < self.stages:
            answer = self.calls.answer(heads.GradientNorm, train=True)
            if answer is not None and answer[0].total == self.total:
                stage, squares[stage] = answer[0].stage, answer[0].squares
                sent |= {(sender, stage): of_it for sender, of_it in answer[0].came if (sender, stage) in self._ways}
        doubtful = to_blame(impossible(squares, self.workers), sent, MOST_SENT * self._loss_squares)
        if self.spoiled and not doubtful:
            doubtful[self.stages - 1] = "log-probabilities over which the loss has a gradient that is not finite"
        self._doubted.append(doubtful.keys() - self.workers.keys())
        lost = {stage for stage in doubtful if self._is_doubted(stage)}
        if lost:
            self._doubted.clear()
            raise StageLost(lost, " and ".join(f"it says {doubtful[stage]}" for stage in sorted(lost)))
        self.unusable = "; ".join(f"stage {stage} says {what}" for stage, what in sorted(doubtful.items()))
        self._tell_unusual(squares)
        return math.nan if self.unusable else math.sqrt(math.fsum(filter(None, squares.values())))

    def _is_doubted(self, stage: int) -> bool:
        """Whether a stage said too often what cannot be."""
        said = [stage in each for each in self._doubted]
        return sum(said[-RECENT:]) >= TRIES or sum(said) >= OFTEN

    def _tell_unusual(self, squares: Mapping[int, float | None]) -> None:
        """Name the stages whose gradients are unusual, unless they were in the last steps, too."""
        found = {} if self.unusable else impossible(squares, self.workers, UNUSUAL_SQUARES)
        for stage in sorted(found.keys() - {stage for each in self._unusual for stage in each}):
            self._say(Warned(f"stage {stage} says {found[stage]}: the steps of all stages are shorter for it"))
        self._unusual.append(found.keys())

    def _apply(self, scale: float, rate: float) -> None:
        """Have every stage make the next update; a stage that is rebuilt meanwhile only counts it.

        Raises StageLost if a stage is lost before any has been told."""
        update, statuses = self.updates + 1, self.calls.statuses
        rebuilt: set[int] = set()
        told = False
        while True:
            try:
                statuses.clear()
                for stage in range(self.stages):
                    head = heads.SetUpdates(update) if stage in rebuilt else heads.Apply(update, scale, rate)
                    self.calls.send(StageMessage(stage, head))
                    told = True
                while any(k not in statuses or statuses[k].updates < update for k in range(self.stages)):
                    self.calls.next(train=True)
                self._share(rebuilt)
                self.updates, self._refusals = update, 0
                self._hindrances.done("nothing arrives", "refused")
                return
            except StageLost as lost:
                if not told:
                    raise
                rebuilt |= self.again(lost)


def impossible(squares: Mapping[int, float | None], own: Collection[int], most: float = MOST_SQUARES) -> dict[int, str]:
    """Stages that say of their gradient what cannot be, and what they say.

    `squares`: of the gradient of each stage, None if it is not finite; those of the stages in `own` are computed here,
    and hold for usual whatever others say. `most`: times the usual ones that squares may be."""
    known = {stage: square for stage, square in squares.items() if square is not None}
    median = median_low([square for square in known.values() if square] or [0.0])
    usual = min(MOST_USUAL, max([median, *(square for stage, square in known.items() if stage in own)]))
    said = {stage: "that its gradient is not finite" for stage in squares.keys() - known.keys()}
    for stage, square in known.items():
        if square > most * usual:
            said[stage] = f"that its gradient has norm {math.sqrt(square):.2g}, where {math.sqrt(usual):.2g} is usual"
    return said


def to_blame(doubtful: Mapping[int, str], sent: Mapping[tuple[int, int], float | None], most: float) -> dict[int, str]:
    """Those of `doubtful` that others did not make so; if there are none, the stages that did, and what they said.

    `sent`: (sender, receiver) -> squares of gradients, as the receiver says; more than `most` cannot be. What a stage
    computes and passes on after it received such a gradient is not its fault. If every sender received one, the one
    nearest to the loss began. Where a stage computes what is not finite, others get zeros, which they multiply."""
    long = sorted(ends for ends, squares in sent.items() if squares is None or squares > most)
    received = {receiver for _, receiver in long}
    said = {stage: what for stage, what in doubtful.items() if stage not in received}
    if said or not long:
        return said
    guilty = {sender for sender, _ in long} - received or {long[-1][0]}
    for sender, receiver in long:
        if sender in guilty:
            squares = sent[sender, receiver]
            norm, usual = math.inf if squares is None else math.sqrt(squares), math.sqrt(most)
            said[sender] = f"to stage {receiver} that the gradient has norm {norm:.2g}, where {usual:.2g} is the most"
    return said


def _forward(head: heads.Forward, batch: TokenBatch) -> StageMessage:
    tensors = [batch.input_ids, batch.row, batch.col, batch.target]
    if batch.attention_mask is not None:
        assert batch.position_ids is not None
        tensors += [batch.position_ids, batch.attention_mask]
        head = replace(head, packed=True)
    return StageMessage(0, head, tuple(tensors))
