"""Running figures of a run, for its summary; a few kilobytes that a checkpoint keeps.

Totals of the swarm begin at 0 in each start. Where one falls, a start began, and the total so far is kept, as
`increase` of Prometheus does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from swarm_node.observability.cut_off import CUT
from swarm_node.observability.thinning import rounds_of

BUCKETS = 512  # most parts of the rewards: a tenth of the rounds is then at least 25 parts, and all take 10 kB
ENOUGH_ROUNDS = 20  # of fewer, the first and the last tenth are single rounds, which show no trend
COUNTED = ("swarm/", "averaging/", "stages/")  # prefixes of the names of totals


class Buckets(msgspec.Struct):
    """Numbers in their order, as sums over parts of equally many.

    When all parts are full, they are merged in pairs: no number is lost, and the means of the first and the last
    numbers are exact to within one part.
    """

    count: int = 0
    each: int = 1  # numbers per part; the last part may have fewer
    sums: list[float] = []
    squares: list[float] = []

    def __post_init__(self) -> None:
        """Raise ValueError if the parts do not fit; reading a checkpoint turns it into a ValidationError."""
        parts = len(self.sums)
        fits = self.each > 0 and (parts - 1) * self.each < self.count <= parts * self.each
        if not fits or len(self.squares) != parts or parts > BUCKETS:
            raise ValueError("the parts do not fit their count")

    def add(self, value: float | None, times: int = 1) -> None:
        """Add a number, `times` times; one that is missing or not finite is left out."""
        if value is None or not math.isfinite(value):
            return
        while times:
            if self.count == len(self.sums) * self.each:
                if len(self.sums) == BUCKETS:
                    self._merge()
                self.sums.append(0.0)
                self.squares.append(0.0)
            fitting = min(times, len(self.sums) * self.each - self.count)
            self.sums[-1] += fitting * value
            self.squares[-1] += fitting * value * value
            self.count += fitting
            times -= fitting

    def first(self, k: int) -> tuple[float, float]:
        """(mean, sample variance) of the first `k` numbers."""
        whole, part = divmod(k, self.each)
        return self._moments(k, lambda parts: sum(parts[:whole]) + self._share(parts, whole, part))

    def last(self, k: int) -> tuple[float, float]:
        """(mean, sample variance) of the last `k` numbers."""
        whole, part = divmod(self.count - k, self.each)
        return self._moments(k, lambda parts: sum(parts[whole:]) - self._share(parts, whole, part))

    def tenths(self) -> tuple[float, float] | None:
        """(mean of the first tenth, mean of the last tenth); of fewer than ENOUGH_ROUNDS, the first and the last one.
        None if there is none."""
        if not self.count:
            return None
        tenth = max(1, self.count // 10)
        return self.first(tenth)[0], self.last(tenth)[0]

    def means(self) -> list[float]:
        """The mean of each part, the oldest first."""
        last = self.count - (len(self.sums) - 1) * self.each
        return [total / (self.each if n < len(self.sums) else last) for n, total in enumerate(self.sums, 1)]

    def _share(self, parts: list[float], at: int, numbers: int) -> float:
        """The share of `numbers` numbers in the sum of part `at`, as if all were equal."""
        return parts[at] * numbers / min(self.each, self.count - at * self.each) if numbers else 0.0

    def _moments(self, k: int, total: Callable[[list[float]], float]) -> tuple[float, float]:
        mean = total(self.sums) / k
        return mean, max(0.0, (total(self.squares) - k * mean * mean) / max(1, k - 1))

    def _merge(self) -> None:
        self.sums = [a + b for a, b in zip(self.sums[::2], self.sums[1::2], strict=True)]
        self.squares = [a + b for a, b in zip(self.squares[::2], self.squares[1::2], strict=True)]
        self.each *= 2


class Tally(msgspec.Struct):
    """Figures of the rounds up to `round`."""

    round: int = 0  # the last one
    rounds: int = 0  # number of recorded rounds: a leader of a crew has only those that it led
    seconds: float = 0.0
    own: float = 0.0  # own groups trained on; `used`: groups of other peers, counted each time that one is trained on
    used: float = 0.0
    num_tokens: float = 0.0
    differing: float = 0.0  # rounds with an own group whose rewards were not all equal, or that do not say
    rewards: Buckets = msgspec.field(default_factory=Buckets)  # of the rounds since tasks or rewards last changed
    judged_by: str = ""  # a digest of those tasks and rewards; empty = not known
    earlier: int = 0  # rounds recorded before that change
    totals: dict[str, float] = {}  # totals of the swarm, averaging and stages, over all starts
    seen: dict[str, float] = {}  # the same totals in the last round
    cost: dict[str, float] = {}  # `cost/*` of the last round
    cut: float = 0.0  # share of the last round's own answers that ended at the length limit

    def judge(self, by: str) -> None:
        """Begin the rewards anew if the next round is judged by other tasks or rewards than those so far."""
        if self.judged_by not in ("", by):
            self.rewards, self.earlier = Buckets(), self.rounds
        self.judged_by = by

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a record of metrics.jsonl, which may stand for several rounds."""
        n = rounds_of(record)
        self.round = record["round"]
        self.rounds += n
        self.seconds += n * (record.get("step_time") or 0.0)
        self.own += n * (record.get("swarm/groups_own") or 0.0)
        self.used += n * (record.get("swarm/groups_used") or 0.0)
        self.num_tokens = record.get("num_tokens") or 0
        self.differing += n * (record.get("frac_reward_zero_std") != 1.0)
        self.rewards.add(record.get("reward"), n)
        self.cut = record.get(CUT) or 0.0
        self.cost = {name: value for name, value in record.items() if name.startswith("cost/") and value is not None}
        before, self.seen = self.seen, {}
        self._count(record, before)

    def count(self, totals: Mapping[str, Any]) -> None:
        """Add what the totals of this start have grown by since the last record, such as by a last exchange."""
        self._count(totals, self.seen.copy())

    def begin(self) -> None:
        """A start begins: its totals count from 0."""
        self.seen = {}

    def _count(self, totals: Mapping[str, Any], before: Mapping[str, float]) -> None:
        for name, value in totals.items():
            if name.startswith(COUNTED) and isinstance(value, int | float) and math.isfinite(value):
                self.seen[name] = value
                more = value - before.get(name, 0.0)
                self.totals[name] = self.totals.get(name, 0.0) + (more if more >= 0 else value)
