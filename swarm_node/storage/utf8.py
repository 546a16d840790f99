"""Names of files that are not UTF-8, as old disks and zip files have them.

Python reads them, but no configuration, log or JSON document can hold one. They are refused where they come in.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from swarm_node.errors import UserError


def check_utf8(value: object) -> None:
    """Raise UserError if a text or a path in `value`, at any depth of tables and lists, is not UTF-8."""
    if isinstance(value, str | Path):
        _check(str(value))
    elif isinstance(value, Mapping):
        for each in value.values():
            check_utf8(each)
    elif isinstance(value, list | tuple | set):
        for each in value:
            check_utf8(each)


def is_utf8(name: str) -> bool:
    """Whether every file can hold the name."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check(name: str) -> None:
    if not is_utf8(name):
        shown = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        raise UserError(f"the name {shown} is not UTF-8: rename the file or directory")
