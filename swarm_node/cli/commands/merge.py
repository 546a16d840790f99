"""Merge the weights of several nodes into one model, at the end of training: `swarm-node merge`.

    run directories, or members of a swarm (`merge_swarm`)
        -> Cohort -> (clip, choose the scale) -> merged weights -> policy -> files, loaded again to check

The arithmetic is in `averaging.merge`. Half of the held-out questions choose the scale, the others measure the result.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Literal, NamedTuple

import msgspec
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from swarm_node.averaging.merge import State, check_alike, clip_factors, task_arithmetic, task_norms, uniform_mean
from swarm_node.cli.commands.evaluate import fit_into_memory, say_trained, with_named_functions
from swarm_node.cli.commands.export import loaded_with, newest_of, tasks_of
from swarm_node.cli.commands.export_card import about_tasks, base_of
from swarm_node.cli.options import note
from swarm_node.config import NodeConfig, RolloutsConfig, TaskConfig
from swarm_node.config.figures import WORDS, Figure, figure_of
from swarm_node.config.measuring import over
from swarm_node.config.own import read_own
from swarm_node.config.own_code import without_foreign_code
from swarm_node.config.training import EvalConfig, RewardFunctionConfig
from swarm_node.errors import UserError
from swarm_node.policy.adapters import adapter_base
from swarm_node.policy.dtypes import name_of
from swarm_node.policy.loading import load_policy
from swarm_node.policy.policy import Policy
from swarm_node.policy.prompt_format import write_prompt_format
from swarm_node.rollouts import fit_length
from swarm_node.rollouts.evaluate import Held, cells, evaluate_on
from swarm_node.say import Say
from swarm_node.storage.model_names import model_name
from swarm_node.storage.rundir import RunDir, check_new_directory, os_errors_explained
from swarm_node.tasks.taskset import TaskSet, load_tasks
from swarm_node.types import Task
from swarm_protocol.errors import visible

Method = Literal["uniform", "task-arithmetic"]
SCALES = (0.3, 0.4, 0.5, 0.7, 1.0)  # scales to try besides 1/k


@dataclass(frozen=True)
class Cohort:
    """Weights that can be merged: with the same names and shapes, trained from the same start."""

    policy: Policy  # the policy with the weights that all sources started from
    config: NodeConfig  # settings of sampling and judging
    tasks: list[str | TaskConfig]  # tasks of all sources
    weights: dict[str, State]  # source -> trained weights; the tensors may be mapped files
    rounds: dict[str, int] = field(default_factory=dict)  # run -> rounds of training
    versions: dict[str, int] = field(default_factory=dict)  # member -> optimiser updates, as it claims
    trained: dict[str, NodeConfig] = field(default_factory=dict)  # run -> settings with the tasks of its training


class RunWeights(NamedTuple):
    """Weights of one run, and digests of what they were trained from."""

    name: str
    base: str
    start: str
    weights: State


class Tried(msgspec.Struct):
    scale: float
    value: float  # the figure on the questions for choosing


class Merged(msgspec.Struct):
    """Result of a merge, as JSON shows it."""

    out: str
    method: Method
    scale: float
    rounds: dict[str, int] = {}  # run -> rounds of training
    versions: dict[str, int] = {}  # member -> optimiser updates, as it claims
    norms: dict[str, float] = {}  # source -> length of its task vector before clipping (task arithmetic)
    tried: list[Tried] = []  # empty if the scale was given
    questions: int = 0
    samples: int = 0
    figure: Figure = "pass_1"  # the held-out figure that chooses
    runs: dict[str, dict[str, Held]] = {}  # source -> held-out figures; empty without questions
    mean: float | None = None  # mean of the figure over the sources
    merged: dict[str, Held] = {}
    better: str = ""  # the best source, if it is better than the merged model

    def of(self, table: Mapping[str, Held]) -> float:
        """The figure that chooses, over all tasks; 0 if it could not be measured."""
        return table["all"].by(self.figure) or 0.0


@dataclass(frozen=True)
class MergeRequest:
    """Options of `swarm-node merge`; the three before the last are of a swarm. Raises UserError for a scale that means
    nothing."""

    out: Path  # new directory for the merged model
    method: Method = "uniform"
    scale: float | None = None  # factor of task arithmetic; None = the best of a few
    questions: int | None = None  # held-out questions; None = as many as the first run has, 0 = none
    json_output: bool = False
    timeout_s: float = 1800.0  # most seconds to find members, and again to fetch all weights
    cohort: str | None = None  # None = the largest one of the model
    without: Sequence[str] = ()  # members to leave out: names, or ends of peer ids
    functions: Sequence[RewardFunctionConfig] | None = None  # reward functions that the user names
    max_memory_gb: float | None = None  # most memory of a merge of runs; None = what the first run may take

    def __post_init__(self) -> None:
        if self.scale is not None and (self.method == "uniform" or not math.isfinite(self.scale)):
            raise UserError("--scale is a number for --method task-arithmetic (uniform means 1/k)")


def main(runs: Sequence[RunDir], request: MergeRequest) -> None:
    """Merge runs. A table, or a JSON document, goes to standard output."""
    check_new_directory(request.out)
    cohort = cohort_of_runs(runs, note)
    if request.questions != 0:
        config = with_named_functions(cohort.config, request.functions, note)
        if request.max_memory_gb is not None:
            config = over(config, {"resources": {"max_memory_gb": request.max_memory_gb}})
        cohort = replace(cohort, config=config)
    merge_and_show(cohort, request, note)


def merge_and_show(cohort: Cohort, request: MergeRequest, say: Say) -> None:
    """Merge, and print the result."""
    result = merge(cohort, request, say)
    if request.json_output:
        print(json.dumps(msgspec.to_builtins(result)))
    else:
        print_result(result, Console(highlight=False, markup=False))
    kind, out = "runs" if cohort.rounds else "members", request.out
    say(f"merged {len(cohort.weights)} {kind} into {out}; load it with {loaded_with(out, cohort.policy.is_lora)}")
    if result.better:
        values = result.of(result.runs[result.better]), result.of(result.merged)
        figures = f"{WORDS[result.figure]} {values[0]:.3f} against {values[1]:.3f}"
        run, where = (result.better, "") if cohort.rounds else ("RUN", " on its machine")
        say(
            f"{result.better} alone is better on these questions ({figures}): "
            f"`swarm-node export {run} DIR`{where} keeps it"
        )


def merge(cohort: Cohort, request: MergeRequest, say: Say = print) -> Merged:
    """Merge `cohort` into a new directory and measure the result on held-out questions. Changes the weights of the
    cohort's policy. Raises UserError if weights are not finite, or if there is no question to choose a scale by."""
    policy, sources = cohort.policy, cohort.weights
    out, scale = request.out, 1 / len(sources) if request.scale is None else request.scale
    result = Merged(str(out), request.method, scale, cohort.rounds, cohort.versions)
    result.figure = figure_of(cohort.config.rewards)
    exam = None if request.questions == 0 else Exam.of(cohort, request.questions, say)
    for_choice: list[Task] = []
    asked = [] if exam is None else exam.questions
    if request.method == "uniform":
        merged = uniform_mean(sources)
    else:
        if request.scale is None:
            for_choice, asked = halves(asked)
            if not asked:
                raise UserError("choosing the scale takes at least two held-out questions: give --scale")
        merged = _task_arithmetic(cohort, result, exam, for_choice, say)
    policy.load_trainable_state(merged)
    with os_errors_explained(out):
        policy.save(out)
        base = base_of(cohort.config.policy, None)
        about = about_tasks(cohort.tasks, base)
        kind = None if exam is None else exam.tasks.kind
        write_prompt_format(out, policy.tokenizer, cohort.config, cohort.tasks, policy.is_lora, about, kind)
    _check_written(out, cohort)
    if exam is not None:
        say(f"testing the merged model and each of its {len(sources)} sources on {len(asked)} held-out questions")
        result.questions, result.samples = len(asked), exam.samples
        result.merged = exam.sit(merged, asked)
        result.runs = {name: exam.sit(weights, asked) for name, weights in sources.items()}
        ones = {name: result.of(held) for name, held in result.runs.items()}
        result.mean = fmean(ones.values())
        best = max(ones, key=lambda name: ones[name])
        result.better = best if ones[best] > result.of(result.merged) else ""
    return result


