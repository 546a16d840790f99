"""How any part of a node tells its user something: one sentence, and some sentences only once."""

from __future__ import annotations

import logging
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

Say = Callable[[str], None]  # takes one sentence for the user, from any thread


class Warned(str):
    """A sentence of level `warning`: something failed or was lost, and the node goes on. Any `Say` takes it."""


class Failed(str):
    """A sentence of level `error`: the node has to end for what it says. Any `Say` takes it."""


class Detail(str):
    """A sentence of level `debug`: a technical detail, shown with --verbose alone. Any `Say` takes it."""


def level_of(sentence: str) -> int:
    """The level of a sentence, as `logging` counts them."""
    if isinstance(sentence, Failed):
        return logging.ERROR
    if isinstance(sentence, Warned):
        return logging.WARNING
    return logging.DEBUG if isinstance(sentence, Detail) else logging.INFO


def is_shown(level: int) -> bool:
    """Whether sentences of this level are shown in this process, by --verbose and --quiet or by the level of the
    logger "swarm_node"."""
    return level >= (logging.getLogger("swarm_node").level or logging.INFO)


class Once:
    """Says a sentence of each key once, until what it is about is over."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._said: set[str] = set()

    def __call__(self, key: str, sentence: str) -> None:
        """Say the sentence, unless one of this key was said and `over` was not called since."""
        if key not in self._said:
            self._said.add(key)
            self._say(sentence)

    def over(self, key: str) -> None:
        """Let the next sentence of this key be said."""
        self._said.discard(key)


def in_short(text: object, most: int = 200) -> str:
    """What another program or library says, in one line: its first sentences if all do not fit into `most` characters,
    and never half a word."""
    line = " ".join(str(text).split())
    if len(line) <= most:
        return line
    end = max(line.rfind(mark, 0, most) for mark in (". ", "; ", "! ", "? "))
    return line[: end + 1].rstrip(";") if end > 0 else f"{line[:most].rpartition(' ')[0] or line[:most]} …"


def own_command() -> str:
    """How to type `swarm-node` here: a name on the PATH, else the path by which this process was started."""
    started = Path(sys.argv[0])
    if shutil.which("swarm-node") is not None:
        return "swarm-node"
    if started.name == "swarm-node" and started.exists():
        return shlex.quote(sys.argv[0])
    return f"{shlex.quote(sys.executable)} -m swarm_node"
