"""Names and order of checkpoints in a run directory, known without torch: round-00000012, round-00000012-1."""

from __future__ import annotations

import re
from pathlib import Path

NAME = re.compile(r"round-(\d{8,})(?:-(\d+))?")
MAX_STATE_BYTES = 64 << 20  # counters and random states take kilobytes; more is not ours


def order(path: Path) -> tuple[int, int]:
    """(round, repetition) from a checkpoint's name."""
    match = NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def newest_round(directory: Path) -> int | None:
    """The round of the newest checkpoint in a directory, whether it is whole or not; None if there is none."""
    return max((order(path)[0] for path in directory.glob("round-*") if NAME.fullmatch(path.name)), default=None)
