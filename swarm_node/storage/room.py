"""Room on a disk. Loads no torch."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

from swarm_node.errors import TemporaryError
from swarm_node.storage.rundir import existing_part


def free_bytes(folder: Path) -> float:
    """Free space on the disk of `folder`, in bytes; NaN if the system does not say."""
    try:
        return float(shutil.disk_usage(folder).free)
    except OSError:
        return math.nan


def check_room(folder: Path, size: int, there: int = 0, wanted: int = 2) -> None:
    """Raise UserError if `folder`, which has `there` checkpoints, has no room for one more, or for `wanted` in all."""
    count = max(1, wanted - there)
    free = shutil.disk_usage(existing_part(folder)).free
    if count * size > free:
        each = f"{size / 2**20:,.1f} MiB"
        needed = f"{'three' if count > 2 else 'two'} checkpoints" if count > 1 else "one more checkpoint"
        raise TemporaryError(
            f"no room at {folder} for {needed} of {each}: {free / 2**20:,.1f} MiB are free; free some space, or choose "
            "another directory (--run-dir)"
        )
