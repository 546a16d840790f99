"""How a run that has stopped goes on: by a command that works here, or else by what has to be done instead.

config.toml, checkpoints -> `resume RUN`; with --rounds if all rounds are done, with --max-memory if it lacked that
                         -> what to do instead, if a program gave it its reward functions or if its files are gone

Reads config.toml as a table, since the dashboard reads files only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from swarm_node.say import own_command
from swarm_node.storage.names import newest_round
from swarm_node.storage.plain_files import read_plain
from swarm_node.storage.rundir import RunDir
from swarm_protocol.plain_toml import parsed_toml

MAX_CONFIG_BYTES = 1 << 20  # a longer config.toml is not read
ROOM = 1.25  # memory to allow, as a multiple of what a run would have needed when it ended
USUAL_ROUNDS = 200  # as `DEFAULT_ROUNDS` of the configuration, which the dashboard may not import
IN_A_FILE = re.compile(r"(.+\.py):[A-Za-z_]\w*")  # code of the user, among the values of settings
PLACE = ("/", "./", "../", "~")  # how a model begins that is certainly a directory of this machine


class GoingOn(msgspec.Struct, frozen=True):
    """How to go on with a run."""

    command: str = ""  # what to type after the program's name; empty = no command goes on with it here
    instead: str = ""  # what to do then, in the imperative

    @property
    def typed(self) -> str:
        """The whole command as it is typed here; empty if there is none."""
        return self.command and f"{own_command()} {self.command}"


def going_on(run: RunDir, settings: Mapping[str, Any] | None = None, lacked_gib: float = 0.0) -> GoingOn:
    """How to go on with `run` when no process holds it. `settings`: its config.toml, if that was read already;
    `lacked_gib`: the memory that it would have needed, if it ended for that."""
    table = _read(run) if settings is None else settings
    if table is None:
        return GoingOn(instead="begin anew: its config.toml is not there, or cannot be read")
    functions = _within(table, "rewards", "functions")
    paths = [each.get("path") for each in functions if isinstance(each, dict)] if isinstance(functions, list) else []
    if given := [path for path in paths if isinstance(path, str) and of_a_program(path)]:
        return GoingOn(instead=f"start the program again that gave it the reward function {given[0]!r}")
    gone = next((name for name in _needed(table) if not _is_there(name)), None)
    if gone is not None:
        there = "" if gone.startswith(("/", "~")) else ", or go to the directory where it began"
        return GoingOn(instead=f"put {gone!r} back, which its settings name{there}")
    done = newest_round(run.checkpoints) or 0
    more = f" --rounds {2 * done}" if 0 < _total(table) <= done else ""
    room = f" --max-memory {math.ceil(ROOM * lacked_gib)}" if lacked_gib else ""
    return GoingOn(f"resume {run.quoted}{more}{room}")


def who_goes_on(run: RunDir, functions: Iterable[str], options: str = "") -> str:
    """Who goes on with a run that is here and has these reward functions, as the subject of a sentence: the command
    with `options`, or a program."""
    given = next(filter(of_a_program, functions), None)
    if given is None:
        return f"`swarm-node resume {run.quoted}{options and f' {options}'}`"
    return f"the program that gave it {given!r}{options and f' (with {options})'}"


def of_a_program(path: str) -> bool:
    """Whether only a program has the reward function at `path`: as `only_in_a_program` of the configuration."""
    where, _, attribute = path.rpartition(":")
    dotted = "." in attribute and not where.endswith(".py")
    return where == "__main__" or attribute.endswith("()") or "<" in attribute or dotted


def _read(run: RunDir) -> dict[str, Any] | None:
    """Its config.toml; None if that cannot be read."""
    try:
        return parsed_toml(read_plain(run.config, MAX_CONFIG_BYTES).decode())
    except (OSError, ValueError, RecursionError):
        return None


def _total(table: Mapping[str, Any]) -> float:
    """The rounds after which the run is over."""
    rounds = table.get("rounds")
    endless = table.get("swarm") or table.get("minutes")
    return rounds if isinstance(rounds, int) else math.inf if endless else USUAL_ROUNDS


def _needed(table: Mapping[str, Any]) -> Iterator[str]:
    """Files and directories without which the run cannot start, as its settings name them. A member gets model and
    questions from its swarm."""
    yield from (match[1] for text in _texts(table) if (match := IN_A_FILE.fullmatch(text)))
    if table.get("swarm"):
        return
    model = _within(table, "policy", "model")
    if isinstance(model, str) and model.startswith(PLACE) and not model.endswith(".gguf"):
        yield model
    for tasks in (table.get("tasks"), _within(table, "eval", "tasks")):
        for task in tasks if isinstance(tasks, list) else ():
            name = task.get("file") if isinstance(task, dict) else task
            if isinstance(name, str) and ":" not in name and Path(name).suffix:
                yield name


def _is_there(name: str) -> bool:
    try:
        return Path(name).expanduser().exists()
    except (OSError, RuntimeError):  # a name that is too long, or of a user who is not here
        return False


def _texts(value: object) -> Iterator[str]:
    waiting = [value]  # a stranger's tables may be nested 40,000 deep
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            waiting += reversed(value.values() if isinstance(value, dict) else value)


def _within(table: Mapping[str, Any], section: str, key: str) -> Any:
    found = table.get(section)
    return found.get(key) if isinstance(found, dict) else None
