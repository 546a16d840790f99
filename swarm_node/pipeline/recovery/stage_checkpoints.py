"""Checkpoints of stages in a run directory: RUN/stages/<k>/round-…, where the number counts updates of the stage.

Each says what it belongs to: `run` (`swarm_protocol.lineage`), `architecture`, `spans` (layers of all stages), `span`
(its own), `round` (of the run) and `time`. Counts of updates order only the files of one run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from swarm_node.errors import SwarmNodeError
from swarm_node.pipeline.compute.partition import Span
from swarm_node.pipeline.membership.actions import Spans
from swarm_node.storage.checkpoints import Checkpoint, CheckpointStore, read_checkpoint, read_state
from swarm_node.storage.names import NAME
from swarm_protocol.lineage import NO_RUN, Lineage, read_lineage, shared


class StageFile(msgspec.Struct, frozen=True, rename={"made": "time"}):
    """A checkpoint of a stage; only its description has been read."""

    path: Path
    stage: int
    updates: int
    number: int  # counts checkpoints of the same update
    torn: bool  # its description cannot be read, and the fields below are empty
    run: Lineage = NO_RUN  # the run that it belongs to; empty = it does not say
    architecture: str = ""
    spans: Spans = ()  # layers of all stages
    round: int = 0  # rounds of the run that were done
    made: float = 0.0  # when it was made, in seconds since the Unix epoch

    def counts(self, run: Lineage) -> bool:
        """Whether it belongs to `run`, or to a run that `run` continues."""
        return bool(self.run) and self.updates <= shared(self.run, run)


def stage_files(folder: Path) -> list[StageFile]:
    """All checkpoints of stages in a folder, those of most updates first."""
    found = []
    for path in folder.glob("*/round-*"):
        match = NAME.fullmatch(path.name)
        if match and path.parent.name.isdecimal():
            found.append(_read(path, int(path.parent.name), int(match[1]), int(match[2] or 0)))
    return sorted(found, key=lambda file: (-file.updates, -file.number, file.stage))


def newest(files: Sequence[StageFile]) -> StageFile | None:
    """The checkpoint that was made last."""
    return max(files, key=lambda file: (file.made, file.updates), default=None)


def _read(path: Path, stage: int, updates: int, number: int) -> StageFile:
    place: dict[str, Any] = {"path": path, "stage": stage, "updates": updates, "number": number}
    try:
        state = read_state(path / "state.json")
        return msgspec.convert({**state, **place, "torn": False, "run": read_lineage(state.get("run"))}, StageFile)
    except (SwarmNodeError, ValueError, KeyError, TypeError):  # of another version, torn, or just pruned
        return StageFile(**place, torn=True)


@dataclass(eq=False)
class StageCheckpoints:
    """The checkpoints of stages in this node's run directory."""

    folder: Path
    architecture: str  # of the policy, as files name it
    keep: int  # checkpoints of each stage that are kept
    say: Callable[[str], None]
    run: Lineage = NO_RUN  # the run that the crew is on; a file of another run counts only up to where the two forked
    round: int = 0  # rounds of the run that the stages have behind them; written into each checkpoint
    stores: dict[int, CheckpointStore] = field(default_factory=dict)
    left_out: int = 0  # files that do not count, as was said

    def files(self) -> list[StageFile]:
        """The checkpoints that count for this run, those of most updates first."""
        return [file for file in stage_files(self.folder) if file.counts(self.run)]

    def go_to(self, run: Lineage) -> None:
        """The crew is on another run from now on; files that do not count there are said."""
        self.run = run
        left_out = len(stage_files(self.folder)) - len(self.files())
        if left_out > self.left_out:
            self.say(f"checkpoints in {self.folder} that do not count, being of another run or branch: {left_out}")
        self.left_out = left_out

    def read(self, file: StageFile, span: Span) -> Checkpoint:
        """Raises CheckpointError if the file is torn, or of another run, policy or stage."""

        def mismatch(state: dict[str, object]) -> str | None:
            ours = shared(read_lineage(state.get("run")), self.run) >= 0
            if not ours or state.get("architecture") != self.architecture or "round" not in state:
                return "it is of another run"
            return None if state.get("span") == str(span) else f"it is {state.get('span')}"

        return read_checkpoint(file.path, mismatch)

    def store(self, stage: int) -> CheckpointStore:
        if stage not in self.stores:
            # An extra checkpoint of one stage must not cost the last update that all stages of the crew have.
            self.stores[stage] = CheckpointStore(self.folder / str(stage), self.keep + 1, self.say)
        return self.stores[stage]

    def save(
        self, stage: int, spans: Spans, updates: int, omega: float, tensors: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        """Write a checkpoint in the background; the tensors are copied before this returns."""
        state = {
            "run": self.run,
            "time": time.time(),
            "architecture": self.architecture,
            "span": str(Span.of(stage, spans)),
            "spans": spans,
            "omega": omega,
            "round": self.round,
        }
        self.store(stage).save(updates, tensors, state)

    def wait(self) -> None:
        """Wait until no checkpoint is being written."""
        for store in list(self.stores.values()):
            store.wait()

    def close(self) -> None:
        """Finish writing. Raises UserError if the last checkpoint of a stage could not be written."""
        with ExitStack() as stack:  # closes them all, also when one raises
            for store in self.stores.values():
                stack.callback(store.close)
