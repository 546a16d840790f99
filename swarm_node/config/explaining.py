"""Errors of a configuration in one line, with key, value, source and the nearest known name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from textwrap import shorten

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from swarm_node.config.keys import FILE_SUFFIX, VARIABLE_PREFIX, all_keys, subsections
from swarm_node.config.section import IN_WORDS, TOGETHER, Section
from swarm_node.config.trl_names import loss_hint, trl_hint

EXAMPLES = {
    "tasks[]": '{ env = "gcd", weight = 2 }',
    "eval.tasks[]": '{ file = "test.jsonl", question = "prompt" }',
    "rewards.functions[]": '{ path = "mine.py:reward", weight = 1 }',
}
"""Key of a table in a list -> one that could stand there."""


def explain(error: ValidationError, source: str) -> str:
    """One line about the most helpful of the errors: a wrong name first, then the deepest wrong value."""
    errors = error.errors(include_url=False)
    problem = max(errors, key=_tells)
    key = _dotted(problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key} in {source}{trl_hint(key) or did_you_mean(key, all_keys(), '.')}"
    if problem["type"] == "missing":
        return f"{key} is missing in {source}"
    message = problem["msg"].replace("Input should be", "must be").replace("String should have", "must have")
    message = message.partition(", unable to parse")[0]
    if problem["type"] == "string_pattern_mismatch":
        message = IN_WORDS.get(problem["ctx"]["pattern"], message)
    if problem["type"] in ("model_type", "dict_type"):
        message = f"must be a table{_example(key)}"
    if problem["type"] == "literal_error" and _is_alternative(problem["loc"][-1]):
        names = re.findall(r"'[^']*'", problem["ctx"]["expected"])
        message = f"must be {', '.join(names)} or package.module:function"
        hint = loss_hint(key, problem["input"])
        matches = [] if hint else difflib.get_close_matches(repr(problem["input"]), names, n=1)
        message += hint or "".join(f"; did you mean {match}?" for match in matches)
    value, field = problem["input"], all_keys().get(key)
    if isinstance(value, dict) and len(value) == 1 and field is not None and dict(subsections(field)):
        ((name, value),) = value.items()  # all that was given of the section
        key += f".{name}"
    is_secret = source.startswith(VARIABLE_PREFIX) and source.endswith(FILE_SUFFIX)
    shown = "(hidden)" if is_secret else shorten(_shown(value), 80)
    return f"{key} = {shown} in {source}: {message}"


def _example(key: str) -> str:
    """What the table at `key` may look like."""
    name = re.sub(r"\[\d+\]", "[]", key)
    if name in EXAMPLES:
        return f", such as {EXAMPLES[name]}"
    inner = next((each for each in all_keys() if each.startswith(f"{name}.")), "")
    return f"; set its keys one by one, such as {inner}" if inner else ""


def _tells(error: ErrorDetails) -> tuple[bool, bool, int, bool]:
    """Sort key: how much an error helps the user."""
    kind = error["type"]
    return kind != TOGETHER, kind == "extra_forbidden", len(error["loc"]), kind != "string_type"


def _shown(value: object) -> str:
    """The value as TOML."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_shown(each)}" for name, each in value.items()) + " }"
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _dotted(location: tuple[int | str, ...]) -> str:
    """("tasks", 0, "TaskConfig", "weight") -> "tasks[0].weight". pydantic adds alternatives of a union, named after a
    section or a type such as `str` and `list[str]`."""
    alternatives = {"str", "list[str]", *(kind.__name__ for kind in Section.__subclasses__())}
    key = ""
    for part in location:
        if isinstance(part, int):
            key += f"[{part}]"
        elif part not in alternatives and not _is_alternative(part):
            key += f".{part}" if key else part
    return key


def _is_alternative(part: int | str) -> bool:
    """Whether pydantic added the part for a literal, or for a text with a pattern."""
    return isinstance(part, str) and part.startswith(("literal[", "constrained-str"))


def did_you_mean(word: str, known: Iterable[str], separator: str) -> str:
    """`; did you mean …?` with the nearest known name. Names with the same last part come first."""

    def last(name: str) -> str:
        return name.removeprefix(VARIABLE_PREFIX).rpartition(separator)[2]

    indices = re.findall(r"\[\d+\]", word)
    word = re.sub(r"\[\d+\]", "[]", word)
    alike = [name for name in known if last(name) == last(word)]
    match = difflib.get_close_matches(word, alike or known, n=1, cutoff=0.0 if alike else 0.6)
    if not match:
        return "; `swarm-node config reference` lists all"
    for index in indices:
        match[0] = match[0].replace("[]", index, 1)
    return f"; did you mean {match[0]}?"
