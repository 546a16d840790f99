"""Others' groups are admitted in the proportions of own ones: their reference answers, and how long right answers are.

    share(a)   (own groups with reference answer a + 1) / (own groups + 1), among the latest, or among the latest that
               teach something, whichever is larger; or 2 v - 1 if that is more, v: its share in all that came lately
    room(a)    share(a) n + SLACK sqrt(share(a) n) + 1            n: groups admitted lately, with the new one
    share(x)   likewise, of groups whose right answers are longer than the reference answer by x or more, among the
               latest own groups that teach something

A group is admitted if, with it, as many groups of its answer, and of each length up to its own, were admitted lately as
there is room for. A right answer can do harm by the question it answers, or by its length, however plainly it is
written: liars answer only questions with one answer, which then spreads, or write each answer as long as the gate
lets them, and what honest nodes take up opens the next step. Room does not depend on the sender, so new keys do not
help, and several answers, or lengths, have only the room of each of them.

If own answers are shorter than those of most groups that come, these are heard all the same: of n groups of which a
part l < 1/2 lies and a part t of the others has the length, v <= l + (1 - l) t, so 2 v - 1 <= t.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import lru_cache
from statistics import fmean
from typing import Any

import numpy as np

from swarm_node.grpo.advantage import is_judged
from swarm_node.tasks.taskset import has_signal
from swarm_node.types import Group, Task

LATEST = 1024  # tasks, and groups that came or were admitted, that are remembered: some forty rounds
TEACHING = 512  # own groups with different rewards that are remembered
LEAST = 32  # own tasks, or groups, below which there is nothing to compare with
SLACK = 2.0
"""Standard deviations by which a number of admitted groups may exceed own proportions: chance then keeps out few groups
of honest peers, and an answer of 10 % of all tasks may be 12 % of what is admitted."""
FINENESS = 20.0  # lengths are told apart to one token below 20 tokens, and to 5 % above
BINS = 256
ROUNDING = 1e-9  # rewards that differ by less are equal


class Balance:
    """What came and what was admitted lately, beside own tasks and answers."""

    def __init__(self, tokens: Callable[[str], int]) -> None:
        """`tokens` gives the number of tokens of an answer."""
        self._tokens = lru_cache(maxsize=1024)(tokens)
        self._asked, self._taught = _Lately(LATEST), _Lately(TEACHING)
        self._came, self._admitted = _Lately(LATEST), _Lately(LATEST)

    def observe(self, groups: Iterable[Group]) -> None:
        """Take in own scored groups."""
        for group in groups:
            self._asked.add(group.task.answer, 0)
            if has_signal(group.rollouts):
                self._taught.add(group.task.answer, self._length(group))

    def admits(self, group: Group) -> bool:
        """Whether there is room for a foreign scored group. It counts as one that came, and as admitted if so."""
        answer, length = group.task.answer, self._length(group)
        self._came.add(answer, length)
        if not (self._has_room_for_answer(answer) and self._has_room_for_length(length)):
            return False
        self._admitted.add(answer, length)
        return True

    def _has_room_for_answer(self, answer: str | None) -> bool:
        known = [lately for lately in (self._asked, self._taught) if len(lately) >= LEAST]
        own = [(lately.answers[answer] + 1) / (len(lately) + 1) for lately in known]
        if answer is None or not own:
            return True
        share = max(*own, self._most_have(self._came.answers[answer]))
        return bool(self._admitted.answers[answer] + 1 <= self._room(share))

    def _has_room_for_length(self, length: int) -> bool:
        if len(self._taught) < LEAST:
            return True
        own, came, admitted = (lately.tails[: length + 1] for lately in (self._taught, self._came, self._admitted))
        share = np.maximum(own / len(self._taught), self._most_have(came))
        return bool((admitted + 1 <= self._room(share)).all())

    def _most_have(self, came: Any) -> Any:
        """2 v - 1 for numbers of groups that came; below 0 while few have."""
        return 2 * came / max(len(self._came), 2 * LEAST) - 1

    def _room(self, share: Any) -> Any:
        """How many admitted groups there is room for, by their share: a number, or an array of any shape."""
        expected = share * (len(self._admitted) + 1)
        return expected + SLACK * np.sqrt(expected) + 1

    def _length(self, group: Group) -> int:
        """The bin of the mean number of tokens by which the best answers are longer than the reference answer."""
        judged = [r for r in group.rollouts if is_judged(r)]
        best = max((r.reward for r in judged), default=0.0) - ROUNDING
        mean = fmean(len(r.token_ids) for r in judged if r.reward >= best) if judged else 0.0
        return min(BINS - 1, int(FINENESS * math.log1p(max(0.0, mean - self._needed(group.task)))))

    def _needed(self, task: Task) -> int:
        return self._tokens(task.answer) if task.answer else 0


class _Lately:
    """The latest groups: how many have each reference answer, and how many have each length or more."""

    def __init__(self, most: int) -> None:
        self._groups: deque[tuple[str | None, int]] = deque()
        self._most = most
        self.answers: Counter[str | None] = Counter()
        self.tails = np.zeros(BINS)

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, answer: str | None, length: int) -> None:
        self._groups.append((answer, length))
        self._count(answer, length, 1)
        if len(self._groups) > self._most:
            answer, length = self._groups.popleft()
            self._count(answer, length, -1)

    def _count(self, answer: str | None, length: int, sign: int) -> None:
        self.answers[answer] += sign
        if not self.answers[answer]:
            del self.answers[answer]
        self.tails[: length + 1] += sign
