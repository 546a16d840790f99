"""Breaks sentences for a terminal so that commands and links in them can be copied.

    Type `swarm-node join 'swarm://…' --name bob` on the other machine.        does not fit in a line, so:

    Type
    swarm-node join 'swarm://…' --name bob
    on the other machine.

A command stays in one piece, on a line of its own if it does not fit beside other words. If it is longer than the
terminal is wide, the terminal itself breaks it, and what is copied from there is one line again.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from typing import TextIO

from rich.cells import cell_len

from swarm_protocol.errors import visible

LINK = "swarm://"
COMMAND = re.compile(r"`([^`]*swarm-node [^`]*)`")
STARTS = re.compile(r"\s*(next +)?(\S*/)?(python\S* -m swarm_node|swarm-node) ")
_SPACE = "\0"  # stands for a space within a command while words are broken apart


def wrapped(line: str, width: int, indent: int = 0) -> str:
    """`line` broken between words at `width` columns, the rest indented by `indent`. A line that is a command, or has a
    link, stays as it is, and so does each command in backquotes, without them if it gets a line of its own."""
    if cell_len(line) <= width or STARTS.match(line) or LINK in COMMAND.sub("", line):
        return line
    kept = COMMAND.sub(lambda found: found[0].replace(" ", _SPACE), line)
    rest = " " * indent
    parts = textwrap.wrap(kept, width, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False)
    return "\n".join(_bare(part) for part in parts).replace(_SPACE, " ")


def for_stream(line: str, stream: TextIO, indent: int = 0) -> str:
    """`line`, in which a stranger may have written, as it goes to `stream`: without control characters, and broken at
    the width of the terminal if it is one."""
    line = visible(line)
    return wrapped(line, shutil.get_terminal_size().columns, indent) if stream.isatty() else line


def _bare(part: str) -> str:
    """A broken line, without the backquotes of a command that is alone on it."""
    alone = re.fullmatch(r"(\s*)`([^`]*)`[.,;:]?", part)
    return f"{alone[1]}{alone[2]}" if alone else part
