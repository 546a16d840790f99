"""Append-only files of one JSON object a line.

Each line is written in ONE unbuffered `write`, so no half record is ever in the middle of the file. At most the last
line is incomplete: the system shows a write page by page, and a power cut tears it. Readers leave it out, and opening
the file for writing cuts it off.

A file may be longer than memory: it is read line by line, or backwards from its end.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec

from swarm_node.errors import UserError
from swarm_node.say import Warned
from swarm_node.storage.plain_files import open_plain
from swarm_node.storage.rundir import explained, os_error_text, os_errors_explained

MAX_WAITING = 10_000  # lines kept while the disk is full: a few megabytes
APPENDING = os.O_WRONLY | os.O_CREAT | os.O_APPEND
MAX_INT = 2**63
MAX_LINE_BYTES = 64 << 20  # a longer line is none of a node
CHUNK_BYTES = 64 << 10  # bytes read at a time from the end of a file: some tens of lines


class JsonLines:
    """Writes one file; safe to use from several threads.

    A full disk does not stop the run. It is reported once; lines wait in memory and are written as soon as there is
    room. Records appended after `close` are dropped.
    """

    def __init__(self, path: Path, report: Callable[[str], None]) -> None:
        self.path = path
        self.report = report
        self._waiting: deque[bytes] = deque(maxlen=MAX_WAITING)
        self._failing = False  # whether the last write failed
        self._bounded = True  # False once the file could not be read
        self._lock = Lock()
        with os_errors_explained(path):
            _temporary(path).unlink(missing_ok=True)  # of a process that was killed while it replaced the file
            self._descriptor = os.open(path, APPENDING, 0o644)
            os.ftruncate(self._descriptor, _whole_bytes(path))

    def append(self, record: Mapping[str, Any]) -> None:
        """Write `record` as one line; floats that are not finite become null."""
        line = encoded_line(record)
        with self._lock:
            if self._descriptor < 0:
                return
            self._waiting.append(line)
            error = self._write_waiting()
            newly_failing = error is not None and not self._failing
            self._failing = error is not None
        if error and newly_failing:
            self.report(Warned(os_error_text(error, self.path)))

    @property
    def size(self) -> int:
        """Bytes in the file; 0 after `close`."""
        with self._lock:
            return 0 if self._descriptor < 0 else os.fstat(self._descriptor).st_size

    def cut_after(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Cut the file after the last record that is `wanted`. Raises UserError if a later line is not a record."""
        size = 0
        for start, line in _backwards(self.path):
            if wanted(parsed(line, self.path)):
                size = start + len(line)
                break
        with os_errors_explained(self.path):
            os.ftruncate(self._descriptor, size)

    def replace(self, lines: Iterable[bytes]) -> None:
        """Replace the file by `lines`: readers see the old or the new file, also after a crash. `lines` may read the
        old one. Nothing happens if there is no room, which is reported, or if lines wait for room."""
        with self._lock:
            if self._descriptor < 0 or self._waiting:
                return
            try:
                old, self._descriptor = self._descriptor, _replaced(self.path, lines)
            except OSError as error:
                problem = os_error_text(error, self.path)
            else:
                os.close(old)
                return
        self.report(Warned(problem))

    def bound(self, most_bytes: int) -> None:
        """Keep the newest half of `most_bytes` if the file is larger than that. A file that cannot be read, since
        somebody has removed it, is no reason to end a run: that is reported, and the file is bounded no more."""
        if self._bounded and self.size > most_bytes:
            try:
                self.replace(last_lines(self.path, most_bytes // 2))
            except UserError as error:
                self._bounded = False
                self.report(Warned(str(error)))

    def close(self) -> None:
        """Close the file. Raises UserError if lines are left for which the disk had no room."""
        with self._lock:
            if self._descriptor < 0:
                return
            error = self._write_waiting()
            os.close(self._descriptor)
            self._descriptor = -1  # threads that end late still append: the number may be another file's by then
        if error:
            raise explained(error, self.path) from error

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
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))


