"""Measure the policy of a run, an exported model or any model on held-out questions: `swarm-node eval`."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from swarm_node.cli.commands.export import Which, policy_of_run, settings_in, tasks_of
from swarm_node.cli.options import note
from swarm_node.config import NodeConfig, RewardsConfig, RolloutsConfig, TaskConfig
from swarm_node.config.keys import Table as Settings
from swarm_node.config.measuring import over
from swarm_node.config.own import read_own
from swarm_node.config.own_code import without_foreign_code
from swarm_node.config.plugins import only_in_a_program
from swarm_node.config.training import EvalConfig, RewardFunctionConfig, is_question_file
from swarm_node.errors import UserError
from swarm_node.grpo.memory import fit_sampling, hardware_of
from swarm_node.observability.evaluations import Held, newest_checkpoint
from swarm_node.observability.legend import table_legend
from swarm_node.policy.adapters import adapter_base
from swarm_node.policy.dtypes import name_of
from swarm_node.policy.loading import load_policy
from swarm_node.policy.policy import Policy
from swarm_node.policy.prompt_format import read_prompt_format
from swarm_node.rollouts import fit_length, too_long
from swarm_node.rollouts.collect import encode_each
from swarm_node.rollouts.evaluate import NONE_HELD_OUT, Asked, answers_to, cells, summarise, titles, told
from swarm_node.runtime.extras import with_extras
from swarm_node.runtime.limits import MemoryLimit
from swarm_node.say import Warned, is_shown
from swarm_node.storage.new_file import write_new_file
from swarm_node.storage.rundir import RunDir
from swarm_node.tasks.one_turn import in_form
from swarm_node.tasks.option_limits import check_options
from swarm_node.tasks.taskset import TaskSet, load_tasks
from swarm_node.types import Group, Task
from swarm_protocol.errors import visible

OF_WEIGHTS = {"model", "revision", "lora", "lora_rank", "lora_alpha", "lora_targets"}
"""Keys of `policy` that say which weights are measured; the others say how."""


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
    like: Path | None = None,
    given: Settings | None = None,
) -> None:
    """Measure `target`: a run, a model exported from one, or any model. Prints a table, or a JSON document. A run and
    an exported model are measured with the tasks and the sampling settings of their training. `every`: ask each
    question of the tasks once, in their order. `out`: a new file for the answers, a line for each question.
    `functions`: the only reward functions that judge; a question without an answer is then judged by them alone.
    `like`: a run, as which everything is measured. `given`: settings of the user's own (`of_a_measurement`)."""
    run, asked_as = RunDir(target), None if like is None else RunDir(like)
    wanted = _Wanted(asked_as, given or {}, functions)
    if run.exists:
        policy, config = policy_of_run(Path(target), note, which=which, alter=wanted.of_run)
    else:
        if which != "newest":
            raise UserError(f"{target} is no run directory: a model has one set of weights; leave out --checkpoint")
        has_tasks = bool(tasks or asked_as or "tasks" in wanted.given)
        config = with_extras(wanted.of_model(_of_model(target, has_tasks, note)))
        fit = partial(fit_into_memory, config=config, rollouts=config.rollouts, samples=config.eval.samples)
        policy = load_policy(config.policy, config.rollouts, note, fit=fit)
    of_tasks = asked_as or (run if run.exists else None)
    tasks = tasks or (config.tasks if "tasks" in wanted.given else None)
    task_set = _tasks(of_tasks, config, tasks, answers=wanted.functions is None)
    samples = samples or config.eval.samples
    most = questions or config.eval.questions or EvalConfig().questions
    asked = task_set.every() if every else task_set.held_out(most)
    if not asked:
        raise UserError(f"{NONE_HELD_OUT}. --all asks every question of a file")
    rollouts = fit_length(config.rollouts, policy, note, task_set.turns)
    fit_into_memory(policy, config, rollouts, samples)
    for line in task_set.read_as:
        note(line)
    number, title = f"{len(asked):,}", f"{'all' if every else 'held-out'} questions, {target}"
    more = "; --all asks every question of a file" if any(map(_is_file, tasks or [])) and not every else ""
    held_out = 0 if every or questions else len(task_set.held_out(EvalConfig().questions))
    if held_out > len(asked):  # a slow model is asked few before training, and the run keeps to these
        more += f"; --questions {held_out} asks more"
    many = f"all {number} questions" if every else f"{number} held-out questions"
    note(f"asking {many} of {', '.join(task_set.labels)}, {samples} answer{'' if samples == 1 else 's'} to each{more}")
    if of_tasks is not None and tasks and config.eval.tasks and not config.swarm:
        say_trained("the run", config, asked, note)
    with _counting(len(asked), not json_output) as answered:
        groups = answers_to(asked, policy, task_set, rollouts, samples, answered)
    table = summarise(groups, task_set.labels)
    if not table:
        lengths = [len(ids) for ids in encode_each(policy, list(map(task_set.prompt, asked))) if ids is not None]
        raise UserError(f"no question fits: {too_long(lengths, rollouts, policy, task_set.turns)}")
    if left_out := len(asked) - table["all"].questions:
        note(f"left out {left_out:,} questions: they are too long for rollouts.max_prompt_tokens or the model")
    rewards = _means(groups, task_set.reward_weights)
    document = {
        "target": target,
        "samples": samples,
        "settings": _conditions(policy, config, rollouts, task_set),
        "rewards": rewards,
        "held_out": msgspec.to_builtins(table),
    }
    try:
        if not json_output:
            _show(table, title, samples, config.rewards, rewards)
    finally:  # a closed pipe loses no answers
        if out is not None:
            _write(out, groups, document)
            note(f"wrote {out}")
    if json_output:
        print(json.dumps(document))


