"""Measure the policy of a run, an exported model or any model on held-out questions: `swarm-node eval`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from swarm_node.cli.commands.export import Which, policy_of_run, tasks_of
from swarm_node.cli.options import note
from swarm_node.config import NodeConfig, TaskConfig
from swarm_node.config.training import EvalConfig, is_question_file
from swarm_node.errors import UserError
from swarm_node.observability.legend import table_legend
from swarm_node.policy.adapters import adapter_base
from swarm_node.policy.loading import load_policy
from swarm_node.policy.prompt_format import read_prompt_format
from swarm_node.rollouts import fit_length
from swarm_node.rollouts.evaluate import NONE_HELD_OUT, cells, evaluate_on, titles, told
from swarm_node.storage.rundir import RunDir
from swarm_node.tasks import TaskSet, load_tasks
from swarm_node.tasks.option_limits import check_options


def main(
    target: str,
    tasks: list[str] | None,
    samples: int | None,
    questions: int | None,
    json_output: bool,
    which: Which = "newest",
    every: bool = False,
) -> None:
    """Measure `target`: a run, a model exported from one, or any model. Prints a table, or a JSON document. A run and
    an exported model are measured with the tasks and the sampling settings of their training. `every`: ask each
    question of the tasks once, in their order."""
    say = note
    run = RunDir(target)
    if run.exists:
        policy, config = policy_of_run(Path(target), say, which=which)
        task_set = _tasks_of_run(run, config, tasks)
    else:
        if which != "newest":
            raise UserError(f"{target} is no run directory: a model has one set of weights; leave out --checkpoint")
        config = _of_model(target, bool(tasks), say)
        policy = load_policy(config.policy, config.rollouts, say)
        task_set = load_tasks(tasks or config.tasks, config.rewards)
    samples = samples or config.eval.samples
    most = questions or config.eval.questions or EvalConfig().questions
    asked = task_set.every() if every else task_set.held_out(most)
    if not asked:
        raise UserError(f"{NONE_HELD_OUT}. --all asks every question of a file")
    rollouts = fit_length(config.rollouts, policy, say)
    number, title = f"{len(asked):,}", f"{'all' if every else 'held-out'} questions, {target}"
    more = "; --all asks every question of a file" if any(map(is_question_file, tasks or [])) and not every else ""
    many = f"all {number} questions" if every else f"{number} held-out questions"
    say(f"asking {many} of {', '.join(task_set.labels)}, {samples} answers to each{more}")
    table = evaluate_on(asked, policy, task_set, rollouts, samples)
    if not table:
        raise UserError("no question fits rollouts.max_prompt_tokens and the model")
    if left_out := len(asked) - table["all"].questions:
        say(f"left out {left_out:,} questions: they are too long for rollouts.max_prompt_tokens or the model")
    if json_output:
        print(json.dumps({"target": target, "samples": samples, "held_out": msgspec.to_builtins(table)}))
        return
    names = titles([table], samples, config.rewards)
    shown = Table("task", "questions", *names.values(), title=title, box=SIMPLE_HEAD)
    for label, held in told(table).items():
        shown.add_row(label, str(held.questions), *cells(held, names))
    console = Console(highlight=False, markup=False)
    console.print(shown)
    console.print(table_legend([*names.values()], samples))


def _tasks_of_run(run: RunDir, config: NodeConfig, named: list[str] | None) -> TaskSet:
    """The tasks `named`, else those that the run is evaluated with."""
    if not named and config.eval.tasks:
        return load_tasks(config.eval.tasks, config.rewards, whole=True)
    found = load_tasks(named or tasks_of(run, config), config.rewards)
    return found.only(config.tasks) if config.swarm and config.tasks and not named else found


def _of_model(target: str, has_tasks: bool, say: Callable[[str], None]) -> NodeConfig:
    """Configuration for a model: that of its run, if its directory says so. Raises UserError."""
    found = read_prompt_format(Path(target))
    config, files = found or (NodeConfig(), 0)
    if files and not has_tasks:
        say(f"{files} question files that {target} was trained on are not in its directory: give them as --tasks")
    if found is not None and not has_tasks:
        config = config.model_copy(update={"tasks": [task for task in config.tasks if _is_harmless(task, say)]})
    lora = None if adapter_base(target) else False  # nothing is trained here: no new adapter
    policy = config.policy.model_copy(update={"model": target, "lora": lora})
    return config.model_copy(update={"policy": policy})


def _is_harmless(task: str | TaskConfig, say: Callable[[str], None]) -> bool:
    """Whether the options of a task are safe. It is named in a model's directory, which may be a stranger's."""
    name, options = (task, {}) if isinstance(task, str) else (task.env or "", task.config)
    try:
        check_options(name, options)
    except UserError as error:
        say(f"left out, unless it is given as --tasks: {error}")
        return False
    return True
