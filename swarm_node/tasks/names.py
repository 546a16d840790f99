"""Names of tasks that are none, and what their user may have meant."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Container, Iterable
from itertools import chain, count, islice
from pathlib import Path

from swarm_node.config.training import HUB, QUESTION_FILES
from swarm_node.errors import UserError
from swarm_node.tasks.reasoning_gym import nearest

TO_CSV = dict.fromkeys([".xlsx", ".xls", ".ods"], "save the sheet as CSV, with UTF-8 text, and name that file")
ROW = '{"question": "1+1?", "answer": "2"}'
MAX_IN_METRICS, MAX_CHARS = 16, 60  # rewards that have a metric of their own, and most characters of their names
DATA_SET = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def numbered(name: str, taken: Container[str]) -> str:
    """`name`, or the first of `name-2`, `name-3`, … that is not taken."""
    return next(each for each in chain([name], (f"{name}-{n}" for n in count(2))) if each not in taken)


def in_metrics(names: Iterable[str]) -> dict[str, str]:
    """The first MAX_IN_METRICS of these names of rewards -> what they are called in metrics: letters, digits, `_`, `.`
    and `-`, at most MAX_CHARS of them, and each of its own."""
    found: dict[str, str] = {}
    for name in islice(names, MAX_IN_METRICS):
        plain = re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:MAX_CHARS]
        found[name] = numbered(plain, set(found.values()))
    return found


def endless(names: Collection[str]) -> UserError:
    """The error about tasks of which all questions are wanted, and that make questions without end."""
    return UserError(
        f"--all asks every question, and {', '.join(names)} never ends: name question files (--tasks test.jsonl), "
        "or a number of questions (--questions 1000)"
    )


def unknown_task(name: str, known: Collection[str]) -> UserError:
    """The error about a name that is neither a task nor a question file; `known` are the names of tasks and sets."""
    ending = Path(name).suffix.lower()
    if ending in TO_CSV:
        return UserError(f"task {name!r}: {TO_CSV[ending]}; see docs/tasks.md")
    if ending == ".arrow" or (Path(name) / "dataset_info.json").is_file():
        return UserError(
            f"task {name!r}: a data set that `save_to_disk` wrote is read as JSON lines: "
            f"`python -c 'import datasets, sys; datasets.load_from_disk(sys.argv[1]).to_json(sys.argv[2])' "
            f"{shlex.quote(name)} questions.jsonl` writes them (pip install datasets)"
        )
    if ending == ".txt" or Path(name).is_file():
        return UserError(
            f"task {name!r}: a question file is called .jsonl, .json, .csv, .tsv or .parquet. If it has JSON lines "
            f"such as {ROW}, name it as --tasks '{{file={json.dumps(name)}}}'; see docs/tasks.md"
        )
    match = nearest(name, set(known))
    if not match and DATA_SET.fullmatch(name):
        return UserError(
            f"unknown task {name!r}: a data set of the Hugging Face hub is called {HUB}{name}; docs/tasks.md has more"
        )
    endings = ", ".join(QUESTION_FILES)
    return UserError(
        f"unknown task {name!r}{match} (`swarm-node tasks` lists all; a question file ends in one of {endings})"
    )
