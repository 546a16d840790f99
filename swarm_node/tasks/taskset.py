"""The tasks of a run: drawing them, naming them, judging answers to them.

    specs -> sources (environment with options | file) -> task -> completion -> extract -> check -> reward

A source makes tasks from indices and judges answers to them; it is an `Environment` or a `QuestionFile`.
"""

from __future__ import annotations

import copy
import random
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, repeat

from protocol.errors import RemoteProtocolError
from protocol.messages import TaskName
from swarm_node.config import RewardsConfig, TaskConfig
from swarm_node.config.plugins import load_function
from swarm_node.errors import UserError
from swarm_node.tasks.catalogue import ALLOWED, REFUSED, SETS
from swarm_node.tasks.checkers import FULL_MARKS
from swarm_node.tasks.extract import extract
from swarm_node.tasks.files import QuestionFile
from swarm_node.tasks.reasoning_gym import Environment, library_names, nearest
from swarm_node.tasks.rewards import RewardFunction, call_function
from swarm_node.tasks.split import is_held_out, normalise
from swarm_node.tasks.stratify import allot
from swarm_node.types import Score, Task

Source = Environment | QuestionFile

CHECKER = "checker"
"""Name of the task's own checker among the rewards."""

MAX_ANSWER_CHARS = 32_768
"""Longer answers score 0 unseen: the longest reference of the shipped sets has 200 characters, and this
bounds what a checker can be made to chew on."""

DRAWS = 1000
"""Tries to find a question of the training split before giving up; four in five are."""

MISSES = 1000
"""Indices without a new held-out question after which a source counts as exhausted."""


