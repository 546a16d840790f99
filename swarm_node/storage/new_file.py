"""A file that a command makes: whole or not at all, and in place of no other."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from swarm_node.errors import UserError
from swarm_node.storage.rundir import os_errors_explained, sync

NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


def check_new_file(path: Path) -> None:
    """Raises UserError if there is a file at `path`, or none can be written there."""
    with os_errors_explained(path):
        if os.path.lexists(path):
            raise _exists(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = _temporary(path)
        temporary.touch()
        temporary.unlink()


def write_new_file(path: Path, lines: Iterable[bytes]) -> None:
    """Write a file in a folder that exists; readers see all of it or nothing, unless the file system has no hard links.
    Raises UserError, also if there is a file at `path`."""
    temporary = _temporary(path)
    with os_errors_explained(path):
        try:
            with temporary.open("wb") as file:
                file.writelines(lines)
            sync(temporary)
            _name(temporary, path)
        except FileExistsError as error:
            raise _exists(path) from error
        except OSError as error:
            error.filename = None  # the message names the file itself
            raise
        finally:
            temporary.unlink(missing_ok=True)


def _name(temporary: Path, path: Path) -> None:
    """Give the file at `temporary` its name as well. Raises OSError; FileExistsError if a file has that name."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in NO_HARD_LINKS:
            raise
        _copy(temporary, path)


def _copy(source: Path, path: Path) -> None:
    """Copy a file to a new one: all of it, or an error leaves none."""
    with source.open("rb") as whole, path.open("xb") as copy:
        try:
            shutil.copyfileobj(whole, copy)
            copy.flush()
            os.fsync(copy.fileno())
        except BaseException:
            path.unlink()
            raise


def _exists(path: Path) -> UserError:
    return UserError(f"{path} exists already; choose another --out")


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")
