"""Ways to average adapters by supervised steps: the part `ways` of `benchmarks.real_swarm`.

Four members have an adapter each on one frozen base, all from the start that this package gives a new adapter, and each
learns a quarter of the training questions. An answer is the reference alone, as the assistant's turn. After some steps
of AdamW they average in pairs, as members of a swarm do, each time with another partner; after three averagings every
member has met every other. Moments stay as they are. The loss is the mean of held-out answers, in nats per token, over
all members, at the start and after 1, 2, 4 … averagings.

    never     nobody averages
    pooled    one adapter; each step takes the batches of all members
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks.real_swarm_ways import WAYS, State, Way, train_only
from swarm_node.averaging.lattice_codec import lattice_size
from swarm_node.config import GrpoConfig, PolicyConfig, RewardsConfig, RolloutsConfig
from swarm_node.grpo.optimizer import Optimizer
from swarm_node.grpo.trainer import Trainer
from swarm_node.policy.loading import load_policy
from swarm_node.policy.policy import Policy
from swarm_node.tasks.taskset import load_tasks
from swarm_node.types import Group, Rollout, Sampling, Task, Turn

NEVER, POOLED = "never", "pooled"
CODEC_BITS = 8  # of `averaging.codec`
Row = dict[str, Any]


@dataclass(frozen=True)
class Course:
    """How much is learned. A real member makes five updates or more between two averagings."""

    members: int = 4  # a power of two
    averagings: int = 8
    steps: int = 5  # between two averagings
    batch: int = 2  # questions of a step
    held_out: int = 32  # questions


@dataclass
class Adapter:
    """A member: its adapter, its moments, its questions."""

    weights: State
    moments: dict[str, Tensor]
    batches: Iterator[list[Group]]
    updates: int = 0
    train_s: float = 0.0


def partner(member: int, averaging: int, members: int) -> int:
    """Whom a member meets: another one each time, all in `members` - 1 averagings."""
    return member ^ (1 + averaging % (members - 1))


class Supervised:
    """Members that take turns in one policy."""

    def __init__(self, policy: Policy, way: Way, course: Course, file: str, seed: int, pooled: bool) -> None:
        self.policy, self.way, self.course = policy, way, course
        config = GrpoConfig(answers=0)  # an example has one answer, and is trained on
        self.trainer = Trainer(policy, config, Sampling(64), lambda text: None)
        assert isinstance(self.trainer.optimizer, Optimizer)
        tasks = load_tasks([file], RewardsConfig())
        self.held_out = self.examples(tasks.held_out(course.held_out))
        hidden = {task.question for task in tasks.held_out(10**6)}
        examples = self.examples([task for task in tasks.every() if task.question not in hidden])
        random.Random(f"parts {seed}").shuffle(examples)
        parts = [examples[i :: course.members] for i in range(course.members)]
        batches = [_batches(part, course.batch, f"{seed} {i}") for i, part in enumerate(parts)]
        if pooled:
            batches = [(sum(each, []) for each in zip(*batches, strict=True))]
        self.members = [Adapter(*self._now(), own) for own in batches]

    def examples(self, tasks: Sequence[Task]) -> list[Group]:
        """Each question with its reference as the only answer, which ends by itself."""
        prompts = self.policy.encode_questions([task.question for task in tasks])
        answers = self.policy.encode_completions([(str(task.answer), True) for task in tasks])
        return [
            Group(task, prompt, [Rollout([Turn(ids, [], True)])], advantages=[1.0])
            for task, prompt, ids in zip(tasks, prompts, answers, strict=True)
            if ids is not None
        ]

    def learn(self, member: Adapter, averagings: int) -> None:
        """The member's steps until the next averaging."""
        self._take(member)
        train_only(self.policy.model, self.way, averagings)
        began = time.process_time()
        for _ in range(self.course.steps):
            self.trainer.step(next(member.batches))
        member.train_s += time.process_time() - began
        member.weights, member.moments = self._now()
        member.updates = self.trainer.optimizer.updates

    def average(self, number: int) -> float:
        """Average in pairs; CPU seconds that it took a member."""
        began = time.process_time()
        for i, member in enumerate(self.members):
            j = partner(i, number, len(self.members))
            if i < j:
                mean = self.way.mean([member.weights, self.members[j].weights])
                member.weights, self.members[j].weights = mean, {name: each.clone() for name, each in mean.items()}
        return (time.process_time() - began) / len(self.members) * 2  # each of the two computes it

    def loss(self) -> float:
        """Of held-out answers, mean over members."""
        known: list[tuple[State, float]] = []
        for member in self.members:
            if same := [loss for state, loss in known if _equal(state, member.weights)]:
                known.append((member.weights, same[0]))
                continue
            self._take(member)
            found = self.trainer.mean_nll(self.held_out)
            assert found is not None, "not enough memory"
            known.append((member.weights, found))
        return fmean(loss for _, loss in known)

    def sent(self, averagings: int) -> int:
        """Bytes that a member sends to average after so many averagings."""
        trained = [each for name, each in self.members[0].weights.items() if self.way.trains(name, averagings)]
        return lattice_size(CODEC_BITS, sum(tensor.numel() for tensor in trained), 0)

    def _take(self, member: Adapter) -> None:
        self.policy.load_trainable_state(member.weights)
        self.trainer.optimizer.load_state_dict(member.moments, member.updates)

    def _now(self) -> tuple[State, dict[str, Tensor]]:
        states = self.policy.trainable_state(), self.trainer.optimizer.state_dict()
        weights, moments = ({name: each.detach().clone() for name, each in state.items()} for state in states)
        return weights, moments


def _equal(one: State, other: State) -> bool:
    return all(torch.equal(each, other[name]) for name, each in one.items())


def _batches(examples: Sequence[Group], size: int, seed: str) -> Iterator[list[Group]]:
    """For ever, all examples in another order each time."""
    rng, waiting = random.Random(seed), list[Group]()
    while True:
        if len(waiting) < size:
            waiting += rng.sample(examples, len(examples))
        yield waiting[:size]
        del waiting[:size]


def run(
    model: str, file: Path, arm: str, seed: int, course: Course, say: Callable[[str], None] = lambda text: None
) -> Row:
    """The figures of one way and seed."""
    began = time.monotonic()
    settings = PolicyConfig(model=model, lora=True, dtype="float32", system_prompt="")
    policy = load_policy(settings, RolloutsConfig(), say)
    members = Supervised(policy, WAYS.get(arm, WAYS["apart"]), course, str(file), seed, arm == POOLED)
    curve, means, sent = [(0, members.loss())], list[float](), list[int]()
    for number in range(course.averagings):
        for member in members.members:
            members.learn(member, number)
        if arm in WAYS:
            sent.append(members.sent(number))
            means.append(members.average(number))
        if (done := number + 1) == course.averagings or done & number == 0:  # 1, 2, 4, 8 …
            curve.append((done, members.loss()))
            say(f"{arm}, seed {seed}, after {done * course.steps} steps: {curve[-1][1]:.4f} nats")
    return {
        "losses": [round(loss, 5) for _, loss in curve],
        "after": [done for done, _ in curve],
        "bytes": round(fmean(sent or [0])),
        "average_s": round(fmean(means or [0.0]), 3),
        "train_s": round(fmean(member.train_s for member in members.members), 1),
        "course": asdict(course),
        "seconds": round(time.monotonic() - began, 1),
    }