def _task_arithmetic(cohort: Cohort, result: Merged, exam: Exam | None, for_choice: Sequence[Task], say: Say) -> State:
    """The merged weights. Writes norms to `result` and, if there are questions `for_choice`, the best scale."""
    sources = cohort.weights
    base = {name: tensor.clone() for name, tensor in cohort.policy.trainable_state().items()}
    result.norms = task_norms(sources, base)
    factors = clip_factors(result.norms)
    clipped = [f"{name} ({norm:.3g})" for name, norm in result.norms.items() if factors[name] < 1]
    middle = median(result.norms.values())
    say(f"task vectors longer than the median one ({middle:.3g}) are clipped to it: {', '.join(clipped) or 'none'}")
    combined = partial(task_arithmetic, sources, base, factors=factors)
    if exam and for_choice:
        for scale in scales(len(sources)):
            result.tried.append(Tried(scale, result.of(exam.sit(combined(scale), for_choice))))
            say(f"scale {scale:.3g}: {WORDS[result.figure]} {result.tried[-1].value:.3f}")
        result.scale = max(result.tried, key=lambda tried: tried.value).scale
    return combined(result.scale)


def scales(k: int) -> list[float]:
    """Scales to try for `k` sources. 1/k comes first, so that it wins a tie."""
    return [1 / k, *(scale for scale in SCALES if not math.isclose(scale, 1 / k))]


