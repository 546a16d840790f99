"""Sources of tasks, opened by what the user calls them.

    `small` | `small/gcd` | `gcd` | file.jsonl | file.py:Class -> table with options -> sources

`ENVIRONMENTS` has the kinds of sources by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from swarm_node.config import TaskConfig
from swarm_node.config.plugins import load_function, plugin_error
from swarm_node.config.training import is_question_file
from swarm_node.errors import UserError
from swarm_node.tasks.base import TaskSource
from swarm_node.tasks.catalogue import ALLOWED, REFUSED, SETS, STARTER, STARTER_QUESTIONS
from swarm_node.tasks.files import QuestionFile
from swarm_node.tasks.names import numbered, unknown_task
from swarm_node.tasks.reasoning_gym import Entry, ReasoningGym, library, questions_of_the_package
from swarm_node.tasks.second_try import SecondTry
from swarm_protocol.answer_form import AnswerKind

ENVIRONMENTS: dict[str, Callable[[str, dict[str, Any], str], TaskSource]] = {
    **dict.fromkeys(ALLOWED, ReasoningGym),
    "second_try": SecondTry,
}
"""Environment -> its kind of source, called with (its name, its options, how the user asked for it)."""


def task_table(spec: str | TaskConfig) -> TaskConfig:
    """A spec as a table."""
    if spec == STARTER:
        return TaskConfig(file=str(STARTER_QUESTIONS), kind="text")
    if isinstance(spec, TaskConfig):
        return spec
    return TaskConfig(file=spec) if is_question_file(spec) else TaskConfig(env=spec)


def chooses(table: TaskConfig, source: TaskSource) -> bool:
    """Whether `table` names this source, its set or its environment."""
    if table.file is not None:
        named = QuestionFile(table.file, False, table.columns, "text")
        return isinstance(source, QuestionFile) and source.config in (named.config, named.config_of_copy)
    if table.config:
        return any(
            source.config == other.config
            for other in open_sources(table, False)
            if not isinstance(source, QuestionFile)
        )
    name = table.env or ""
    return name in (source.path, source.path.rpartition("/")[0], source.environment)


def open_sources(table: TaskConfig, answer_needed: bool, kind: AnswerKind | None = None) -> Iterator[TaskSource]:
    """The sources that `table` names. UserError if one cannot be used, as a file that lacks an `answer_needed`. `kind`
    is that of the answers in a file whose table names none."""
    if table.file is not None:
        yield QuestionFile(table.file, answer_needed, table.columns, table.kind or kind)
        return
    if table.kind is not None:
        raise UserError(f"task {table.env!r}: `kind` is for question files; an environment has a checker of its own")
    name = table.env or ""
    if ":" in name:
        yield _own_source(name, table.config)
        return
    group, _, member = name.rpartition("/")
    if name in SETS:
        if table.config:
            raise UserError(f"{name!r} is a set of tasks: give options to one of them, by its own name")
        chosen = {f"{name}/{environment}": options for environment, options in SETS[name].items()}
    elif group in SETS and member in SETS[group]:
        chosen = {name: {**SETS[group][member], **table.config}}
    elif name in ENVIRONMENTS or name in REFUSED or name in library():
        chosen = {name: table.config}
    else:
        raise unknown_task(name, known_names())
    for path, options in chosen.items():
        environment = path.rpartition("/")[2]
        yield ENVIRONMENTS.get(environment, ReasoningGym)(environment, options, path)


def list_own() -> list[Entry]:
    """The rows of `swarm-node tasks` that need no other package."""
    own = {name: kind(name, {}, name).task(0) for name, kind in ENVIRONMENTS.items() if name not in ALLOWED}
    rows = [Entry(name, [], "own", task.question, task.answer or "") for name, task in own.items() if task]
    return [questions_of_the_package(), *rows]


def known_names() -> set[str]:
    """All names of sets, of their members and of environments."""
    return {STARTER, *SETS, *ENVIRONMENTS, *(f"{group}/{member}" for group in SETS for member in SETS[group])}


def _own_source(name: str, options: dict[str, Any]) -> TaskSource:
    """A source of the user's own, `file.py:Class` or `package.module:Class`. UserError if it fails."""
    kind = load_function(name, "task")
    try:
        source = kind(name.rpartition(":")[2], options, name)
    except UserError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise plugin_error(f"task {name!r} failed", error) from error
    if not isinstance(source, TaskSource):
        raise UserError(f"task {name!r} must name a subclass of swarm_node.tasks.base.TaskSource")
    return source


def make_labels_distinct(sources: list[TaskSource]) -> None:
    """Tell environments that share a label apart by their set (`sapo/bf`), or else by the hash of their options as
    well; and other sources, whose path may be one of this machine, by a number."""
    environments = [source for source in sources if isinstance(source, ReasoningGym)]
    for attempt in ("{0.path}", "{0.label}:{0.config}"):
        counts = Counter(source.label for source in environments)
        for environment in environments:
            if counts[environment.label] > 1:
                environment.label = attempt.format(environment)
    taken = {source.label for source in environments}
    for source in sources:
        if not isinstance(source, ReasoningGym):
            source.label = numbered(source.label, taken)
            taken.add(source.label)
