"""Relative paths in the settings of a run count from where it began: an error about one says so."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from swarm_node.config import NodeConfig
from swarm_node.config.own import read_own
from swarm_node.errors import UserError


def where_it_began(message: str, values: Mapping[str, Any]) -> str:
    """The end of an error message, if it is about a relative path in the settings of a run that the options `values`
    name; empty otherwise."""
    for named in _texts(list(values.values())):
        file = Path(named) / "config.toml"
        if not file.is_file():
            continue
        try:
            config = read_own(file)
        except UserError:  # that is what the error is about
            continue
        for path in _paths(config):
            place = Path(path)
            if (
                not place.is_absolute()
                and path[:1] != "~"
                and _is_named(path, str(place), message)
                and not place.exists()
            ):
                return f"; {place} in {file} is relative to where the run began: give the command there"
    return ""


def _is_named(path: str, place: str, message: str) -> bool:
    """Whether a message names the place at `path`: a path with a slash or a point by its word, any other, which may be
    the name of a set or a model, in quotes."""
    word = re.escape(place) if {"/", "."} & {*path} else f"['\"`]{re.escape(place)}['\"`]"
    return re.search(rf"(?<![\w/.-]){word}(?![\w/-])", message) is not None


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str | Path):
        yield str(value)
    for each in value if isinstance(value, list | tuple) else ():
        yield from _texts(each)


def _paths(config: NodeConfig) -> Iterator[str]:
    """What the settings name that may be a path."""
    yield config.policy.model
    for task in (*config.tasks, *config.eval.tasks):
        name = task if isinstance(task, str) else task.file or ""
        yield name.partition(":")[0] if name.partition(":")[0].endswith(".py") else name
    for function in config.rewards.functions:
        yield function.path.rpartition(":")[0]
