"""Held-out pass@1 and pass@k of a policy.

pass@1 = mean over samples,   pass@k = any of the k samples is right, both averaged over questions
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean

import msgspec
from rich.console import Console
from rich.table import Table

from swarm_node.config import EvalConfig, NodeConfig, RolloutsConfig, TaskConfig
from swarm_node.errors import UserError
from swarm_node.export import policy_of_run, tasks_of
from swarm_node.policy.asking import read_asking
from swarm_node.policy.loading import adapter_base, load_policy
from swarm_node.policy.policy import Policy
from swarm_node.rollouts import collect, fit_length
from swarm_node.rundir import RunDir
from swarm_node.tasks import TaskSet, load_tasks
from swarm_node.tasks.bounds import check_options
from swarm_node.types import Group, Task

QUESTIONS_PER_BATCH = 32
NONE_HELD_OUT = (
    "no question is held out of training, so there are no held-out figures: one in five is, chosen by a hash of its "
    "text, and the tasks have too few; 20 different questions nearly always give one, about 250 give the 50 that it "
    "takes to tell learning from noise"
)
NONE_FITS = "no held-out question fits rollouts.max_prompt_tokens and the model"


class Held(msgspec.Struct):
    """Held-out figures of one task, or of all."""

    questions: int
    pass_1: float
    pass_k: float


class Evaluation(msgspec.Struct, frozen=True):
    """Held-out figures at one time."""

    table: dict[str, Held] = {}
    """By task label, and of `all`."""
    by_question: list[float] = []
    """Share of right answers to each question, in the order asked."""


def evaluate(
    policy: Policy,
    tasks: TaskSet,
    rollouts: RolloutsConfig,
    questions: int,
    samples: int,
) -> Evaluation:
    """The same questions and sampling seeds at every call."""
    groups = _answered(tasks.held_out(questions), policy, tasks, rollouts, samples)
    return Evaluation(summarise(groups, tasks.labels), [fmean(r.correct for r in g.rollouts) for g in groups])


def evaluate_on(
    held_out: Sequence[Task], policy: Policy, tasks: TaskSet, rollouts: RolloutsConfig, samples: int
) -> dict[str, Held]:
    """Figures on these questions of `tasks`, by task label and for `all`."""
    return summarise(_answered(held_out, policy, tasks, rollouts, samples), tasks.labels)


def _answered(
    held_out: Sequence[Task], policy: Policy, tasks: TaskSet, rollouts: RolloutsConfig, samples: int
) -> list[Group]:
    config = rollouts.model_copy(update={"group_size": samples, "groups": QUESTIONS_PER_BATCH, "refill": 1.0})
    groups: list[Group] = []
    waiting = iter(held_out)
    for start in range(0, len(held_out), QUESTIONS_PER_BATCH):
        groups += collect(policy, lambda n: list(islice(waiting, n)), tasks.score, config, f"eval/{start}").groups
    return groups


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


def rows(before: dict[str, Held], after: dict[str, Held], samples: int) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the table before -> after."""
    columns = ["task", "questions", "pass@1 before", "pass@1 after", f"pass@{samples} before", f"pass@{samples} after"]
    table = []
    for label, new in after.items():
        old = before.get(label)
        figures = [old and old.pass_1, new.pass_1, old and old.pass_k, new.pass_k]
        table.append([label, str(new.questions), *("-" if x is None else f"{x:.3f}" for x in figures)])
    return columns, table


def main(target: str, tasks: list[str] | None, samples: int | None, questions: int | None, json_output: bool) -> int:
    """`swarm-node eval`: figures of a run's policy (with the tasks and the sampling that it was trained with), of what
    was exported of one (likewise), or of any model."""
    say = Console(stderr=True, highlight=False).print
    run = RunDir(target)
    if run.exists:
        policy, config = policy_of_run(Path(target), say)
        task_set = load_tasks(tasks or tasks_of(run, config), config.rewards)
        if config.swarm and config.tasks and not tasks:
            task_set = task_set.only(config.tasks)
    else:
        config = _of_model(target, bool(tasks), say)
        policy = load_policy(config.policy, config.rollouts, say)
        task_set = load_tasks(tasks or config.tasks, config.rewards)
    samples = samples or config.eval.samples
    if not task_set.held_out(1):
        raise UserError(NONE_HELD_OUT)
    rollouts = fit_length(config.rollouts, policy, say)
    asked = questions or config.eval.questions or EvalConfig().questions
    table = evaluate(policy, task_set, rollouts, asked, samples).table
    if not table:
        raise UserError(NONE_FITS)
    if json_output:
        json.dump({"target": target, "samples": samples, "held_out": msgspec.to_builtins(table)}, sys.stdout)
        sys.stdout.write("\n")
        return 0
    shown = Table("task", "questions", "pass@1", f"pass@{samples}", title=f"held-out questions, {target}")
    for label, held in table.items():
        shown.add_row(label, str(held.questions), f"{held.pass_1:.3f}", f"{held.pass_k:.3f}")
    Console().print(shown)
    return 0


def _of_model(target: str, has_tasks: bool, say: Callable[[str], None]) -> NodeConfig:
    """How to ask a model that is no run: as its run did, if it says how. Raises UserError."""
    found = read_asking(Path(target))
    config, files = found or (NodeConfig(), 0)
    if files and not has_tasks:
        say(f"{files} of the question files that {target} was trained on are not part of it: give them as --tasks")
    if found is not None and not has_tasks:
        config = config.model_copy(update={"tasks": [task for task in config.tasks if _is_harmless(task, say)]})
    lora = None if adapter_base(target) else False  # nothing is trained here: no new adapter
    policy = config.policy.model_copy(update={"model": target, "lora": lora})
    return config.model_copy(update={"policy": policy})


def _is_harmless(task: str | TaskConfig, say: Callable[[str], None]) -> bool:
    """Whether a task may be asked because a model's directory says so, which may be a stranger's."""
    name, options = (task, {}) if isinstance(task, str) else (task.env or "", task.config)
    try:
        check_options(name, options)
    except UserError as error:
        say(f"left out, unless it is given as --tasks: {error}")
        return False
    return True
