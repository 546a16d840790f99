"""Append-only files of one JSON object a line.

Each line goes out in ONE unbuffered `write`, so there is never half a record in the middle of the file. At
most the last line is incomplete (the system shows a write page by page, a power cut tears it): readers leave
that one out, and opening the file for writing cuts it off.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from swarm_node.errors import UserError
from swarm_node.rundir import explain, os_errors_explained

MAX_WAITING = 10_000  # lines kept while the disk is full: a few megabytes


class JsonLines:
    """Writes one file; safe to use from several threads.

    A full disk does not stop the run: it is reported once, the lines wait in memory and follow as soon as
    there is room. `close` raises UserError if some never found room; what is appended after it is dropped.
    """

    def __init__(self, path: Path, report: Callable[[str], None]) -> None:
        self._path = path
        self._report = report
        self._waiting: deque[bytes] = deque(maxlen=MAX_WAITING)
        self._failure: str | None = None
        self._lock = Lock()
        with os_errors_explained(path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.ftruncate(self._descriptor, len(_whole_lines(path.read_bytes())))

    def append(self, record: Mapping[str, Any]) -> None:
        """Write `record` as one line; floats that are not finite become null."""
        line = json.dumps(tidy(record), ensure_ascii=False, allow_nan=False).encode() + b"\n"
        with self._lock:
            if self._descriptor < 0:
                return
            self._waiting.append(line)
            error = self._write_waiting()
            problem = explain(error, self._path) if error else None
            newly_failing = problem if self._failure is None else None
            self._failure = problem
        if newly_failing:
            self._report(newly_failing)

    def keep_while(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Cut the file before the first record that is not `wanted`."""
        size = 0
        for line, record in _parse(self._path):
            if not wanted(record):
                break
            size += len(line)
        with os_errors_explained(self._path):
            os.ftruncate(self._descriptor, size)

    def close(self) -> None:
        """Raises UserError if lines are left that the disk had no room for."""
        with self._lock:
            if self._descriptor < 0:
                return
            error = self._write_waiting()
            os.close(self._descriptor)
            self._descriptor = -1  # threads that end late still append: the number may be another file's by then
        if error:
            raise UserError(explain(error, self._path)) from error

    def _write_waiting(self) -> OSError | None:
        while self._waiting:
            try:
                self._write(self._waiting[0])
            except OSError as error:
                return error
            self._waiting.popleft()
        return None

    def _write(self, line: bytes) -> None:
        size = os.fstat(self._descriptor).st_size
        if os.write(self._descriptor, line) < len(line):  # the disk filled up within it: leave no half
            os.ftruncate(self._descriptor, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All whole records; a torn last line is left out.

    Raises UserError if the file cannot be read or another line is not a record.
    """
    return [record for _, record in _parse(path)]


def tidy(value: Any) -> Any:
    """What JSON can hold: floats to six digits (three after the point if large), null if not finite."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return round(value, 3) if abs(value) >= 1000 else float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: tidy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [tidy(item) for item in value]
    return value


def _parse(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    try:
        lines = _whole_lines(path.read_bytes()).splitlines(keepends=True)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise UserError(f"line {number} of {path} is not a record: delete that line")
        yield line, record


def _whole_lines(data: bytes) -> bytes:
    return data[: data.rfind(b"\n") + 1]
