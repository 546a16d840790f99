"""A file that a command makes: whole or not at all, and in place of no other."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from swarm_node.errors import UserError
from swarm_node.storage.rundir import os_errors_explained, sync


def check_new_file(path: Path) -> None:
    """Raises UserError if there is a file at `path`, or none can be written there."""
    with os_errors_explained(path):
        if path.exists():
            raise UserError(f"{path} exists already; choose another --out")
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = _temporary(path)
        temporary.touch()
        temporary.unlink()


def write_new_file(path: Path, lines: Iterable[bytes]) -> None:
    """Write a file, which `check_new_file` has looked at; readers see all of it or nothing. Raises UserError."""
    temporary = _temporary(path)
    with os_errors_explained(path):
        try:
            with temporary.open("wb") as file:
                file.writelines(lines)
            sync(temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")
