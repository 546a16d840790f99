"""A small language model in stages that get lost: what `recovery` trains, as the CheckFree paper does, from scratch.

A Llama over bytes (float32), its layers in stages of equal length; embedding, final norm and head are a stage of their
own that is never lost, as in the paper's code. Text is that of `averaging_lm`. Each step reads it on, all arms of a
seed the same rows in the same order, none of them twice, so the loss of a step before its update is a loss on unseen
text. Adam without decay, a constant learning rate after a short warm-up, each stage's gradient clipped to norm 1: the
paper's.

A stage is lost at the beginning of a step. It is made anew of the nearest stages that are left, with an optimiser of
its own that starts anew and 1.1 times the learning rate from then on, and the step goes on. Or a neighbour kept a copy
of its weights, without the optimiser's moments, which is one step old or more: those begin anew too, nothing else
changes. One process computes all stages; no number depends on that.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.averaging_lm import corpus, held_out_loss, windows
from benchmarks.recovery_methods import METHODS, gradient_norm
from swarm_node.pipeline.recovery.checkfree import RATE, Neighbour

CLIP = 1.0


@dataclass(frozen=True)
class Task:
    """What is learned."""

    steps: int = 1500
    hidden: int = 144
    layers: int = 8
    stages: int = 4
    rows: int = 4
    """Of a step; the first half is the even microbatch, the second the odd one."""
    length: int = 64
    """Bytes of context."""
    learning_rate: float = 5e-4
    """Best of 3e-4 ... 4e-3 for `none` after 300 steps (seed 100)."""
    warm_up: int = 50
    held_out: int = 512
    """Windows, at the end."""
    watched: int = 64
    """The first of them, looked at every `every` steps."""
    every: int = 50


@dataclass(frozen=True)
class Arm:
    """What is done about a lost stage."""

    method: str = ""
    """Of METHODS, or `replica`; none = no stage is ever lost."""
    every: int = 1
    """Steps between two copies that a neighbour takes of a stage (`replica`)."""
    norms: str = "before"
    """Gradient norms that weights are made of: `before` clipping, `clipped`, or `squared` (before clipping)."""
    swapped: bool = False
    """The odd microbatch runs the first two stages, and the last two, in swapped order."""
    twins: bool = False
    """Of two stages that are swapped, either is a copy of the other, as in the paper's code; else only ends are."""


def failures(rate: float, seed: int, steps: int, stages: int) -> list[tuple[int, ...]]:
    """Stages lost at the beginning of each step, each with probability `rate`; a longer trace begins as a shorter."""
    rng = random.Random(f"failures/{rate}/{seed}")
    return [tuple(k for k in range(stages) if rng.random() < rate) for _ in range(steps)]


def nearest(lost: Collection[int], stage: int, stages: int) -> tuple[int | None, int | None]:
    """The nearest stages before and after that are not lost."""
    before = next((k for k in reversed(range(stage)) if k not in lost), None)
    return before, next((k for k in range(stage + 1, stages) if k not in lost), None)


def swapped(count: int) -> list[int]:
    """1, 0, 2, ..., count - 1, count - 2: the order of stages for odd microbatches."""
    order = list(range(count))
    order[:2], order[-2:] = order[1::-1], order[:-3:-1]
    return order