class TaskSet:
    """The tasks of a run, from one or more sources, each with a weight. Made by `load_tasks`."""

    def __init__(self, sources: dict[Source, float], rewards: RewardsConfig) -> None:
        self._sources = list(sources)
        self._weights = list(sources.values())
        self._by_name = {(source.environment, source.config): source for source in sources}
        self._partial = rewards.partial
        self.reward_weights: dict[str, float] = {}
        """Weight of each reward; the keys of every `Score.rewards`."""
        if rewards.checker_weight > 0:
            self.reward_weights[CHECKER] = rewards.checker_weight
        self._functions: dict[str, RewardFunction] = {}
        for function in rewards.functions:
            name = function.path.rpartition(":")[2]
            if name in (CHECKER, *self._functions):
                raise UserError(f"two rewards are called {name!r}: rename the function in {function.path!r}")
            self._functions[name] = load_function(function.path, "reward function")
            self.reward_weights[name] = function.weight
        if not self.reward_weights:
            raise UserError("nothing to reward: rewards.checker_weight is 0 and rewards.functions is empty")
        self.scorer_errors: Counter[str] = Counter()
        """Answers, by task label, on which the checker raised; they scored 0."""

    @property
    def labels(self) -> list[str]:
        """Label of each source."""
        return [source.label for source in self._sources]

    @property
    def names(self) -> list[str]:
        """Environment, options and generator of each source: equal for equal tasks."""
        return [f"{source.environment} {source.config} {source.generator}" for source in self._sources]

    def only(self, specs: Sequence[str | TaskConfig]) -> TaskSet:
        """This set, but drawing (and naming) only what `specs` choose of it; answers to the rest are still judged.

        A spec chooses all sources of that set, member, environment (with these options, if it has any) or file.
        Raises `UserError` if one chooses none.
        """
        chosen: set[int] = set()
        for spec in specs:
            table = _table(spec) if isinstance(spec, str) else spec
            found = {i for i, source in enumerate(self._sources) if _chooses(table, source)}
            if not found:
                have = ", ".join(self.labels)
                raise UserError(f"task {table.env or table.file!r} is not one of this swarm's, which are {have}")
            chosen |= found
        part = copy.copy(self)
        part._sources = [self._sources[i] for i in sorted(chosen)]
        part._weights = [self._weights[i] for i in sorted(chosen)]
        return part

    def sample(self, rng: random.Random, n: int) -> list[Task]:
        """`n` training tasks in random order, shared out among the sources by weight (`allot`)."""
        counts = allot(self._weights, n, rng)
        repeated = chain.from_iterable(map(repeat, self._sources, counts))
        tasks = [_draw(source, rng) for source in repeated]
        rng.shuffle(tasks)
        return tasks

    def at(self, place: float, key: str) -> Task:
        """The training task that `key` seeds, of the source at `place` in [0, 1) on the weights laid end to end."""
        ends = list(accumulate(self._weights))
        chosen = min(bisect_right(ends, place * ends[-1]), len(ends) - 1)
        return _seeded(self._sources[chosen], key)

    def assigned(self, name: TaskName, key: str) -> Task:
        """The training task of that name, if it is the one that `key` seeds in its source.

        Raises `RemoteProtocolError` with reason `task` if no source of this node makes it, or `assignment`.
        """
        task = _seeded(self._source(name), key)
        if task.name != name:
            raise RemoteProtocolError("assignment", f"{name.environment} {name.index}, assigned is {task.name.index}")
        return task

    def held_out(self, n: int) -> list[Task]:
        """Up to `n` different evaluation questions, the sources taking turns; always the same ones."""
        streams = [_evaluation_tasks(source) for source in self._sources]
        tasks: list[Task] = []
        while streams and len(tasks) < n:
            for stream in list(streams):
                task = next(stream, None)
                if task is None:
                    streams.remove(stream)
                else:
                    tasks.append(task)
        return tasks[:n]

    def regenerate(self, name: TaskName) -> Task:
        """The training task of that name.

        Raises `RemoteProtocolError` with reason `task` if no source of this node makes it, or `held_out` if
        it is an evaluation question.
        """
        source = self._source(name)
        task = source.task(name.index) if name.seed == 0 and 0 <= name.index < source.size else None
        if task is None:
            raise RemoteProtocolError("task", f"{name.environment} has no item {name.seed}, {name.index}")
        if is_held_out(task.question):
            raise RemoteProtocolError("held_out", f"{name.environment} {name.index}")
        return task

    def score(self, tasks: Sequence[Task], prompts: Sequence[str], completions: Sequence[str]) -> list[Score]:
        """Judge completion i as an answer to task i. Raises `UserError` if a reward function fails."""
        answers = [extract(completion) for completion in completions]
        checked = [self._check(task, answer) for task, answer in zip(tasks, answers, strict=True)]
        rewards: dict[str, list[float | None]] = {
            name: call_function(name, function, tasks, prompts, completions)
            for name, function in self._functions.items()
        }
        if CHECKER in self.reward_weights:
            rewards[CHECKER] = [
                value if value is None or self._partial else float(value >= FULL_MARKS) for value in checked
            ]
        weights, scores = self.reward_weights, []
        for i, answer in enumerate(answers):
            mine = {name: column[i] for name, column in rewards.items()}
            total = sum(weights[name] * value for name, value in mine.items() if value is not None)
            scores.append(Score(answer, mine, float(total), correct=(checked[i] or 0.0) >= FULL_MARKS))
        return scores

    def _source(self, name: TaskName) -> Source:
        source = self._by_name.get((name.environment, name.config))
        if source is None:
            raise RemoteProtocolError("task", f"no source for {name.environment} with options {name.config}")
        if name.generator != source.generator:
            raise RemoteProtocolError("task", f"made by {name.generator}, here is {source.generator}")
        return source

    def _check(self, task: Task, answer: str | None) -> float | None:
        """Score in [0, 1] from the task's own checker; `None` if the task has no reference answer."""
        if task.answer is None:
            return None
        if answer is None or len(answer) > MAX_ANSWER_CHARS:
            return 0.0
        source = self._by_name[task.name.environment, task.name.config]
        try:
            value = source.check(task, answer)
        except Exception:  # library scorers raise on text that they did not expect: that is a wrong answer
            self.scorer_errors[task.label] += 1
            return 0.0
        return min(1.0, max(0.0, value))