def each_record(path: Path) -> Iterator[dict[str, Any]]:
    """Each whole record in turn; a torn last line is left out. Raises UserError if the file cannot be read or another
    line is not a record."""
    for number, line in enumerate(whole_lines(path), 1):
        yield parsed(line, path, number)


def last_record(path: Path) -> dict[str, Any] | None:
    """The last whole record; None if there is none. Raises UserError if it cannot be read or is not a record."""
    return next((parsed(line, path) for _, line in _backwards(path)), None)


def whole_lines(path: Path, start: int = 0) -> Iterator[bytes]:
    """Whole lines with their ends, from the byte `start` to the present end; a torn last line is left out. Raises
    UserError if the file cannot be read."""
    with _reading(path), open_plain(path) as file:
        left = os.fstat(file.fileno()).st_size - start
        file.seek(start)
        while line := file.readline(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES:
                raise not_a_record(path)
            left -= len(line)
            if left < 0 or not line.endswith(b"\n"):  # its rest may come while this is read
                return
            yield line


def last_lines(path: Path, most_bytes: int) -> Iterator[bytes]:
    """The last whole lines, oldest first, of at most `most_bytes` together. Raises UserError."""
    end = start = _whole_bytes(path)
    for at, _ in _backwards(path):
        if end - at > most_bytes:
            break
        start = at
    yield from whole_lines(path, start)


def encoded_line(record: Mapping[str, Any]) -> bytes:
    """A record as one line; floats that are not finite become null."""
    return json.dumps(tidy(record), ensure_ascii=False, allow_nan=False).encode() + b"\n"


def not_a_record(path: Path, number: int | None = None) -> UserError:
    """The error for a damaged line; `number` is its number if known."""
    which = "a line near the end" if number is None else f"line {number}"
    return UserError(f"{which} of {path} is not a record: delete that line")


def tidy(value: Any) -> Any:
    """A value that JSON can hold: floats with six digits (three decimals if large), null if not finite."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return round(value, 3) if abs(value) >= 1000 else float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: tidy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [tidy(item) for item in value]
    return value


def parsed(line: bytes, path: Path, number: int | None = None) -> dict[str, Any]:
    """The record in a line of `path`. Raises UserError if it is not a record."""
    record = record_in(line)
    if record is None:
        raise not_a_record(path, number)
    return record


def record_in(line: bytes) -> dict[str, Any] | None:
    """The record in a line; None if it is not a record. No number of one is beyond what floats hold."""
    try:
        record = msgspec.json.decode(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or any(isinstance(n, int) and abs(n) > MAX_INT for n in record.values()):
        return None
    return record


def _backwards(path: Path) -> Iterator[tuple[int, bytes]]:
    """(start, line) of each whole line, the last one first. Raises UserError if the file cannot be read."""
    with _reading(path), open_plain(path) as file:
        start = end = file.seek(0, os.SEEK_END)
        read, torn = b"", True  # `read` begins at `start`, and is part of a line that ends at `end`
        while start > 0:
            if end - start > MAX_LINE_BYTES:
                raise not_a_record(path)
            size = min(max(CHUNK_BYTES, len(read)), start)
            start -= size
            file.seek(start)
            read = file.read(size) + read
            if torn:
                read = read[: read.rfind(b"\n") + 1]
                torn = not read
            while (cut := read.rfind(b"\n", 0, -1) + 1) > 0:
                yield start + cut, read[cut:]
                read = read[:cut]
            end = end if torn else start + len(read)
        if read:
            yield 0, read


def _whole_bytes(path: Path) -> int:
    """Bytes up to the end of the last whole line."""
    return next((start + len(line) for start, line in _backwards(path)), 0)


def _replaced(path: Path, lines: Iterable[bytes]) -> int:
    """Replace the file at `path` by `lines`, synced to disk; the descriptor of the new file. Raises OSError."""
    temporary = _temporary(path)
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, APPENDING, 0o644)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.writelines(lines)
        os.fsync(descriptor)  # before the name: a power cut must not leave an empty file
        temporary.replace(path)
    except BaseException:
        os.close(descriptor)
        temporary.unlink(missing_ok=True)
        raise
    return descriptor


def _temporary(path: Path) -> Path:
    return path.with_suffix(".tmp")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
