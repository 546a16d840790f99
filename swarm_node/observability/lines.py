"""Sentences as lines for programs: a time and a level before each, or one JSON object a line.

It imports little, since a command shows its first line before anything that takes time.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from io import TextIOWrapper
from typing import Any, Protocol, TextIO

from swarm_protocol.errors import visible

LEVELS = {logging.DEBUG: "debug", logging.INFO: "info", logging.WARNING: "warning"}
"""Names of levels in the log; a library may rename those of `logging` for the whole process, as hivemind does."""


class Show(Protocol):
    """Shows a sentence. `level` is `info`, `warning` or `error`."""

    def __call__(self, text: str, kind: str, level: str) -> None: ...


def shown_as_lines(log_format: str, node: str, stream: TextIO) -> Show | None:
    """How sentences are shown as lines for programs, in the `log_format`: `json`, or `text` with time and level.
    None on a terminal, unless it is to be JSON. Times are in UTC."""
    as_json = log_format == "json"
    if stream.isatty() and not as_json:
        return None
    if isinstance(stream, TextIOWrapper):  # a character that it cannot show must not end a run
        stream.reconfigure(errors="backslashreplace")
    lasting = Lasting(stream)

    def show(text: str, kind: str, level: str) -> None:
        if as_json:
            lasting.write(json_line(node, text, kind, level))
        else:
            now = _now()
            lasting.write("".join(f"{now} {level.upper():7} {visible(line)}\n" for line in text.split("\n")))
        lasting.flush()

    return show


def json_line(node: str, text: str, kind: str, level: str, **more: Any) -> str:
    record = {"time": _now(), "level": level, "node": node, "kind": kind, "message": text}
    return json.dumps(record | more) + "\n"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Lasting:
    """A stream that may end before the run: a terminal that is closed, a full disk, a pipe that nobody reads any more.

    Text that cannot be written is lost, since the run matters more. From any thread, Rich's own included. What a closed
    pipe or terminal did not take would be written again when the process ends, and fail it: it goes nowhere instead.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._going_on():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._going_on():
            self._stream.flush()

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.EIO):
                with suppress(io.UnsupportedOperation), open(os.devnull, "w") as nowhere:
                    os.dup2(nowhere.fileno(), self._stream.fileno())