@contextmanager
def _counting(questions: int, shown: bool) -> Iterator[Asked]:
    """What the questions of a measurement are collected in; on a terminal they are counted, if that is to be `shown`,
    with the time that is left."""
    console, columns = Console(stderr=True), (BarColumn(), TimeRemainingColumn())
    hidden = not (shown and console.is_terminal and is_shown(logging.INFO))
    told = TextColumn("{task.completed} of {task.total} questions")
    with Progress(told, *columns, console=console, transient=True, disable=hidden) as bar:
        count = bar.add_task("", total=questions)
        asked = Asked(progress=lambda: bar.update(count, completed=asked.questions))
        yield asked


def fit_into_memory(policy: Policy, config: NodeConfig, rollouts: RolloutsConfig, samples: int) -> None:
    """Make the questions of a measurement fit into what is free and `resources.max_memory_gb` allows of main memory.
    Raises UserError if not even the policy does."""
    limit = config.resources.max_memory_gb
    machine = hardware_of(policy.device, int(limit * 2**30))
    needed = fit_sampling(policy, machine, rollouts, samples)
    if not machine.gpu and (too_much := MemoryLimit(limit, "choose a smaller model").exceeded_by(needed)):
        raise UserError(f"this program with the model takes about {too_much}")


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
    shown = Table("task", "questions", *names.values(), title=visible(title), box=SIMPLE_HEAD)
    for label, held in told(table).items():
        shown.add_row(visible(label), str(held.questions), *cells(held, names))
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


