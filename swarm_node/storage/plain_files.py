"""Files of a run directory, which may be somebody else's, as readers open them: regular ones, and of bounded size where
they are read whole. A pipe or a device among them would keep a reader waiting for ever, or fill its memory."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


def open_plain(path: Path) -> BufferedReader:
    """The file at `path`, open for reading. Raises OSError, also if it is no regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe without a writer would wait
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no file, but a pipe, a device or the like", str(path))
    return os.fdopen(descriptor, "rb")


def read_plain(path: Path, most: int) -> bytes:
    """The content of the file at `path`. Raises OSError, also if it is no regular file or larger than `most` bytes."""
    with open_plain(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return content
