"""Held-out pass@1 and pass@k of a policy.

pass@1 = mean over samples,   pass@k = any of the k samples is right, both averaged over questions
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from statistics import fmean

import msgspec

from swarm_node.config import RolloutsConfig
from swarm_node.observability.samples import without_middle
from swarm_node.policy.policy import Policy
from swarm_node.rollouts import collect
from swarm_node.tasks import TaskSet
from swarm_node.types import Group, Task

QUESTIONS_PER_BATCH = 32
SHOWN = 24  # first questions of which an evaluation keeps the first answer; tasks take turns, so these are of many
SHOWN_CHARS = 300  # most characters kept of each of their texts
NONE_HELD_OUT = (
    "no question is held out of training, so there are no held-out figures: one in five is, chosen by a hash of its "
    "text, and the tasks have too few; 20 different questions nearly always give one, about 250 give the 50 that it "
    "takes to tell learning from noise"
)


class Held(msgspec.Struct):
    """Held-out figures of one task, or of all."""

    questions: int
    pass_1: float
    pass_k: float


class Shown(msgspec.Struct, frozen=True):
    """One held-out question with one answer, in without_middle texts."""

    task: str
    question: str
    right: str  # reference answer; empty if there is none
    answer: str
    correct: bool


class Evaluation(msgspec.Struct, frozen=True):
    """Held-out figures at one time."""

    table: dict[str, Held] = {}  # figures by task label, and under `all` for all of them
    by_question: list[float] = []  # share of right answers to each question, in the order asked
    labels: list[str] = []  # the task label of each question
    shown: list[Shown] = []  # the first SHOWN questions, each with its first answer


def evaluate(policy: Policy, tasks: TaskSet, rollouts: RolloutsConfig, questions: int, samples: int) -> Evaluation:
    """Held-out figures of `policy`; every call has the same questions and sampling seeds."""
    groups = _answered(tasks.held_out(questions), policy, tasks, rollouts, samples)
    return Evaluation(
        summarise(groups, tasks.labels),
        [fmean(r.correct for r in g.rollouts) for g in groups],
        [g.task.label for g in groups],
        [_shown(g) for g in groups[:SHOWN]],
    )


def _shown(group: Group) -> Shown:
    first, task = group.rollouts[0], group.task
    texts = (without_middle(text, SHOWN_CHARS) for text in (task.question, task.answer or "", first.text))
    question, right, answer = texts
    return Shown(task.label, question, right, answer, first.correct)


def evaluate_on(
    held_out: Sequence[Task], policy: Policy, tasks: TaskSet, rollouts: RolloutsConfig, samples: int
) -> dict[str, Held]:
    """Figures on these questions of `tasks`, by task label and for `all`."""
    return summarise(_answered(held_out, policy, tasks, rollouts, samples), tasks.labels)


def _answered(
    held_out: Sequence[Task], policy: Policy, tasks: TaskSet, rollouts: RolloutsConfig, samples: int
) -> list[Group]:
    config = rollouts.model_copy(update={"group_size": samples, "groups": QUESTIONS_PER_BATCH})
    groups: list[Group] = []
    waiting = iter(held_out)
    for start in range(0, len(held_out), QUESTIONS_PER_BATCH):
        groups += collect(policy, lambda n: list(islice(waiting, n)), tasks, config, f"eval/{start}").groups
    return groups


def summarise(groups: Sequence[Group], labels: Sequence[str]) -> dict[str, Held]:
    """Figures of scored groups, by label in the given order, then `all`."""
    table = {}
    for label in [*labels, "all"]:
        mine = [g for g in groups if label in (g.task.label, "all")]
        if not mine:
            continue
        right = [[r.correct for r in g.rollouts] for g in mine]
        table[label] = Held(len(mine), pass_1=fmean(map(fmean, right)), pass_k=fmean(map(any, right)))
    return table


def rows(before: dict[str, Held], after: dict[str, Held], samples: int) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the table before -> after."""
    columns = ["task", "questions", "pass@1 before", "pass@1 after", f"pass@{samples} before", f"pass@{samples} after"]
    table = []
    for label, new in sorted(after.items(), key=lambda item: item[0] == "all"):  # the rest stays in its order
        old = before.get(label)
        figures = [old and old.pass_1, new.pass_1, old and old.pass_k, new.pass_k]
        table.append([label, str(new.questions), *("-" if x is None else f"{x:.3f}" for x in figures)])
    return columns, table