@dataclass(frozen=True)
class _Wanted:
    """How the user wants something to be measured."""

    like: RunDir | None  # the run as which it is measured
    given: Settings  # settings from --config, variables and --set
    named: Sequence[RewardFunctionConfig] | None  # by --reward

    @property
    def functions(self) -> Sequence[RewardFunctionConfig] | None:
        """The reward functions that the user names; None if no option or setting does."""
        if self.named is None and "functions" in self.given.get("rewards", {}):
            return NodeConfig.model_validate({"rewards": self.given["rewards"]}).rewards.functions
        return self.named

    def of_run(self, own: NodeConfig) -> NodeConfig:
        """The settings to measure a run with that has its `own`."""
        return self._altered(own, OF_WEIGHTS | {"quantize"})

    def of_model(self, own: NodeConfig) -> NodeConfig:
        """The settings to measure a model with that has its `own`. Whoever made it chose no code."""
        return self._altered(own, OF_WEIGHTS)

    def _altered(self, own: NodeConfig, kept: set[str]) -> NodeConfig:
        config = own
        if self.like is not None:
            config = settings_with_weights(self.like, note)
            policy = config.policy.model_copy(update={key: getattr(own.policy, key) for key in kept})
            config = config.model_copy(update={"policy": policy})
            if policy.dtype == "auto":
                note(
                    Warned(f"{self.like.path} does not say in which dtype it computes: --set policy.dtype=float32 does")
                )
        config = over(config, self.given)
        if "answer" in self.given.get("rewards", {}):
            config = in_form(config, config.rewards.answer)
        return with_named_functions(config, self.functions, note)


def settings_with_weights(run: RunDir, say: Callable[[str], None]) -> NodeConfig:
    """The settings with which a run measures itself, by its newest checkpoint. Raises UserError."""
    run.check_exists()
    own = read_own(run.config, say)
    return without_foreign_code(settings_in(newest_checkpoint(run)[1], own), run.config, own, say)


def with_named_functions(
    config: NodeConfig, named: Sequence[RewardFunctionConfig] | None, say: Callable[[str], None]
) -> NodeConfig:
    """`config` of a run with the reward functions that the user has `named`. Those that only the run's directory names
    are left out: they are code, and the directory may be a stranger's. Raises UserError if nothing judges then."""
    lost = config.rewards.functions
    if named is not None or not lost:
        return _with_functions(config, named or [])
    again = " ".join(f"--reward {shlex.quote(_option_of(each))}" for each in lost)
    names = ", ".join(each.path for each in lost)
    why = f"since they are code that only the run's directory names: {names}; {again} counts them, if you trust them"
    if not config.rewards.checker_weight:
        raise UserError(f"nothing is left to judge answers: reward functions are left out, {why}")
    say(Warned(f"left out, {why}"))
    return _with_functions(config, [])


def _option_of(function: RewardFunctionConfig) -> str:
    """The value of --reward for a function of a run; one that only a program has must be written into a file."""
    path = "FILE.py:FUNCTION" if only_in_a_program(function.path) else function.path
    return path if function.weight == 1 else f"{{path={json.dumps(path)}, weight={function.weight:g}}}"


def _conditions(policy: Policy, config: NodeConfig, rollouts: RolloutsConfig, tasks: TaskSet) -> dict[str, Any]:
    """What two measurements must share to be compared, besides questions and samples."""
    has_template = bool(policy.tokenizer.chat_template)
    return {
        "dtype": name_of(policy.dtype),
        "prompt": config.policy.system_prompt if has_template else config.policy.prompt_template,
        "chat_template_kwargs": config.policy.chat_template_kwargs if has_template else {},
        "answer": config.rewards.answer,
        "kind": tasks.kind or tasks.kinds or None,
        **rollouts.model_dump(include={"max_new_tokens", "max_prompt_tokens", "temperature", "top_p"}),
    }


def _tasks(
    run: RunDir | None, config: NodeConfig, named: Sequence[str | TaskConfig] | None, answers: bool = True
) -> TaskSet:
    """The tasks `named`, else those that the `run` is evaluated with; `run` None: those of a model's `config`.
    `answers`: as for `load_tasks`."""
    if not named and config.eval.tasks:
        return load_tasks(config.eval.tasks, config.rewards, whole=True, answers=answers)
    usual = config.tasks if run is None else tasks_of(run, config)
    found = load_tasks(named or usual, config.rewards, answers=answers)
    return found.only(config.tasks) if run is not None and config.swarm and config.tasks and not named else found


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
                "text": rollout.transcript,
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
