"""Held-out pass@1 and pass@k of a policy.

    pass@1 = mean over samples,   pass@k = any of the k samples is right, both averaged over questions
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from swarm_node.config import RolloutsConfig
from swarm_node.policy.policy import Policy
from swarm_node.rollouts.collect import collect
from swarm_node.tasks import TaskSet
from swarm_node.types import Group

QUESTIONS_PER_BATCH = 32


class Held(msgspec.Struct):
    """Held-out figures of one task, or of all."""

    questions: int
    pass_1: float
    pass_k: float


def evaluate(
    policy: Policy,
    tasks: TaskSet,
    rollouts: RolloutsConfig,
    questions: int,
    samples: int,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, Held]:
    """Figures by task label and for `all`; the same questions and sampling seeds at every call."""
    held_out = tasks.held_out(questions)
    config = rollouts.model_copy(
        update={"group_size": samples, "groups": QUESTIONS_PER_BATCH, "refill": 1.0}
    )
    groups: list[Group] = []
    for start in range(0, len(held_out), QUESTIONS_PER_BATCH):
        part = held_out[start : start + QUESTIONS_PER_BATCH]
        groups += collect(policy, lambda n, part=part: part, tasks.score, config, f"eval/{start}").groups
        progress(start + len(part), len(held_out))
    return summarise(groups, tasks.labels)


def summarise(groups: Sequence[Group], labels: Sequence[str]) -> dict[str, Held]:
    """Figures of scored groups, by label in the given order, then `all`."""
    table = {}
    for label in [*labels, "all"]:
        mine = [g for g in groups if label in (g.task.label, "all")]
        if not mine:
            continue
        right = [[r.correct for r in g.rollouts] for g in mine]
        table[label] = Held(
            questions=len(mine),
            pass_1=sum(sum(r) / len(r) for r in right) / len(right),
            pass_k=sum(any(r) for r in right) / len(right),
        )
    return table