def new_model(task: Task, seed: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=task.hidden,
        intermediate_size=8 * task.hidden // 3,
        num_hidden_layers=task.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=task.length,
        tie_word_embeddings=True,
        use_cache=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


class Run:
    """One arm, from one seed."""

    def __init__(self, task: Task, arm: Arm, trace: Sequence[tuple[int, ...]], seed: int) -> None:
        """`trace` (stages lost at the beginning of each step) is not looked at by an arm without a method."""
        self.task, self.arm, self.trace = task, arm, trace
        self.model = new_model(task, seed)
        self.layers = self.model.model.layers
        length = task.layers // task.stages
        self.spans = [range(k * length, (k + 1) * length) for k in range(task.stages)]
        stages = [[p for layer in span for p in self.layers[layer].parameters()] for span in self.spans]
        mine = {p for stage in stages for p in stage}
        self.groups = [*stages, [p for p in self.model.parameters() if p not in mine]]
        """Parameters of each stage, and the rest."""
        self.adam = torch.optim.Adam(
            [{"params": group, "rate": 1.0} for group in self.groups], betas=(0.9, 0.999), fused=True
        )
        self.norms = [1.0] * task.stages
        self.text = torch.cat(corpus().files)
        self.rows = torch.randperm(len(self.text) // (task.length + 1), generator=torch.Generator().manual_seed(seed))
        self.rebuilt: list[dict[str, Any]] = []
        self.random = torch.Generator().manual_seed(seed)
        self.copies: list[dict[str, Tensor]] = []
        """Of all stages, as a neighbour has them, if it has."""

    def figures(self, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
        """Train to the end. `losses`: of the even microbatch of each step, before its update; `curve`: [steps done,
        loss on the watched windows]."""
        began, task = time.process_time(), self.task
        text = windows(corpus().held_out, task.held_out, task.length, torch.Generator().manual_seed(0))
        losses: list[float] = []
        curve: list[list[float]] = []
        for step in range(task.steps + 1):
            if step % task.every == 0 or step == task.steps:
                curve.append([step, round(held_out_loss(self.model, text[: task.watched]), 5)])
                say(f"{step}: {curve[-1][1]:.3f}")
            if step == task.steps:
                break
            if self.arm.method and self.trace[step]:
                self.rebuild(step, self.trace[step])
            if self.arm.method == "replica" and step % self.arm.every == 0:  # has arrived when the next step begins
                self.copies = [
                    {name: tensor.detach().clone() for name, tensor in self.tensors(k).items()}
                    for k in range(task.stages)
                ]
            losses.append(round(self.learn(step), 4))
        return {
            "loss": held_out_loss(self.model, text),
            "curve": curve,
            "losses": losses,
            "rebuilt": self.rebuilt,
            "cpu_s": time.process_time() - began,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "corpus": corpus().sha256,
        }

    def learn(self, step: int) -> float:
        """One step; the loss of the even microbatch before it."""
        text = self.batch(step)
        if self.arm.swapped:
            even, odd = text.tensor_split(2)
            first = self.losses(even).mean()
            with_loss = first + self.losses(odd, swapped(self.task.stages)).mean()
        else:
            first, second = (half.mean() for half in self.losses(text).tensor_split(2))
            with_loss = first + second
        (with_loss / 2).backward()
        for k, group in enumerate(self.groups):
            gradients = [p.grad for p in group if p.grad is not None]
            norm = gradient_norm(gradients)
            if norm > CLIP:
                torch._foreach_mul_(gradients, CLIP / norm)
            if k < self.task.stages:
                self.norms[k] = {"before": norm, "clipped": min(norm, CLIP), "squared": norm**2}[self.arm.norms]
        for group in self.adam.param_groups:
            group["lr"] = group["rate"] * self.task.learning_rate * min(1.0, (step + 1) / self.task.warm_up)
        self.adam.step()
        self.adam.zero_grad()
        return float(first.detach())

    def batch(self, step: int) -> Tensor:
        """[rows, length + 1]"""
        chosen = self.rows[step * self.task.rows : (step + 1) * self.task.rows]
        return self.text[chosen[:, None] * (self.task.length + 1) + torch.arange(self.task.length + 1)].long()

    def losses(self, text: Tensor, order: Sequence[int] | None = None) -> Tensor:
        """Nats per byte of each row, with the stages in that order."""
        inner = self.model.model
        if order is not None:
            inner.layers = nn.ModuleList(self.layers[layer] for stage in order for layer in self.spans[stage])
        try:
            logits = self.model(input_ids=text[:, :-1]).logits
        finally:
            inner.layers = self.layers
        return cross_entropy(logits.transpose(1, 2), text[:, 1:], reduction="none").mean(1)

    @torch.no_grad()
    def rebuild(self, step: int, lost: Sequence[int]) -> None:
        """Put something in the place of the lost stages, by what is left of the others."""
        made = {stage: self.made(lost, stage) for stage in lost}
        for stage, tensors in made.items():
            mine = self.tensors(stage)
            for name, tensor in tensors.items():
                mine[name].copy_(tensor)
            for p in self.groups[stage]:
                self.adam.state.pop(p, None)
            if self.arm.method != "replica":
                self.adam.param_groups[stage]["rate"] = RATE
            self.rebuilt.append({"step": step, "stage": stage, "norms": [round(norm, 4) for norm in self.norms]})

    def made(self, lost: Sequence[int], stage: int) -> dict[str, Tensor]:
        if self.arm.method == "replica":
            return self.copies[stage] if self.copies else self.tensors(stage)  # before the first step nothing is lost
        stages = self.task.stages
        twin = swapped(stages)[stage]
        if self.arm.twins and twin != stage and twin not in lost:
            before, after = twin, None
        else:
            before, after = nearest(lost, stage, stages)
        sides = [None if k is None else Neighbour(self.tensors(k), self.norms[k]) for k in (before, after)]
        options = {"rng": self.random} if self.arm.method == "random" else {}
        return METHODS[self.arm.method](*sides, len(self.spans[stage]), **options)

    def tensors(self, stage: int) -> dict[str, Tensor]:
        """Live ones, by local name."""
        return {
            f"layers.{k}.{name}": p
            for k, layer in enumerate(self.spans[stage])
            for name, p in self.layers[layer].named_parameters()
        }
