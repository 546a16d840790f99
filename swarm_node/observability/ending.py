"""How a run ended that no process of this machine holds, as its files tell.

events.jsonl: start, …, summary -> ended
events.jsonl: start, …          -> killed; unclear as long as its files are fresh and its process may be elsewhere

The order of events decides, never their times: a clock may be set back. The process of a run on another machine may
hold a lock that is not seen here, so a run from there that wrote lately is not called dead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from swarm_node.errors import UserError
from swarm_node.observability.jsonl import last_lines
from swarm_node.storage.lock_file import was_held_here
from swarm_node.storage.plain_files import read_plain
from swarm_node.storage.rundir import MAX_STATUS_BYTES, RunDir

End = Literal["ended", "killed", "unclear"]
WORDS: dict[End, str] = {
    "ended": "ended {ago}",
    "killed": "killed or crashed {ago}, or the machine went down",
    "unclear": "no process of this machine holds it; last heard {ago}",
}
"""What is said of each end; `ago` is when the run was last heard of."""
BEGINS = {"start", "resume"}  # kinds of events of a run that trains, or is about to
ENDS = {"summary", "stop", "error"}  # kinds of events with which a run ends, or begins to
TAIL_BYTES = 64 << 10  # bytes at the end of a file that are read
LACKED = re.compile(
    r"([0-9]{1,6}(?:\.[0-9]{1,3})?) GiB, more than --max-memory "
)  # in an error for memory, as `MemoryLimit` words it
LATELY = 10  # rounds whose longest tells how long the run may be silent
QUIET_ROUNDS = 4  # a run may be silent for so many rounds,
QUIET_S = 60.0  # and for so many seconds


class LastWords(msgspec.Struct, frozen=True):
    """What a run wrote last."""

    said: bool  # whether it said that it ends; also where its files do not tell
    heard: float  # Unix time; 0 = unknown
    round_s: float  # the longest of its last rounds
    here: bool = False  # whether its last process was one of this machine, whose locks are seen
    lacked_gib: float = 0.0  # memory that it would have needed, if it ended since --max-memory was less

    def end(self, now: float) -> End:
        """How the run ended, if no process of this machine holds it. `now`: Unix time."""
        if self.said:
            return "ended"
        is_gone = self.here or now - self.heard > max(QUIET_S, QUIET_ROUNDS * self.round_s)
        return "killed" if is_gone else "unclear"


class _Line(msgspec.Struct):
    """An event, a round, or a status: the part that tells of the end."""

    kind: str = ""
    text: str = ""
    time: float | None = None
    step_time: float | None = None


def last_words(run: RunDir) -> LastWords:
    """What the run wrote last, as far as its files can be read."""
    events, rounds = _tail(run.events), _tail(run.metrics)[-LATELY:]
    ends = [event.kind in ENDS for event in events if event.kind in ENDS | BEGINS]
    said = ends[-1] if ends else not (events and rounds)  # many other events may follow a start
    newest = [*_status(run), *rounds[-1:], *events[-1:]]
    return LastWords(
        said,
        heard=max((line.time or 0.0 for line in newest), default=0.0),
        round_s=max((line.step_time or 0.0 for line in rounds), default=0.0),
        here=was_held_here(run.path / "lock"),
        lacked_gib=_lacked_gib(events),
    )


def _lacked_gib(events: Sequence[_Line]) -> float:
    """The memory that the last error names, if it is of the last start and one for memory."""
    last = next((event for event in reversed(events) if event.kind in BEGINS | {"error"}), None)
    found = LACKED.search(last.text) if last is not None and last.kind == "error" else None
    return float(found[1]) if found is not None else 0.0


def _tail(path: Path) -> list[_Line]:
    try:
        return _decoded(last_lines(path, TAIL_BYTES))
    except UserError:  # it is not there, or cannot be read
        return []


def _status(run: RunDir) -> list[_Line]:
    try:
        return _decoded([read_plain(run.status, MAX_STATUS_BYTES)])
    except OSError:
        return []


def _decoded(lines: Iterable[bytes]) -> list[_Line]:
    """The lines that can be read."""
    found = []
    for line in lines:
        try:
            found.append(msgspec.json.decode(line, type=_Line))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
    return found
