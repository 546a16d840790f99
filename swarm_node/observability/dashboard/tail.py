"""New whole lines of a JSONL file that another process writes."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from swarm_node.observability.jsonl import record_in
from swarm_node.storage.plain_files import open_plain

CHUNK = 4 << 20  # bytes read at a time; a longer line is no record
MARK = 64  # bytes before the position that must still be the same; otherwise the file is another one


class Tail:
    """Reads a file from where it stopped before. A torn last line waits for its rest. A file that is cut, replaced or
    renamed is read anew; a file that does not exist yet is empty."""

    def __init__(self, path: Path, last: int | None = None) -> None:
        """`last`: begin so many bytes before the end of the file, at the next line."""
        self.path = path
        self._last = last
        self._file: tuple[int, int] | None = None
        self._offset: int
        self._mark: bytes
        self._restart()

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """(whether everything read before is void, new records): at most one chunk; more waits while `behind`. Raises
        OSError if the file cannot be read."""
        try:
            file = open_plain(self.path)
        except FileNotFoundError:
            void, self._file = self._file is not None, None
            self._restart()
            return void, []
        with file:
            descriptor = file.fileno()
            stat = os.fstat(descriptor)
            same = self._file == (stat.st_dev, stat.st_ino) and stat.st_size >= self._offset
            same = same and os.pread(descriptor, len(self._mark), self._offset - len(self._mark)) == self._mark
            void = not same and self._file is not None
            if not same:
                self._file = stat.st_dev, stat.st_ino
                self._restart()
                if self._last is not None and stat.st_size > self._last:
                    self._offset = stat.st_size - self._last - 1
                    self._skipping = True
                    self.from_start = False
            if self._skipping and (data_at := _data_after(descriptor, self._offset, stat.st_size)) > self._offset:
                self._offset, self._mark = data_at, b""
            data = os.pread(descriptor, CHUNK, self._offset)
        return void, self._records(data)

    def _restart(self) -> None:
        self._offset = 0
        self._mark = b""
        self._skipping = False
        self._lines = 0
        self.behind = False
        self.damaged: list[int] = []  # numbers of lines that are no records, counted from where reading began
        self.from_start = True

    def _records(self, data: bytes) -> list[dict[str, Any]]:
        full = len(data) == CHUNK
        whole = data[: data.rfind(b"\n") + 1]
        lines = whole.splitlines(keepends=True)
        if self._skipping and lines:
            self._skipping = False
            del lines[0]
        if full and not whole:  # within a line that is too long
            if not self._skipping:
                self._lines += 1
                self.damaged.append(self._lines)
            whole, self._skipping = data, True
        self._offset += len(whole)
        self._mark = (self._mark + whole)[-MARK:]
        self.behind = full
        records = []
        for line in lines:
            self._lines += 1
            if (record := record_in(line)) is not None:
                records.append(record)
            else:
                self.damaged.append(self._lines)
        return records


def _data_after(descriptor: int, offset: int, size: int) -> int:
    """Where the next bytes of a file are that are not a hole: it may have 1 TiB of them, and take no room."""
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA)
    except OSError as error:  # only a hole is left, or the file system does not tell
        return size if error.errno == errno.ENXIO else offset
