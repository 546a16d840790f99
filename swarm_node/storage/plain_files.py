"""Files of a run directory, which may be somebody else's, as readers open them: regular ones, and of bounded size where
they are read whole. A pipe or a device among them would keep a reader waiting for ever, or fill its memory."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from itertools import chain
from pathlib import Path

from swarm_node.errors import UserError
from swarm_node.say import in_short

LINKED = {"checkpoints", "stages"}  # directories of a run that may be links, as to another disk


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


@contextmanager
def as_a_node_writes(run: Path) -> Iterator[None]:
    """Within it, values of a run's files of other types or sizes than a node writes raise UserError: the run may be
    somebody else's, or of another version."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        files, what = f"swarm.json, metrics.jsonl or a checkpoint of {run}", f"{type(error).__name__}: {error}"
        raise UserError(f"{files} is not as a node of this version writes it ({in_short(what)})") from error


def check_plain(own: Path, key: Path) -> None:
    """Raise UserError unless `own`, which is of a run, is a file or a directory, and all below it: what the run writes
    would go elsewhere. One of `LINKED` may itself be a link to a directory, and `key`, which is only read, to a file.
    Raises OSError where files lie that cannot be listed."""
    if own == key and own.is_file():
        return
    top = own.resolve() if own.name in LINKED and own.is_symlink() and own.is_dir() else own
    below = (Path(folder, name) for folder, *names in os.walk(top, onerror=_unless_shut) for name in chain(*names))
    for path in chain([top], below):
        with suppress(FileNotFoundError):  # a node that runs there removes some
            if stat.S_IFMT(path.lstat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
                raise UserError(f"{path} is no file, but a link, a pipe, a device or the like: remove it")


def _unless_shut(error: OSError) -> None:
    """Raise `error` of a directory that cannot be listed, but entered: writing would follow links in it."""
    if isinstance(error, PermissionError) and os.access(error.filename, os.X_OK):
        raise error