def load_tasks(specs: Sequence[str | TaskConfig], rewards: RewardsConfig) -> TaskSet:
    """Tasks of environments, sets (`small`), their members (`small/gcd`), JSONL files and tables with
    options.

    The same source twice counts once, with both weights. Raises `UserError`.
    """
    if not specs:
        raise UserError("no tasks: name at least one, for example `small`")
    answer_needed = rewards.checker_weight > 0 or not rewards.functions
    weights: dict[tuple[str, str], float] = defaultdict(float)
    sources: dict[tuple[str, str], Source] = {}
    for spec in specs:
        table = _table(spec) if isinstance(spec, str) else spec
        for source in _open(table, answer_needed):
            key = source.environment, source.config
            sources.setdefault(key, source)
            weights[key] += table.weight
    _make_labels_distinct(list(sources.values()))
    for source in sources.values():
        _draw(source, random.Random(0))  # raises now, rather than in the middle of a run
    return TaskSet({source: weights[key] for key, source in sources.items()}, rewards)


def _table(spec: str) -> TaskConfig:
    return TaskConfig(file=spec) if spec.endswith(".jsonl") else TaskConfig(env=spec)


def _chooses(table: TaskConfig, source: Source) -> bool:
    if table.file is not None:
        return isinstance(source, QuestionFile) and QuestionFile(table.file, False).config == source.config
    if table.config:
        return any(source.config == other.config for other in _open(table, False) if isinstance(source, Environment))
    name = table.env or ""
    return name in (source.path, source.path.rpartition("/")[0], source.environment)


def _open(table: TaskConfig, answer_needed: bool) -> Iterator[Source]:
    if table.file is not None:
        yield QuestionFile(table.file, answer_needed)
        return
    name = table.env or ""
    group, _, member = name.rpartition("/")
    if name in SETS:
        if table.config:
            raise UserError(f"{name!r} is a set of tasks: give options to one of them, by its own name")
        chosen = {f"{name}/{environment}": options for environment, options in SETS[name].items()}
    elif group in SETS and member in SETS[group]:
        chosen = {name: {**SETS[group][member], **table.config}}
    elif name in ALLOWED or name in REFUSED or name in library_names():
        chosen = {name: table.config}
    else:
        known = {*SETS, *ALLOWED, *(f"{group}/{member}" for group in SETS for member in SETS[group])}
        hint = nearest(name, known)
        raise UserError(f"unknown task {name!r}{hint} (`swarm-node tasks` lists all; a file ends in .jsonl)")
    for path, options in chosen.items():
        yield Environment(path.rpartition("/")[2], options, path)


def _make_labels_distinct(sources: list[Source]) -> None:
    """Sources that share a label take their path (`sapo/bf`), then their config hash as well."""
    for attempt in ("{0.path}", "{0.label}:{0.config}"):
        counts = Counter(source.label for source in sources)
        for source in sources:
            if counts[source.label] > 1:
                source.label = attempt.format(source)


def _draw(source: Source, rng: random.Random) -> Task:
    for _ in range(DRAWS):
        task = source.task(rng.randrange(source.size))
        if task is not None and not is_held_out(task.question):
            return task
    raise UserError(
        f"task {source.label!r} has no training question in {DRAWS} draws: all that its options allow are "
        "unusable or belong to the evaluation split; widen the options or add questions"
    )


def _seeded(source: Source, key: str) -> Task:
    """The training task that `key` seeds in `source`: each source has its own, whatever else a node plays."""
    return _draw(source, random.Random(f"{key}/{source.environment}/{source.config}"))


def _evaluation_tasks(source: Source) -> Iterator[Task]:
    seen: set[str] = set()
    misses = 0
    for index in range(source.size):
        task = source.task(index)
        if task is not None and is_held_out(task.question) and normalise(task.question) not in seen:
            seen.add(normalise(task.question))
            misses = 0
            yield task
        elif (misses := misses + 1) >= MISSES:
            return
