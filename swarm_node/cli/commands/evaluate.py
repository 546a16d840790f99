"""Measure the policy of a run, an exported model or any model on held-out questions: `swarm-node eval`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import starmap
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from swarm_node.cli.commands.export import Which, policy_of_run, tasks_of
from swarm_node.cli.options import note
from swarm_node.config import NodeConfig, RewardsConfig, TaskConfig
from swarm_node.config.plugins import only_in_a_program
from swarm_node.config.training import EvalConfig, RewardFunctionConfig, is_question_file
from swarm_node.errors import UserError
from swarm_node.grpo.memory import fit_sampling, hardware_of
from swarm_node.observability.evaluations import Held
from swarm_node.observability.legend import table_legend
from swarm_node.policy.adapters import adapter_base
from swarm_node.policy.loading import load_policy
from swarm_node.policy.prompt_format import read_prompt_format
from swarm_node.rollouts import fit_length, too_long
from swarm_node.rollouts.collect import encode_each
from swarm_node.rollouts.evaluate import NONE_HELD_OUT, answers_to, cells, summarise, titles, told
from swarm_node.say import Warned
from swarm_node.storage.new_file import write_new_file
from swarm_node.storage.rundir import RunDir
from swarm_node.tasks import TaskSet, load_tasks
from swarm_node.tasks.option_limits import check_options
from swarm_node.types import Group, Task


def main(
    target: str,
    *,
    tasks: Sequence[str | TaskConfig] | None = None,
    samples: int | None = None,
    questions: int | None = None,
    json_output: bool = False,
    which: Which = "newest",
    every: bool = False,
    out: Path | None = None,
    functions: Sequence[RewardFunctionConfig] | None = None,
) -> None:
    """Measure `target`: a run, a model exported from one, or any model. Prints a table, or a JSON document. A run and
    an exported model are measured with the tasks and the sampling settings of their training. `every`: ask each
    question of the tasks once, in their order. `out`: a new file for the answers, a line for each question.
    `functions`: reward functions in place of the run's; a question without an answer is then judged by them alone."""
    run = RunDir(target)
    if run.exists:
        policy, config = policy_of_run(Path(target), note, which=which)
        config = _with_functions_at_hand(config, note) if functions is None else _with_functions(config, functions)
        task_set = _tasks_of_run(run, config, tasks, answers=functions is None)
    else:
        if which != "newest":
            raise UserError(f"{target} is no run directory: a model has one set of weights; leave out --checkpoint")
        config = _with_functions(_of_model(target, bool(tasks), note), functions or [])
        policy = load_policy(config.policy, config.rollouts, note)
        task_set = load_tasks(tasks or config.tasks, config.rewards, answers=functions is None)
    samples = samples or config.eval.samples
    most = questions or config.eval.questions or EvalConfig().questions
    asked = task_set.every() if every else task_set.held_out(most)
    if not asked:
        raise UserError(f"{NONE_HELD_OUT}. --all asks every question of a file")
    rollouts = fit_length(config.rollouts, policy, note)
    fit_sampling(policy, hardware_of(policy.device), rollouts, samples)
    for line in task_set.read_as:
        note(line)
    number, title = f"{len(asked):,}", f"{'all' if every else 'held-out'} questions, {target}"
    more = "; --all asks every question of a file" if any(map(_is_file, tasks or [])) and not every else ""
    many = f"all {number} questions" if every else f"{number} held-out questions"
    note(f"asking {many} of {', '.join(task_set.labels)}, {samples} answer{'' if samples == 1 else 's'} to each{more}")
    if run.exists and tasks and config.eval.tasks and not config.swarm:
        say_trained("the run", config, asked, note)
    groups = answers_to(asked, policy, task_set, rollouts, samples)
    table = summarise(groups, task_set.labels)
    if not table:
        lengths = [len(ids) for ids in encode_each(policy, list(map(task_set.prompt, asked))) if ids is not None]
        raise UserError(f"no question fits: {too_long(lengths, rollouts, policy)}")
    if left_out := len(asked) - table["all"].questions:
        note(f"left out {left_out:,} questions: they are too long for rollouts.max_prompt_tokens or the model")
    rewards = _means(groups, task_set.reward_weights)
    document = {"target": target, "samples": samples, "rewards": rewards, "held_out": msgspec.to_builtins(table)}
    try:
        if not json_output:
            _show(table, title, samples, config.rewards, rewards)
    finally:  # a closed pipe loses no answers
        if out is not None:
            _write(out, groups, document)
            note(f"wrote {out}")
    if json_output:
        print(json.dumps(document))


