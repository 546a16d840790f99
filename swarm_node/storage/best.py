"""The best checkpoint of a run by held-out figures: best.json names it, and no newer checkpoint displaces it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from swarm_node.storage.names import NAME
from swarm_node.storage.plain_files import read_plain
from swarm_node.storage.rundir import sync

BEST = "best.json"
MAX_BYTES = 1 << 20  # a longer best.json is not read


class Best(msgspec.Struct, frozen=True):
    """The held-out figures of one checkpoint."""

    round: int
    pass_1: float | None  # None = no checker judges the answers
    pass_k: float | None
    conditions: dict[str, Any] = {}  # tasks and sampling; figures under others are not comparable
    checkpoint: str = ""  # name of its directory below checkpoints/; the writer of the checkpoint sets it
    reward: float | None = None  # mean reward; None = written by an earlier version
    figure: Literal["pass_1", "reward"] = "pass_1"  # the one that chose it

    @property
    def value(self) -> float:
        """The figure that chose it; -inf without one, which `read_best` never gives."""
        value = self.pass_1 if self.figure == "pass_1" else self.reward
        return -math.inf if value is None else value


def read_best(run: Path, conditions: Mapping[str, Any] | None = None) -> Best | None:
    """The best checkpoint of the run in `run`. None if best.json is not there, is not readable or names a checkpoint
    that is not there, and if its figures were measured under other `conditions` (None = any will do)."""
    try:
        best = msgspec.json.decode(read_plain(run / BEST, MAX_BYTES), type=Best)
    except (OSError, ValueError, RecursionError):
        return None
    if math.isinf(best.value):
        return None
    if conditions is not None:
        asked = dict(msgspec.to_builtins(conditions))
        if "prompt" not in best.conditions:  # an earlier version wrote it
            asked.pop("prompt", None)
        if best.conditions != asked:
            return None
    is_name = NAME.fullmatch(best.checkpoint) is not None
    return best if is_name and (run / "checkpoints" / best.checkpoint).is_dir() else None


def write_best(run: Path, best: Best, checkpoint: str) -> None:
    """Replace best.json, all of it or nothing, also in a power cut. Raises OSError."""
    temporary = run / "best.tmp"
    try:
        temporary.write_bytes(msgspec.json.encode(msgspec.structs.replace(best, checkpoint=checkpoint)) + b"\n")
        sync(temporary)
        temporary.replace(run / BEST)
    finally:
        temporary.unlink(missing_ok=True)