def halves(questions: Sequence[Task]) -> tuple[list[Task], list[Task]]:
    """Two disjoint halves, each with half of every task's questions."""
    by_task = sorted(questions, key=lambda task: task.label)
    return by_task[::2], by_task[1::2]


@dataclass(frozen=True)
class Exam:
    """Held-out questions, and the settings to ask them with."""

    policy: Policy
    tasks: TaskSet
    rollouts: RolloutsConfig
    samples: int
    questions: list[Task]

    @classmethod
    def of(cls, cohort: Cohort, questions: int | None, say: Say) -> Exam:
        """An exam of up to `questions` questions, over all tasks of the cohort. Raises UserError if there is none."""
        config = cohort.config
        own = config.eval.tasks
        tasks = load_tasks(own or cohort.tasks, config.rewards, whole=bool(own))
        wanted = config.eval.questions or EvalConfig().questions if questions is None else questions
        held_out = tasks.held_out(wanted)
        if not held_out:
            raise UserError("these tasks have no held-out question: --questions 0 merges without measuring")
        for run, trained in cohort.trained.items() if own else ():  # else all hold the same questions out
            say_trained(run, trained, held_out, say)
        rollouts, samples = fit_length(config.rollouts, cohort.policy, say, tasks.turns), config.eval.samples
        fit_into_memory(cohort.policy, config, rollouts, samples)
        return cls(cohort.policy, tasks, rollouts, samples, held_out)

    def sit(self, weights: State, questions: Sequence[Task]) -> dict[str, Held]:
        """Measure `weights`, which the policy keeps. Raises UserError if no question fits the model."""
        self.policy.load_trainable_state(weights)
        table = evaluate_on(questions, self.policy, self.tasks, self.rollouts, self.samples)
        if not table:
            raise UserError("no held-out question fits rollouts.max_prompt_tokens and the model; try --questions 0")
        return table


