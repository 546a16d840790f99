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
from swarm_node.config.training import EvalConfig
from swarm_node.errors import UserError
from swarm_node.policy.adapters import adapter_base
from swarm_node.policy.loading import load_policy
from swarm_node.policy.prompt_format import read_prompt_format
from swarm_node.rollouts import fit_length
from swarm_node.rollouts.evaluate import NONE_HELD_OUT, cells, evaluate, titles
from swarm_node.storage.rundir import RunDir
from swarm_node.tasks import load_tasks
from swarm_node.tasks.option_limits import check_options


def main(
    target: str,
    tasks: list[str] | None,
    samples: int | None,
    questions: int | None,
    json_output: bool,
    which: Which = "newest",
) -> None:
    """Measure `target`: a run, a model exported from one, or any model. Prints a table, or a JSON document. A run and
    an exported model are measured with the tasks and the sampling settings of their training."""
    say = note
    run = RunDir(target)
    if run.exists:
        policy, config = policy_of_run(Path(target), say, which=which)
        task_set = load_tasks(tasks or tasks_of(run, config), config.rewards)
        if config.swarm and config.tasks and not tasks:
            task_set = task_set.only(config.tasks)
    else:
        if which != "newest":
            raise UserError(f"{target} is no run directory: a model has one set of weights; leave out --checkpoint")
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
        raise UserError("no held-out question fits rollouts.max_prompt_tokens and the model")
    if json_output:
        print(json.dumps({"target": target, "samples": samples, "held_out": msgspec.to_builtins(table)}))
        return
    names = titles([table], samples, config.rewards)
    shown = Table("task", "questions", *names.values(), title=f"held-out questions, {target}", box=SIMPLE_HEAD)
    for label, held in table.items():
        shown.add_row(label, str(held.questions), *cells(held, names))
    Console().print(shown)


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
