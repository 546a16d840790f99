"""Tasks from an environment of reasoning-gym with its options.

The library seeds item i of a data set with `seed + i`, so (5, 3) and (6, 2) are one item. Here the seed is
always 0 and the index alone names the item; items are made one at a time, so the index space may be huge.
"""

from __future__ import annotations

import dataclasses
import decimal
import difflib
import hashlib
import importlib.metadata
import json
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from swarm_node.errors import UserError
from swarm_node.install import check_extra
from swarm_node.tasks import checkers
from swarm_node.tasks.catalogue import ALLOWED, NOT_AUDITED, REFUSED, SETS, STARTER, STARTER_QUESTIONS
from swarm_node.tasks.judging.places import extract
from swarm_node.tasks.judging.texts import text_or_number
from swarm_node.tasks.one_turn import OneTurn
from swarm_node.types import Task
from swarm_protocol.limits import CONFIG_HASH_CHARS, TASK_INDICES
from swarm_protocol.messages import TaskName

FIXED = {"seed", "size", "data_file"}
"""Options that are not the user's: the index stands for the seed, the size is always the same, and a file of one's own
would make items that nobody else can."""
JUDGED = 256  # latest answers that are remembered with their scores: some groups' worth
MAX_DIVIDEND_DIGITS = 24  # up to this many digits, all divisors of a number are found in well under a second


ENDLESS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "arc_1d": (
        lambda c: c.max_size > 30,
        "max_size above 30: some rules hardly ever find a grid of that size",
    ),
    "base_conversion": (
        lambda c: c.min_base == c.max_base,
        "min_base equals max_base: it wants two bases",
    ),
    "basic_arithmetic": (
        lambda c: (
            "/" in c.operators
            and (c.max_terms * c.max_digits > MAX_DIVIDEND_DIGITS or (not c.allow_parentheses and c.max_digits > 5))
        ),
        "division of such long numbers: it lists all divisors; lower max_terms or max_digits",
    ),
    "bf": (
        lambda c: c.difficulty > 2,
        "difficulty 3: counters overflow, some programs never halt",
    ),
    "calendar_arithmetic": (lambda c: c.offset_upper_bound < 1, "offset_upper_bound below 1: no date fits"),
}
"""Environment -> options with which an item can take for ever, and why.

Such a generator would stall the whole node, and a peer could choose the index that does it."""


class ReasoningGym(OneTurn):
    """The tasks of one environment. UserError if it is refused, or for wrong options."""

    size = TASK_INDICES

    def __init__(self, name: str, options: dict[str, Any], path: str = "") -> None:
        if name not in ALLOWED:
            raise UserError(f"task {name!r} is refused: {REFUSED.get(name, NOT_AUDITED)}")
        check_extra("puzzles", f"task {path or name!r}")
        self.environment = self.label = name
        self.path = path or name
        self.generator = f"reasoning-gym {importlib.metadata.version('reasoning-gym')}"
        self._dataset = _create(name, options)
        self._judged: dict[tuple[int, str], tuple[str | None, float]] = {}
        self.config = _config_hash(self._dataset.config)

    def task(self, index: int) -> Task | None:
        """Item `index`; None where the library fails, or where its reference answer is not right.

        The latter happens: an empty answer (base_conversion of 0), a conclusion that does not follow
        (propositional_logic after 100 failed tries).
        """
        try:
            # decimal_arithmetic sets the precision of the whole thread and never sets it back.
            with decimal.localcontext(decimal.Context()):
                item = self._dataset[index]
        except Exception:  # generators fail in their own ways: decimal_arithmetic may divide by 0
            return None
        task = Task(
            name=TaskName(self.environment, self.config, self.generator, seed=0, index=index),
            label=self.label,
            question=item["question"].strip(),
            answer=item["metadata"]["example_answer"] if item["answer"] is None else item["answer"],
            metadata=item["metadata"],
        )
        try:
            right = self.check(task, extract(task.answer or "") or "") >= checkers.FULL_MARKS
        except Exception:  # so do scorers
            return None
        return task if right else None

    def read(self, task: Task, completion: str) -> tuple[str | None, float]:
        """As the parent's. The library judges equal answers to a question once: siblings often agree."""
        key = task.name.index, completion
        if key not in self._judged:
            if len(self._judged) >= JUDGED:
                self._judged.clear()
            self._judged[key] = super().read(task, completion)
        return self._judged[key]

    def check(self, task: Task, answer: str) -> float:
        """Score of `answer`. Whatever the library's scorer raises is passed on."""
        if self.environment == "binary_matrix":
            return checkers.matrix(answer, task.answer or "")
        if self.environment == "gsm_symbolic":
            return text_or_number(answer, task.answer or "")
        if self.environment == "propositional_logic":
            return checkers.conclusion(answer, task.metadata["premises"], task.metadata["variables"])
        entry = {"question": task.question, "answer": task.answer, "metadata": task.metadata}
        with decimal.localcontext(decimal.Context()):
            return float(self._dataset.score_answer(answer, entry))