def cohort_of_runs(runs: Sequence[RunDir], say: Say = print) -> Cohort:
    """The newest valid checkpoints of runs. A run may be active: files that it deletes stay readable while mapped.
    Raises UserError if a run has none, or if weights differ in base model or shapes."""
    sources: list[RunWeights] = []
    trained, rounds = dict[str, NodeConfig](), dict[str, int]()
    for run in runs:
        own = read_own(run.config, say)
        checkpoint, config = newest_of(run, own, say)
        config = without_foreign_code(config, run.config, own, say)
        say(f"weights of {run.path} after round {checkpoint.round}")
        model = checkpoint.state["model"]
        sources.append(RunWeights(str(run.path), model["base"], model["start"], checkpoint.tensors["policy"]))
        trained[str(run.path)] = config.model_copy(update={"tasks": tasks_of(run, config)})
        rounds[str(run.path)] = checkpoint.round
    configs = list(trained.values())
    first = configs[0].policy
    for other in sources[1:]:
        _check_cohort(sources[0], other)
    policy, here = load_policy(first, configs[0].rollouts, say), f"{model_name(first.model)} as it is here"
    _check_cohort(sources[0], RunWeights(here, policy.base_digest, policy.start_digest, policy.trainable_state()))
    if policy.is_lora and adapter_base(first.model) is None:
        alphas = {config.policy.lora_alpha for config in configs}
        if len(alphas) > 1:
            raise UserError(f"these runs cannot be merged: policy.lora_alpha differs ({sorted(alphas)})")
    asked = next((config.eval for config in configs if config.eval.tasks), configs[0].eval)
    measured = configs[0].model_copy(update={"eval": asked})  # a run with `eval.tasks` trained on what others hold out
    tasks = [task for config in configs for task in config.tasks]
    weights = {source.name: source.weights for source in sources}
    return Cohort(policy, measured, tasks, weights, rounds, trained=trained)


def _check_cohort(one: RunWeights, other: RunWeights) -> None:
    """Raises UserError with the difference if the weights of two sources cannot be merged."""
    pair = f"{one.name} and {other.name} cannot be merged"
    if one.base != other.base:
        raise UserError(f"{pair}: they began from different base models")
    try:
        check_alike({one.name: one.weights, other.name: other.weights})
    except UserError as error:
        raise UserError(f"{pair}: they train different weights (other LoRA settings?): {error}") from error
    if one.start != other.start:
        raise UserError(
            f"{pair}: their LoRA adapters did not start alike, and factors A, B of different starts have no common mean"
        )


def _check_written(out: Path, cohort: Cohort) -> None:
    """Load the written model in the usual way. Raises UserError if it differs from the policy."""
    policy = cohort.policy
    changes = {"model": str(out), "revision": None, "lora": policy.is_lora, "device": "cpu"}
    config = cohort.config.policy.model_copy(update=changes | {"dtype": name_of(policy.dtype)})
    again = load_policy(config, cohort.config.rollouts, lambda sentence: None).trainable_state()
    mine = policy.trainable_state()
    if mine.keys() != again.keys() or not all(torch.equal(mine[name].cpu(), again[name]) for name in mine):
        raise UserError(f"the model in {out} does not load as it was written: try another directory")


def print_result(result: Merged, console: Console) -> None:
    """Print the scales tried, and the figures of sources and merged model."""
    if result.tried:
        tried = Table("scale tried", f"{WORDS[result.figure]} on other questions", box=SIMPLE_HEAD)
        for row in result.tried:
            chosen = " *" if row.scale == result.scale else ""
            tried.add_row(f"{row.scale:.3g}{chosen}", f"{row.value:.3f}")
        console.print(tried)
    if not result.merged:
        return
    behind, counts = ("rounds", result.rounds) if result.rounds else ("version", result.versions)
    names = {"pass_1": "pass@1", "pass_k": f"pass@{result.samples}"}
    if result.figure == "reward":
        names = {"reward": WORDS["reward"]}
    titles = "source", behind, *names.values()
    shown = Table(*titles, title=f"{result.questions} held-out questions", box=SIMPLE_HEAD)
    for name, held in result.runs.items():
        shown.add_row(visible(name), str(counts[name]), *cells(held["all"], names))
    shown.add_row("mean of these", "", f"{result.mean:.3f}", end_section=True)
    shown.add_row(f"merged ({result.method})", "", *cells(result.merged["all"], names))
    console.print(shown)
