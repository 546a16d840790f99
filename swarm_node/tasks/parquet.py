"""The rows of a Parquet file.

    the file's bytes --stdin--> python -I, parquet_child.py (a limit of memory) --stdout--> frames of rows

A short file may ask for any amount of memory: pages are compressed, and one byte repeats a value, or the beginnings of
a list, millions of times; what its footer says of sizes need not be so. So it is read in a process that may not have
more than `MAX_BYTES`, in which all rows must fit as the objects that they become here.
"""

from __future__ import annotations

import importlib.util
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import msgspec

from swarm_node.errors import UserError
from swarm_node.install import extra_command, isolated

MAX_BYTES = 2**31  # of memory that reading a file may take, besides the libraries and the file itself
LENGTH_BYTES = 8  # of a frame's length, before the frame


def read_parquet(path: str, data: bytes) -> tuple[list[str], list[dict[str, Any]]]:
    """(columns that are not read, since they hold bytes; rows) of a file with this content. UserError if it is
    malformed or takes too much memory."""
    if importlib.util.find_spec("pyarrow") is None:
        raise UserError(
            f"task file {path} is Parquet, and reading that takes the package pyarrow: {extra_command('parquet')}"
        )
    program = isolated(str(Path(__file__).with_name("parquet_child.py")), str(MAX_BYTES))
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin and child.stdout
        try:
            with suppress(BrokenPipeError), child.stdin:  # it reads the whole file before it says anything
                child.stdin.write(data)
            return _rows(path, child.stdout)
        finally:
            child.kill()


def _rows(path: str, frames: IO[bytes]) -> tuple[list[str], list[dict[str, Any]]]:
    """What the child says. Raises UserError."""
    left_out: list[str] | None = None
    rows: list[dict[str, Any]] = []
    room = MAX_BYTES
    while length := int.from_bytes(frames.read(LENGTH_BYTES)):
        room -= length
        if room < 0:  # a name of a column is one object there, and stands in each row here
            break
        frame = frames.read(length)
        if len(frame) < length:
            break
        told = msgspec.msgpack.decode(frame)
        if isinstance(told, str):
            raise UserError(
                f"task file {path}, after row {len(rows)}: {told}"
                if rows
                else f"task file {path} is no Parquet that can be read: {told}"
            )
        if left_out is None:
            left_out = told
        elif not told:
            return left_out, rows
        else:
            rows += told
    raise _too_large(path)


def _too_large(path: str) -> UserError:
    """The error about a file that ends the process, as a library does that gets no memory."""
    return UserError(
        f"task file {path} is damaged, or its rows take more than {MAX_BYTES / 2**30:.0f} GiB of memory: write the "
        "rows and columns that you need to a file"
    )