class Entry(NamedTuple):
    """A row of `swarm-node tasks`."""

    name: str
    sets: list[str]  # sets that the environment belongs to
    checker: Literal["library", "own"]
    question: str  # an example, with the library's default options
    answer: str


def questions_of_the_package() -> Entry:
    """The row of the questions that need no other package."""
    with STARTER_QUESTIONS.open() as file:
        first = json.loads(file.readline())
    return Entry(STARTER, [], "own", first["question"], first["answer"])


def list_environments() -> list[Entry]:
    """Every allowed environment with an example. UserError if reasoning-gym is not installed."""
    entries = []
    for name, checker in ALLOWED.items():
        environment = ReasoningGym(name, {})
        task = next(task for index in range(environment.size) if (task := environment.task(index)))
        sets = [group for group, members in SETS.items() if name in members]
        entries.append(Entry(name, sets, checker, task.question, task.answer or ""))
    return entries


def library() -> dict[str, tuple[Any, Any]]:
    """Environment -> (class of its data set, class of its options): all of the library, audited or not. Imports
    reasoning-gym (about a second), hence only here. UserError if it is not installed."""
    check_extra("puzzles", "a task of reasoning-gym")
    from reasoning_gym.factory import DATASETS

    return DATASETS


def defaults_of(name: str) -> dict[str, object]:
    """The library's default of each option that users may set."""
    fields = dataclasses.fields(library()[name][1])
    return {field.name: field.default for field in fields if field.name not in FIXED}


def _create(name: str, options: dict[str, Any]) -> Any:
    make_dataset, make_config = library()[name]
    defaults = defaults_of(name)
    for option, value in options.items():
        if option in FIXED:
            raise UserError(f"task {name!r}: option {option!r} is set by the node, leave it out")
        if option not in defaults:
            raise UserError(f"task {name!r} has no option {option!r}{nearest(option, set(defaults))}")
        if type(defaults[option]) is int and type(value) is not int:
            raise UserError(f"task {name!r}: option {option!r} must be a whole number, not {value!r}")
    try:
        config = make_config(**options, seed=0)
        config.validate()
        if name in ENDLESS and ENDLESS[name][0](config):
            raise ValueError(ENDLESS[name][1])
        patch(name)
        made = make_dataset(config=config)
        if name == "gsm_symbolic":
            made.task_indices = TemplatesInTurn()
        return made
    except Exception as error:  # each data set checks its options in its own way
        raise UserError(f"task {name!r}: wrong options: {error}") from error


def _config_hash(config: Any) -> str:
    """First digits of the sha256 of all options but `FIXED`, given or default, as canonical JSON."""
    options = {key: value for key, value in dataclasses.asdict(config).items() if key not in FIXED}
    text = json.dumps(options, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:CONFIG_HASH_CHARS]


def nearest(word: str, known: set[str]) -> str:
    """`; did you mean …?` for an error message, or nothing."""
    match = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else ""


class TemplatesInTurn:
    """The template of each item of gsm_symbolic: they take turns. The library draws one for each item of a data set
    beforehand, so that an item depends on the seed apart from seed + index, and there is none beyond the size."""

    def __init__(self) -> None:
        from reasoning_gym.arithmetic.gsm_symbolic.gsm_symbolic import tasks_ok

        self._templates = tasks_ok

    def __getitem__(self, index: int) -> int:
        return self._templates[index % len(self._templates)]


def patch(name: str) -> None:
    """Replace what prints or is slow in the library's generator of environment `name`; items stay the same."""
    if name == "bf":
        from reasoning_gym.code.contrib.bfit.Compiler import Optimizer

        Optimizer.print = lambda *args, **kwargs: None  # prints a dot for each optimisation it makes
    if name == "basic_arithmetic":
        from reasoning_gym.arithmetic import basic_arithmetic

        basic_arithmetic.find_common_divisors = common_divisors


def common_divisors(a: int, b: int) -> list[int]:
    """Divisors d of g = gcd(a, b) in the library's order: by the smaller of d and g/d, that one first.

    The library tries every number up to sqrt(g), which takes a minute for g = 10^18; with default options,
    one item in 20 000 takes it longer than a second.
    """
    from sympy import divisors

    common = math.gcd(a, b)
    ordered = []
    for small in divisors(common) if common else ():
        if small * small > common:
            break
        ordered.append(small)
        if small * small != common:
            ordered.append(common // small)
    return ordered
