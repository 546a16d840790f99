"""Held-out figures of a policy.

pass@1 = mean over samples,   pass@k = any of the k samples is right, both averaged over questions with a checker
reward = mean over samples, averaged over questions
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from statistics import fmean

from swarm_node.config import RewardsConfig, RolloutsConfig
from swarm_node.config.figures import reports_reward
from swarm_node.observability.evaluations import SHOWN, Evaluation, Held, Shown, held_by_task
from swarm_node.observability.samples import without_middle
from swarm_node.policy.policy import Policy
from swarm_node.policy.sizes import SMALL
from swarm_node.rollouts import Collected, collect
from swarm_node.tasks.taskset import TaskSet, has_signal
from swarm_node.types import Group, Task

QUESTIONS_PER_SEED = 32
PART = 8  # questions asked at a time by policies of SMALL parameters or more; smaller ones are asked 32
SHOWN_CHARS = 300  # most characters kept of each of their texts
NONE_HELD_OUT = (
    "no question is held out of training, so there are no held-out figures: one in five is, chosen by a hash of its "
    "text, and the tasks have too few; 20 different questions nearly always give one, and about 250 give 50, of which "
    "the 95 % interval of a change is as wide as it should be"
)


def evaluate(
    policy: Policy,
    tasks: TaskSet,
    rollouts: RolloutsConfig,
    questions: int,
    samples: int,
    asked: Asked | None = None,
    most_s: float = math.inf,
) -> Evaluation:
    """Held-out figures of `policy`; every call has the same questions and sampling seeds. `asked` and `most_s`: see
    `ask_in_parts`."""
    asked = Asked() if asked is None else asked
    ask_in_parts(tasks.held_out(questions), policy, tasks, rollouts, samples, asked, most_s)
    return evaluation(asked, tasks)


def evaluation(asked: Asked, tasks: TaskSet) -> Evaluation:
    """The held-out figures of the questions that were asked; empty if none was."""
    groups = asked.groups
    if not groups:
        return Evaluation()
    answers = [rollout for group in groups for rollout in group.rollouts]
    return Evaluation(
        summarise(groups, tasks.labels),
        [fmean(r.correct for r in g.rollouts) for g in groups],
        [g.task.label for g in groups],
        [_shown(g) for g in groups[:SHOWN]],
        [fmean(r.reward for r in g.rollouts) for g in groups],
        [_judged(g) for g in groups],
        asked=asked.questions,
        cut=fmean(not r.finished for r in answers),
        mixed=sum(has_signal(g.rollouts) for g in groups),
        tokens=fmean(r.num_tokens for r in answers),
        per_token_s=asked.per_token_s,
    )


@dataclass
class Asked:
    """Questions that were asked, with their scored answers."""

    before: int = 0  # number of the questions before these, which were asked at another time
    groups: list[Group] = field(default_factory=list)  # those too long are left out
    questions: int = 0  # asked, those too long included
    per_token_s: float = 0.0  # seconds of sampling for each token, the last time
    progress: Callable[[], None] = lambda: None  # called after each part

    def add(self, found: Collected, questions: int) -> None:
        self.groups += found.groups
        self.questions += questions
        self.per_token_s = found.seconds / max(1, found.num_tokens)
        self.progress()


def _judged(group: Group) -> bool:
    """Whether a checker judges the answers."""
    return any(r.checked for r in group.rollouts)


def _shown(group: Group) -> Shown:
    first, task = group.rollouts[0], group.task
    texts = (without_middle(text, SHOWN_CHARS) for text in (task.question, task.answer or "", first.transcript))
    question, right, answer = texts
    correct = first.correct if first.checked else None
    return Shown(task.label, question, right, answer, correct, first.reward, not first.finished)


def evaluate_on(
    held_out: Sequence[Task], policy: Policy, tasks: TaskSet, rollouts: RolloutsConfig, samples: int
) -> dict[str, Held]:
    """Figures on these questions of `tasks`, by task label and for `all`."""
    return summarise(answers_to(held_out, policy, tasks, rollouts, samples), tasks.labels)


def answers_to(
    held_out: Sequence[Task],
    policy: Policy,
    tasks: TaskSet,
    rollouts: RolloutsConfig,
    samples: int,
    asked: Asked | None = None,
) -> list[Group]:
    """These questions of `tasks`, each with so many scored answers, in their order; those too long are left out.
    `asked`: see `ask_in_parts`."""
    asked = Asked() if asked is None else asked
    ask_in_parts(held_out, policy, tasks, rollouts, samples, asked)
    return asked.groups


def part_size(policy: Policy) -> int:
    """Held-out questions that are asked of a policy at a time."""
    return QUESTIONS_PER_SEED if policy.num_parameters() < SMALL else PART


def ask_in_parts(
    held_out: Sequence[Task],
    policy: Policy,
    tasks: TaskSet,
    rollouts: RolloutsConfig,
    samples: int,
    asked: Asked,
    most_s: float = math.inf,
) -> None:
    """Ask these questions of `tasks`, but for those `asked.before`, and add the scored answers to `asked` after each
    part: the first part, and then as many as `most_s` seconds allow."""
    config, began = rollouts.model_copy(update={"group_size": samples}), time.monotonic()
    size = part_size(policy)
    for start in range(asked.before, len(held_out), size):
        parts = (start - asked.before) // size
        if parts and (time.monotonic() - began) * (parts + 1) / parts > most_s:
            return
        part = list(held_out[start : start + size])
        seed, before = f"eval/{start - start % QUESTIONS_PER_SEED}", start % QUESTIONS_PER_SEED
        config = config.model_copy(update={"groups": len(part)})
        draw = partial(_next_of, iter(part))
        found = collect(policy, draw, tasks, config, seed, first=before)
        asked.add(found, len(part))


def _next_of(waiting: Iterator[Task], n: int) -> list[Task]:
    return list(islice(waiting, n))


def summarise(groups: Sequence[Group], labels: Sequence[str]) -> dict[str, Held]:
    """Figures of scored groups, by label in the given order, then `all`."""
    right, rewards = ([fmean(getattr(r, key) for r in g.rollouts) for g in groups] for key in ("correct", "reward"))
    return held_by_task(labels, [g.task.label for g in groups], right, rewards, [_judged(g) for g in groups])


def titles(tables: Sequence[Mapping[str, Held]], samples: int, rewards: RewardsConfig) -> dict[str, str]:
    """Field of `Held` -> its title, for the figures that are shown of these tables."""
    judged = any(held.pass_1 is not None for table in tables for held in table.values())
    found = {"pass_1": "pass@1"} | ({"pass_k": f"pass@{samples}"} if samples > 1 else {}) if judged else {}
    return found | ({"reward": "reward"} if reports_reward(rewards) else {})


def cells(held: Held | None, names: Mapping[str, str]) -> list[str]:
    """The figures of those names with three decimals; `-` for one that was not measured."""
    figures = [None if held is None else getattr(held, name) for name in names]
    return ["-" if figure is None else f"{figure:.3f}" for figure in figures]


def rows(
    before: dict[str, Held], after: dict[str, Held], samples: int, rewards: RewardsConfig
) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the table before -> after; of the figures after alone if `before` is empty."""
    names = titles([before, after], samples, rewards)
    times = {"before": before, "after": after} if before else {"after": after}
    columns = ["task", "questions", *(f"{title} {when}" for title in names.values() for when in times)]
    table = []
    for label, new in told(after).items():
        pairs = zip(*(cells(each.get(label), names) for each in times.values()), strict=True)
        table.append([label, str(new.questions), *(cell for pair in pairs for cell in pair)])
    return columns, table


def told(table: Mapping[str, Held]) -> dict[str, Held]:
    """The rows of a table that are shown, by name: `all` comes last, and is left out where it would repeat a single
    task."""
    tasks = {label: held for label, held in sorted(table.items()) if label != "all"}
    return tasks if len(tasks) == 1 or "all" not in table else tasks | {"all": table["all"]}
