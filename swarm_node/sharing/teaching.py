"""Who taught this node which kinds of task, and how its own success on them changed.

    own groups -> first WINDOW, latest WINDOW                    groups behind updates -> by kind: own, of others

Bounded: a swarm's tasks have a bounded number of kinds. A checkpoint keeps it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from swarm_node.observability.worth import WINDOW, Change
from swarm_node.tasks.taskset import has_signal
from swarm_node.types import Group
from swarm_protocol.messages import TaskName

LATEST = 16
"""Latest own groups of a kind: while none of them, and none of fewer, has a right answer, the kind counts as unsolved
here. They lie among the latest `WINDOW` of all kinds."""
MAX_COUNTED = 1024  # questions that are remembered so that none counts twice in a row


class Counted(msgspec.Struct, array_like=True):
    """One own group."""

    kind: str
    answers: int
    right: int


class Taught(msgspec.Struct, array_like=True):
    """Groups of one kind, with something to learn, that this node trained on."""

    own: int = 0
    others: int = 0


class TeachingState(msgspec.Struct):
    """All counts."""

    first: list[Counted] = []
    latest: list[Counted] = []
    groups: int = 0  # own groups so far
    taught: dict[str, Taught] = {}
    unsolved: int = 0


class Teaching:
    """Counts of one node. Figures may be read from any thread."""

    def __init__(self) -> None:
        self._state = TeachingState()
        self._counted: OrderedDict[TaskName, None] = OrderedDict()

    def observe(self, groups: Sequence[Group]) -> None:
        """Count own scored `groups` for success."""
        state = self._state
        new = [Counted(g.task.label, len(g.rollouts), sum(r.correct for r in g.rollouts)) for g in groups]
        state.first = (state.first + new)[:WINDOW]
        state.latest = (state.latest + new)[-WINDOW:]
        state.groups += len(new)

    def learned_from(self, groups: Sequence[Group]) -> None:
        """Count `groups`, own ones and others', of which an update was made."""
        for group in groups:
            kind = group.task.label
            if group.peer is None:
                self._taught(kind).own += has_signal(group.rollouts)
                continue
            self._taught(kind).others += 1
            if any(r.correct for r in group.rollouts) and self._is_unsolved(kind) and self._is_new(group.task.name):
                self._state.unsolved += 1

    @property
    def learned(self) -> tuple[int, int]:
        """(own groups with something to learn, groups of others) that this node trained on."""
        taught = list(self._state.taught.values())
        return sum(kind.own for kind in taught), sum(kind.others for kind in taught)

    @property
    def unsolved(self) -> int:
        """Questions of which others' right answers were trained on while own answers to their kind were all wrong."""
        return self._state.unsolved

    def latest(self) -> dict[str, tuple[int, int]]:
        """Kind -> (answers, right answers) among the latest own groups, the most frequent kinds first."""
        sums = _sums(self._state.latest)
        return dict(sorted(sums.items(), key=lambda item: (-item[1][0], item[0])))

    def changes(self) -> tuple[Change | None, Change | None]:
        """(change of success on kinds taught by others, on kinds taught by itself); None for no such kind, or while
        there are fewer than twice `WINDOW` own groups."""
        state = self._state
        if state.groups < 2 * WINDOW:
            return None, None
        first, now, taught = _sums(state.first), _sums(state.latest), dict(state.taught)
        known = [kind for kind in taught if kind in first and kind in now]
        by_others = [kind for kind in known if taught[kind].others > taught[kind].own]
        by_itself = [kind for kind in known if kind not in by_others]
        return _change(by_others, first, now), _change(by_itself, first, now)

    def state(self) -> Any:
        """What a checkpoint keeps, as JSON carries it."""
        return msgspec.to_builtins(self._state)

    def load(self, state: Any) -> None:
        """Go on from the state in a checkpoint. Raises msgspec.ValidationError if it is of another version."""
        self._state = msgspec.convert(state, TeachingState)

    def _taught(self, kind: str) -> Taught:
        return self._state.taught.setdefault(kind, Taught())

    def _is_unsolved(self, kind: str) -> bool:
        own = [one for one in self._state.latest if one.kind == kind][-LATEST:]
        return bool(own) and not any(one.right for one in own)

    def _is_new(self, question: TaskName) -> bool:
        if question in self._counted:
            return False
        self._counted[question] = None
        if len(self._counted) > MAX_COUNTED:
            self._counted.popitem(last=False)
        return True


def _sums(groups: Sequence[Counted]) -> dict[str, tuple[int, int]]:
    sums: dict[str, tuple[int, int]] = {}
    for one in groups:
        answers, right = sums.get(one.kind, (0, 0))
        sums[one.kind] = answers + one.answers, right + one.right
    return sums


def _change(
    kinds: Sequence[str], first: Mapping[str, tuple[int, int]], now: Mapping[str, tuple[int, int]]
) -> Change | None:
    """The mean over `kinds` of the share of right answers, each kind weighing the same."""
    if not kinds:
        return None
    then, later = (sum(sums[kind][1] / max(1, sums[kind][0]) for kind in kinds) / len(kinds) for sums in (first, now))
    return Change(sorted(kinds), then, later)
