"""Others' groups are admitted in the proportions of own ones: their reference answers, and how long right answers are.

    share(k, a)   part of reference answer a among the latest own tasks of kind k, or among those of own groups that
                  teach something, whichever is larger
    share(k, x)   part of own groups of kind k whose right answers are longer than the reference answer by x or more,
                  among the latest that teach something; PRIOR more are added in the proportions of all kinds
    E(k)          share(k, .) n(k)                      n(k): groups of kind k admitted lately, with the new one
    room          E + SLACK sqrt(E) + PLACES            E: E(k) in kind k; the sum of E(k) in all kinds together;
                                                        for an answer, as if one own task more had it

A group is admitted if, with it, as many groups of its answer, and of each length up to its own, were admitted lately as
there is room for, in its kind and in all kinds. A right answer can do harm by the question it answers, or by its
length, however plainly it is written: liars answer only questions with one answer, which then spreads, or write each
answer as long as the gate lets them, and what honest nodes take up opens the next step.

Kinds with fewer than LEAST own tasks count as one kind, the rest. While they have fewer together, they count as LEAST
where answers and lengths are compared, and, since senders choose which kinds they send, the rest has room itself:

    E             max(part of own tasks that are of the rest, RARE) n       n: all groups admitted lately, with the new

For every SPARE own tasks one group without room, for its length or in the rest, is admitted and not counted: longer
answers are heard a little where own ones are short, and other kinds by a specialist.

Nothing depends on who sends, or on what most groups have: keys cost nothing, and one of them can send more than all
others.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from functools import lru_cache
from statistics import fmean
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from swarm_node.grpo.advantage import is_judged
from swarm_node.tasks.taskset import has_signal
from swarm_node.types import Group

LATEST = 1024  # own tasks, and admitted groups, that are remembered: of the latter some forty rounds
TEACHING = 512  # own groups with different rewards that are remembered
LEAST = 32  # own tasks, or groups, below which there is nothing to compare with
PRIOR = 8  # groups of all kinds that are added to a kind's lengths, because groups that teach are few
SLACK = 2.0
"""Standard deviations by which a number of admitted groups may exceed own proportions: chance then keeps out few groups
of honest peers, and an answer of 10 % of all tasks may be 12 % of what is admitted."""
PLACES = 1  # groups that are admitted of anything
RARE = 1 / 32  # part of admitted groups that kinds with few own tasks may have: a specialist hears them
SPARE = 64  # own tasks for one group that is longer, or of a rarer kind, than own proportions allow
FINENESS = 20.0  # lengths are told apart to one token below 20 tokens, and to 5 % above
BINS = 256
ROUNDING = 1e-9  # rewards that differ by less are equal
REST = ""  # the kinds with too few own tasks, as one
GROUPS, ANSWER, LENGTHS = 0, 1, 2  # places in the numbers of a kind: groups, with one answer, of each length or more

Numbers = NDArray[np.float64]


class One(msgspec.Struct, array_like=True, frozen=True):
    """What is remembered of a group."""

    label: str
    answer: int | None  # CRC-32 of the reference answer
    length: Annotated[int, msgspec.Meta(ge=-1, lt=BINS)]  # bin; -1 = an own group without a right answer


class BalanceState(msgspec.Struct):
    """Own groups, the oldest first."""

    asked: list[One] = []
    taught: list[One] = []


class Balance:
    """What was admitted lately, beside own tasks and answers."""

    def __init__(self, tokens: Callable[[str], int]) -> None:
        """`tokens` gives the number of tokens of an answer."""
        self._tokens = lru_cache(maxsize=1024)(tokens)
        self._asked, self._taught, self._admitted = _Lately(LATEST), _Lately(TEACHING), _Lately(LATEST)
        self._spare = 0.0  # groups without room that may be admitted now

    def observe(self, groups: Iterable[Group]) -> None:
        """Take in own scored groups."""
        for group in groups:
            teaches = has_signal(group.rollouts)
            one = self._one(group, teaches or _has_right(group))
            self._asked.add(one)
            if teaches:
                self._taught.add(one)
            self._spare = min(1.0, self._spare + 1 / SPARE)

    def admits(self, group: Group) -> bool:
        """Whether there is room for a foreign scored group, which counts as admitted then."""
        one = self._one(group)
        if len(self._asked.groups) < LEAST:
            return True
        has_room = self._has_room(one)
        if one.answer is not None and not has_room[ANSWER]:
            return False
        if has_room[GROUPS] and has_room[LENGTHS : LENGTHS + one.length + 1].all():
            self._admitted.add(one)
        elif self._spare < 1:
            return False
        else:
            self._spare -= 1  # it takes no room of the others
        return True

    def state(self) -> Any:
        """What a checkpoint keeps, as JSON carries it: own groups."""
        return msgspec.to_builtins(BalanceState(list(self._asked.groups), list(self._taught.groups)))

    def load(self, state: Any) -> None:
        """Go on from the state in a checkpoint. Raises msgspec.ValidationError if it is of another version."""
        kept = msgspec.convert(state, BalanceState)
        for lately, ones in ((self._asked, kept.asked), (self._taught, kept.taught)):
            for one in ones[-LATEST:]:
                lately.add(one)

    def _has_room(self, one: One) -> NDArray[np.bool_]:
        """Whether there is room for one more group, by the places of `Numbers`."""
        kind, asked = self._kind(one.label), self._numbers(self._asked, one.answer)
        own = asked[kind][GROUPS]
        admitted, shares = self._numbers(self._admitted, one.answer), self._shares(one.answer, asked)
        in_kind = admitted[kind]
        in_all = sum(admitted.values(), np.zeros_like(in_kind))
        expected = {each: shares[each] * (admitted[each][GROUPS] + (each == kind)) for each in asked}
        expected_in_all = sum(expected.values(), np.zeros_like(in_kind))
        tasks = len(self._asked.groups)
        expected[kind][ANSWER] += (in_kind[GROUPS] + 1) / max(own, LEAST)  # as if one own task more had it
        expected_in_all[ANSWER] += (in_all[GROUPS] + 1) / tasks
        if own < LEAST:
            expected[kind][GROUPS] = max(own / tasks, RARE) * (in_all[GROUPS] + 1)
        return (in_kind + 1 <= _room(expected[kind])) & (in_all + 1 <= _room(expected_in_all))

    def _shares(self, answer: int | None, asked: dict[str, Numbers]) -> dict[str, Numbers]:
        """By kind, the shares of own groups with `answer` and of each length or more; 1 while lengths are unknown."""
        taught = self._numbers(self._taught, answer)
        own = taught if len(self._taught.groups) >= LEAST else asked
        usual = sum(own.values(), np.zeros(LENGTHS + BINS))
        shares = dict[str, Numbers]()
        for kind, tasks in asked.items():
            mine, teaching = own[kind], taught[kind]
            if usual[LENGTHS] >= LEAST:
                share = (mine + PRIOR * usual / usual[LENGTHS]) / (mine[LENGTHS] + PRIOR)
            else:
                share = np.ones_like(usual)
            share[ANSWER] = max(each[ANSWER] / max(each[GROUPS], LEAST) for each in (tasks, teaching))
            shares[kind] = share
        return shares

    def _numbers(self, lately: _Lately, answer: int | None) -> dict[str, Numbers]:
        """By kind, the groups, those with `answer`, and those of each length or more."""
        found: dict[str, Numbers] = defaultdict(lambda: np.zeros(LENGTHS + BINS), {REST: np.zeros(LENGTHS + BINS)})
        for label, counts in lately.labels.items():
            kind = found[self._kind(label)]
            kind += counts.numbers
            kind[ANSWER] += counts.answers[answer]
        return found

    def _kind(self, label: str) -> str:
        own = self._asked.labels.get(label)
        return label if own is not None and own.numbers[GROUPS] >= LEAST else REST

    def _one(self, group: Group, is_right: bool = True) -> One:
        answer = group.task.answer
        hashed = None if answer is None else zlib.crc32(answer.encode())
        return One(group.task.label, hashed, self._length(group) if is_right else -1)

    def _length(self, group: Group) -> int:
        """The bin of the mean number of tokens by which the best answers are longer than the reference answer."""
        judged = [r for r in group.rollouts if is_judged(r)]
        best = max((r.reward for r in judged), default=0.0) - ROUNDING
        mean = fmean(r.num_tokens for r in judged if r.reward >= best) if judged else 0.0
        needed = self._tokens(group.task.answer) if group.task.answer else 0
        return min(BINS - 1, int(FINENESS * math.log1p(max(0.0, mean - needed))))


class _Counts:
    """Groups of one label: their numbers, but for those with one answer, and how many have each reference answer."""

    def __init__(self) -> None:
        self.numbers: Numbers = np.zeros(LENGTHS + BINS)
        self.answers: Counter[int | None] = Counter()


class _Lately:
    """The latest groups, and their numbers by label."""

    def __init__(self, most: int) -> None:
        self.groups: deque[One] = deque()
        self.labels: dict[str, _Counts] = {}
        self._most = most

    def add(self, one: One) -> None:
        self.groups.append(one)
        self._count(one, 1)
        if len(self.groups) > self._most:
            self._count(self.groups.popleft(), -1)

    def _count(self, one: One, sign: int) -> None:
        counts = self.labels.setdefault(one.label, _Counts())
        counts.numbers[GROUPS] += sign
        counts.numbers[LENGTHS : LENGTHS + one.length + 1] += sign
        counts.answers[one.answer] += sign
        if not counts.answers[one.answer]:
            del counts.answers[one.answer]
        if not counts.numbers[GROUPS]:
            del self.labels[one.label]


def _room(expected: Numbers) -> Numbers:
    return expected + SLACK * np.sqrt(expected) + PLACES


def _has_right(group: Group) -> bool:
    """Whether any answer is right, where rewards do not differ: rewards may all be negative."""
    return any(r.reward > 0 for r in group.rollouts if is_judged(r))