def _write(out: Path, groups: Sequence[Group], document: Mapping[str, Any]) -> None:
    """Write the answers to a new file. Raises UserError, which has the `document`: a full disk loses no figures."""
    try:
        write_new_file(out, (json.dumps(_record(group)).encode() + b"\n" for group in groups))
    except UserError as error:
        error.document = document
        raise


def _means(groups: Sequence[Group], weights: Mapping[str, float]) -> dict[str, dict[str, float | None]]:
    """Reward -> its weight in the sum, and its mean over the answers that it scored; None if it scored none."""
    answers = [rollout for group in groups for rollout in group.rollouts]
    scored = {name: [value for each in answers if (value := each.rewards[name]) is not None] for name in weights}
    return {name: {"weight": weights[name], "mean": fmean(scored[name]) if scored[name] else None} for name in weights}


def _show(
    table: Mapping[str, Held],
    title: str,
    samples: int,
    config: RewardsConfig,
    rewards: Mapping[str, Mapping[str, float | None]],
) -> None:
    names = titles([table], samples, config)
    shown = Table("task", "questions", *names.values(), title=title, box=SIMPLE_HEAD)
    for label, held in told(table).items():
        shown.add_row(label, str(held.questions), *cells(held, names))
    console = Console(highlight=False, markup=False)
    console.print(shown)
    console.print(table_legend([*names.values()], samples))
    if config.functions:
        console.print(f"mean of each reward: {', '.join(starmap(_in_words, rewards.items()))}")


def _in_words(name: str, reward: Mapping[str, float | None]) -> str:
    mean = "-" if reward["mean"] is None else f"{reward['mean']:.3f}"
    return f"{name} {mean} (weight {reward['weight']:g})"


def _is_file(task: str | TaskConfig) -> bool:
    return is_question_file(task) if isinstance(task, str) else task.file is not None


def _tasks_of_run(
    run: RunDir, config: NodeConfig, named: Sequence[str | TaskConfig] | None, answers: bool = True
) -> TaskSet:
    """The tasks `named`, else those that the run is evaluated with. `answers`: as for `load_tasks`."""
    if not named and config.eval.tasks:
        return load_tasks(config.eval.tasks, config.rewards, whole=True, answers=answers)
    found = load_tasks(named or tasks_of(run, config), config.rewards, answers=answers)
    return found.only(config.tasks) if config.swarm and config.tasks and not named else found


def say_trained(run: str, config: NodeConfig, asked: Sequence[Task], say: Callable[[str], None]) -> None:
    """Say how many of the questions `asked` a `run` with these settings may have trained on. Alone, it trained whole on
    the files that it was not evaluated on."""
    own, rewards = [] if config.swarm else config.eval.tasks, RewardsConfig()
    try:
        exam = load_tasks(own, rewards, whole=True, answers=False) if own else None
        training = load_tasks(config.tasks, rewards, exam, answers=False)
    except UserError as error:  # a file that is no more where it was
        say(Warned(f"whether {run} trained on these questions is not known: {error}"))
        return
    if known := training.drawn_of(asked):
        say(Warned(f"{run} could train on {known:,} of these questions, so the figures may show what was remembered"))


def _with_functions(config: NodeConfig, functions: Sequence[RewardFunctionConfig]) -> NodeConfig:
    """`config` with these reward functions."""
    return config.model_copy(update={"rewards": config.rewards.model_copy(update={"functions": list(functions)})})


def _with_functions_at_hand(config: NodeConfig, say: Callable[[str], None]) -> NodeConfig:
    """`config` without the reward functions of a program, which are not here, if the checker judges as well."""
    lost = [each for each in config.rewards.functions if only_in_a_program(each.path)]
    if not lost or not config.rewards.checker_weight:
        return config
    names = ", ".join(each.path for each in lost)
    say(f"left out, since only the program that trained has them: {names}; --reward FILE.py:FUNCTION takes their place")
    return _with_functions(config, [each for each in config.rewards.functions if each not in lost])


def _record(group: Group) -> dict[str, Any]:
    """A question with all its answers, named as in samples.jsonl, and its own figures."""
    task, rollouts = group.task, group.rollouts
    right = [rollout.correct for rollout in rollouts if rollout.checked]
    return {
        "task": task.label,
        "index": task.name.index,
        "question": task.question,
        "right": task.answer,
        "pass_1": fmean(right) if right else None,
        "pass_k": float(any(right)) if right else None,
        "k": len(rollouts),
        "reward": fmean(rollout.reward for rollout in rollouts),
        "answers": [
            {
                "text": rollout.text,
                "extracted": rollout.extracted,
                "reward": rollout.reward,
                "rewards": rollout.rewards,
                "correct": rollout.correct if rollout.checked else None,
                "finished": rollout.finished,
            }
            for rollout in rollouts
        ],
    }


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
