"""Names of tasks that are none, and what their user may have meant."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Container, Iterable
from itertools import chain, count, islice
from pathlib import Path

from swarm_node.errors import UserError
from swarm_node.tasks.reasoning_gym import nearest

OTHER_FILES = {".json", ".parquet", ".txt", ".arrow", ".xlsx"}
ROW = '{"question": "1+1?", "answer": "2"}'
FROM_TSV = "import csv, json, sys; [print(json.dumps(row)) for row in csv.DictReader(sys.stdin, delimiter='\\t')]"
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
    if ending == ".tsv":
        quoted, out = shlex.quote(name), shlex.quote(str(Path(name).with_suffix(".jsonl")))
        return UserError(
            f"task {name!r}: a question file is CSV, or JSON lines with a question and an answer each. If {name} has "
            f'columns `question` and `answer`, this converts it:\npython3 -c "{FROM_TSV}" < {quoted} > {out}'
        )
    if ending in OTHER_FILES or Path(name).is_file():
        return UserError(
            f"task {name!r}: a question file ends in .csv, or in .jsonl and has lines such as {ROW}; see docs/tasks.md"
        )
    match = nearest(name, set(known))
    if not match and DATA_SET.fullmatch(name):
        return UserError(
            f"unknown task {name!r}: data sets of the Hugging Face hub are not read directly. Write the questions to a "
            f"file of lines such as {ROW}, and name that file; docs/tasks.md shows how"
        )
    return UserError(
        f"unknown task {name!r}{match} (`swarm-node tasks` lists all; a question file ends in .jsonl or .csv)"
    )
