"""The checkpoints of stages in a run directory: RUN/stages/<k>/round-…, `round` being updates of the stage.

Each says of what it is: `run` (`protocol.lineage`), `architecture`, `spans` (layers of all stages), `span` (which of
them), `round` (of the run) and `time`. Counts of updates order the files of one run only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from protocol.lineage import Lineage, read_lineage, shared
from swarm_node.storage.checkpoints import NAME


@dataclass(frozen=True)
class StageFile:
    """A checkpoint of a stage, unread but for what it says it is."""

    path: Path
    stage: int
    updates: int
    number: int
    """Of those of the same update."""
    state: dict[str, Any]
    """Empty if it is torn."""

    @cached_property
    def run(self) -> Lineage:
        """Empty = it does not say."""
        return read_lineage(self.state.get("run"))

    def counts(self, run: Lineage) -> bool:
        """Whether it is of that run, or of what that has gone on from."""
        return bool(self.run) and self.updates <= shared(self.run, run)

    @property
    def architecture(self) -> str:
        return str(self.state.get("architecture", ""))

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        try:
            return tuple((int(first), int(end)) for first, end in self.state.get("spans", ()))
        except (TypeError, ValueError):  # torn
            return ()

    @property
    def round(self) -> int:
        """Of the run."""
        round = self.state.get("round", 0)
        return round if isinstance(round, int) else 0

    @property
    def made(self) -> float:
        """When, in seconds since the Unix epoch."""
        time = self.state.get("time", 0.0)
        return float(time) if isinstance(time, (int, float)) else 0.0


def stage_files(folder: Path) -> list[StageFile]:
    """All of them, that of most updates first."""
    found = []
    for path in folder.glob("*/round-*"):
        match = NAME.fullmatch(path.name)
        if match and path.parent.name.isdecimal():
            found.append(StageFile(path, int(path.parent.name), int(match[1]), int(match[2] or 0), _state(path)))
    return sorted(found, key=lambda file: (-file.updates, -file.number, file.stage))


def newest(files: Sequence[StageFile]) -> StageFile | None:
    """That which was made last."""
    return max(files, key=lambda file: (file.made, file.updates), default=None)


def _state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads((path / "state.json").read_bytes())["state"]
    except (OSError, ValueError, KeyError, TypeError):  # of another version, torn, or just pruned
        return {}
    return state if isinstance(state, dict) else {}
