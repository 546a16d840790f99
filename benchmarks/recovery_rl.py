"""A taught policy in stages that get lost, its adapter trained by GRPO: what `recovery` runs, as this project does.

A starter of eight layers, taught further with `#` before 15 % of the answers; only `#` and the right answer is
rewarded (`sharing_settings`: `format`). Node, sampling and updates are `swarm_node`'s own, one process computes all
stages. The base model is not lost with a stage: whoever takes its place gets those layers by digest, exactly. Lost are
the adapter of its layers and the adapter's optimiser. What is put in their place:

    replica      what they were one update ago, optimiser included: a neighbour keeps a copy
    weights      likewise, but without the optimiser
    fresh        the adapter as all adapters begin: no change to the base
    checkfree    mean of the neighbours' adapters by gradient norms, A and B each for itself; ends are copies
    checkfree+   the same, odd microbatches of updates with the first two and the last two stages swapped

All but the replica begin with a new optimiser, and all but it and `weights` have 1.1 times the learning rate from then
on.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.format_reward import MARK
from benchmarks.recovery_lm import nearest, swapped
from benchmarks.recovery_methods import gradient_norm
from benchmarks.sharing import held_out
from benchmarks.sharing_settings import SETTINGS, SIX, Setting
from benchmarks.warm_starts import now_and_then, taught
from swarm_node.config import NodeConfig
from swarm_node.node import Node
from swarm_node.pipeline.recovery.checkfree import RATE, Neighbour, checkfree
from swarm_node.policy.loading import load_policy
from swarm_node.tasks.taskset import load_tasks

LAYERS, HIDDEN = 8, 96


def start(seed: int, peer: int) -> Path:
    answer = now_and_then(0.15, MARK)
    return taught(seed, "deep15", SIX, answer, steps_taught=200, steps=500, layers=LAYERS, hidden=HIDDEN)


SETTING = replace(
    SETTINGS["format"],
    says="`#` before 15 % of the taught answers; only `#` and the right answer is rewarded",
    start=start,
    learning_rate=1e-3,  # better than 3e-3 for `none` on seed 100
)


@dataclass(frozen=True)
class Task:
    """What is learned."""

    steps: int = 200
    stages: int = 4
    groups: int = 8
    rank: int = 8
    every: int = 10
    """Steps between two looks at held-out questions."""
    watched: int = 48
    """Of them; at the end, four times as many."""


@dataclass(frozen=True)
class Arm:
    """What is done about a lost stage."""

    method: str = ""
    """`replica`, `weights`, `fresh` or `checkfree`; none = no stage is ever lost."""
    swapped: bool = False


State = tuple[Tensor, Tensor, Tensor, Tensor]
"""A parameter, its two moments and the number of its updates."""


class Run:
    """One arm, from one seed."""

    def __init__(
        self, task: Task, arm: Arm, trace: Sequence[tuple[int, ...]], seed: int, setting: Setting = SETTING
    ) -> None:
        self.task, self.arm, self.trace, self.setting = task, arm, trace, setting
        config = NodeConfig.model_validate(
            {
                "seed": seed,
                "tasks": setting.tasks(0),
                "rewards": setting.rewards,
                "policy": {
                    "model": str(setting.start(seed, 0)),
                    "lora": True,
                    "lora_rank": task.rank,
                    "lora_alpha": 2 * task.rank,
                    "dtype": "float32",
                    "threads": 1,
                },
                "rollouts": {
                    "groups": task.groups,
                    "max_new_tokens": setting.max_new_tokens,
                    "max_prompt_tokens": 128,
                },
                "grpo": {"learning_rate": setting.learning_rate},
            }
        )
        policy = load_policy(config.policy, config.rollouts, lambda _: None)
        self.node = Node(config, policy, load_tasks(config.tasks, config.rewards), lambda _: None)
        self.inner = policy.base.model
        self.layers = self.inner.layers
        length = len(self.layers) // task.stages
        self.spans = [range(k * length, (k + 1) * length) for k in range(task.stages)]
        self.optimizer = self.node.trainer.optimizer
        self.start = {name: p.detach().clone() for name, p in self.optimizer.named.items()}
        self.names = {p: name for name, p in self.optimizer.named.items()}
        self.replica: dict[str, State] = {}
        """As it was before the last update."""
        self.norms = [1.0] * task.stages
        self.faster: set[int] = set()
        """Stages that were made anew."""
        self.rebuilt: list[dict[str, Any]] = []
        self._wrap()

    def figures(self, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
        """Train to the end. `rewards`: mean over the samples of each step; `curve`: [steps done, pass@1 on the watched
        questions]; `rebuilt`: with pass@1 on them right before and after."""
        began, task = time.process_time(), self.task
        rewards: list[float] = []
        curve: list[list[float]] = []
        for step in range(task.steps + 1):
            if step % task.every == 0 or step == task.steps:
                curve.append([step, round(self.watched(), 4)])
                say(f"{step}: {curve[-1][1]:.3f}")
            if step == task.steps:
                break
            if self.arm.method and self.trace[step]:
                before = self.watched()
                self.rebuild(self.trace[step])
                self.rebuilt.append(
                    {"step": step, "stages": list(self.trace[step]), "before": before, "after": self.watched()}
                )
            collected = self.node.collect()
            rewards.append(fmean(r.reward for group in collected.groups for r in group.rollouts))
            self.replica = self.states()
            self.node.learn(self.node.choose(collected))
        return {
            "cum": sum(rewards),
            "last_20": fmean(rewards[-20:]),
            "held_out": held_out(self.setting, self.node, 4 * task.watched),
            "rewards": [round(r, 4) for r in rewards],
            "curve": curve,
            "rebuilt": self.rebuilt,
            "updates": self.optimizer.updates,
            "trained": self.node.policy.num_parameters(trainable=True),
            "parameters": self.node.policy.num_parameters(),
            "cpu_s": time.process_time() - began,
        }

    def watched(self) -> float:
        return held_out(self.setting, self.node, self.task.watched)["pass_1"]

    # ----------------------------------------------------------------- stages

    def tensors(self, stage: int) -> dict[str, nn.Parameter]:
        """Trained ones, by local name."""
        return {
            f"layers.{k}.{name}": p
            for k, layer in enumerate(self.spans[stage])
            for name, p in self.layers[layer].named_parameters()
            if p.requires_grad
        }

    def states(self) -> dict[str, State]:
        """Copies."""
        return {name: tuple(t.detach().clone() for t in self.state(p)) for name, p in self.optimizer.named.items()}  # type: ignore[misc]

    def state(self, p: nn.Parameter) -> State:
        adam = self.optimizer.adamw.state[p]
        return p, adam["exp_avg"], adam["exp_avg_sq"], adam["step"]

    @torch.no_grad()
    def rebuild(self, lost: Sequence[int]) -> None:
        made = {stage: self.made(lost, stage) for stage in lost}
        for stage, states in made.items():
            for name, p in self.tensors(stage).items():
                for mine, new in zip(self.state(p), states[name], strict=True):
                    mine.copy_(new)
            if self.arm.method not in ("replica", "weights"):
                self.faster.add(stage)

    def made(self, lost: Sequence[int], stage: int) -> dict[str, State]:
        """By local name."""
        mine = self.tensors(stage)
        if self.arm.method == "replica":
            return {name: self.replica.get(self.names[p], self.state(p)) for name, p in mine.items()}
        if self.arm.method == "weights":
            values = {name: self.replica[self.names[p]][0] for name, p in mine.items()} if self.replica else mine
        elif self.arm.method == "fresh":
            values = {name: self.start[self.names[p]] for name, p in mine.items()}
        else:
            sides = [
                None if k is None else Neighbour(self.tensors(k), self.norms[k])
                for k in nearest(lost, stage, self.task.stages)
            ]
            values = checkfree(sides[0], sides[1], len(self.spans[stage]))
        nothing = torch.zeros(())
        return {name: (value, nothing, nothing, nothing) for name, value in values.items()}

    # ----------------------------------------------------------------- updates

    def _wrap(self) -> None:
        """Have the trainer note norms, swap stages, and let stages that were made anew learn faster."""
        trainer, step = self.node.trainer, self.optimizer.step
        plan, backward = trainer.plan, trainer._backward

        def noted() -> tuple[float, float]:
            for k in range(self.task.stages):
                gradients = [p.grad for p in self.tensors(k).values() if p.grad is not None]
                self.norms[k] = gradient_norm(gradients)
            before = {p: p.detach().clone() for k in self.faster for p in self.tensors(k).values()}
            result = step()
            with torch.no_grad():
                for p, was in before.items():  # an update is proportional to its learning rate
                    p.add_(p - was, alpha=RATE - 1)
            return result

        def in_two(rows: Sequence[Any]) -> list[list[Any]]:
            planned = plan(rows)
            if len(planned) == 1 and len(planned[0]) > 1:
                half = len(planned[0]) // 2
                planned = [planned[0][:half], planned[0][half:]]
            return planned

        def by_turns(work: Any, microbatches: list[list[Any]], iteration: int) -> dict[str, float]:
            totals: Counter[str] = Counter()
            for number, rows in enumerate(microbatches):
                with self._order(number % 2 == 1):
                    sums = backward(work, [rows], iteration)
                tokens = sums.pop("tokens")
                for name, value in sums.items():
                    totals[name] += value
            return dict(totals) | {"tokens": tokens}

        self.optimizer.step = noted  # type: ignore[method-assign]
        if self.arm.swapped:
            trainer.plan, trainer._backward = in_two, by_turns  # type: ignore[method-assign,assignment]

    @contextmanager
    def _order(self, odd: bool) -> Iterator[None]:
        if odd:
            order = [layer for stage in swapped(self.task.stages) for layer in self.spans[stage]]
            self.inner.layers = nn.ModuleList(self.layers[layer] for layer in order)
        try:
            yield
        finally:
            self.inner.layers = self.layers
