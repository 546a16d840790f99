"""The numbers of a run in a bounded number of points, however long it is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

import numpy as np

from swarm_node.observability.thinning import rounds_of

POINTS = 1024  # most rows; a run with that many rounds has at least half as many
MAX_NAMES = 256
DIGITS = 6
EMPTY = np.array([0.0, 0.0, np.inf, -np.inf])[:, None, None]  # sum, count, least and most of no number
LARGEST = 1e290  # largest number that is kept: many such numbers can still be added
MOST_ROUNDS = 2**40  # most rounds of one line of metrics.jsonl


class Curves:
    """The numbers of a run as rows of equally many rounds: for each number its mean, minimum and maximum.

    When all rows are full, they are merged in pairs: memory stays bounded, and every round stays in the means.
    """

    def __init__(self) -> None:
        self.rounds = 0
        self.per_row = 1
        self.left_out = 0  # number of names that were left out, beyond MAX_NAMES
        self._columns: dict[str, int] = {}
        self._alien: set[str] = set()
        self._table = np.empty((4, POINTS, 0))  # [sum, count, least and most, row, name]

    @property
    def rows(self) -> int:
        return -(-self.rounds // self.per_row)

    @property
    def names(self) -> list[str]:
        return list(self._columns)

    def add(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Add records of metrics.jsonl in their order; values that are no numbers are left out. A record of several
        `rounds` goes into one row."""
        self._widen(records)
        rounds = np.array([_rounds(record) for record in records], dtype=np.int64)
        values = np.full((len(records), len(self._columns)), np.nan)
        for name, column in self._columns.items():
            values[:, column] = _numbers([record.get(name) for record in records])
        while len(values):
            fitting = int(np.searchsorted(np.cumsum(rounds), POINTS * self.per_row - self.rounds, side="right"))
            if not fitting or rounds[:fitting].max() > self.per_row:
                self._merge()
                continue
            self._fold(values[:fitting], rounds[:fitting])
            values, rounds = values[fitting:], rounds[fitting:]
            if self.rounds == POINTS * self.per_row:
                self._merge()

    def points(self, first: int = 0) -> dict[str, dict[str, list[float | None]]]:
        """Name -> `mean` of the rows from `first` on, and `least` and `most` if rows have several rounds; None where
        nothing was measured."""
        sums, counts, least, most = self._table[:, first : self.rows]
        with np.errstate(invalid="ignore"):
            means = sums / counts
        found = {}
        for name, column in self._columns.items():
            if name in ("round", "time"):  # where a row ends
                found[name] = {"mean": _listed(most[:, column], None if name == "time" else DIGITS)}
                continue
            found[name] = {"mean": _listed(means[:, column])}
            if self.per_row > 1:
                found[name]["least"] = _listed(least[:, column])
                found[name]["most"] = _listed(most[:, column])
        return found

    def total(self, name: str) -> float | None:
        """The sum over all rounds; None if never measured."""
        column = self._columns.get(name)
        return None if column is None else float(self._table[0, :, column].sum())

    def tenths(self, name: str) -> tuple[float | None, float | None]:
        """The means over the first and the last tenth of all rounds, to within a row."""
        column, tenth = self._columns.get(name), max(1, self.rows // 10)
        if column is None:
            return None, None
        ends = slice(0, tenth), slice(self.rows - tenth, self.rows)
        sums, counts = ([float(part[end, column].sum()) for end in ends] for part in self._table[:2])
        first, last = (s / n if n else None for s, n in zip(sums, counts, strict=True))
        return first, last

    def _widen(self, records: Sequence[Mapping[str, Any]]) -> None:
        new = sorted(set().union(*records) - self._columns.keys() - {"rounds"})
        new = [name for name in new if any(_number(record.get(name)) is not None for record in records)]
        fitting = new[: MAX_NAMES - len(self._columns)]
        self._alien.update(new[len(fitting) :][: MAX_NAMES - len(self._alien)])
        self.left_out = len(self._alien)
        self._columns |= {name: len(self._columns) + i for i, name in enumerate(fitting)}
        self._table = np.concatenate([self._table, np.broadcast_to(EMPTY, (4, POINTS, len(fitting)))], axis=2)

    def _fold(self, values: np.ndarray, rounds: np.ndarray) -> None:
        """Add lines [n, names] (NaN = not measured) of so many rounds [n] each; they must fit."""
        values[np.abs(values) > LARGEST] = np.nan
        row = (self.rounds + np.cumsum(rounds) - rounds) // self.per_row
        starts = np.flatnonzero(np.diff(row, prepend=-1))
        rows, measured, weights = row[starts], ~np.isnan(values), rounds[:, None].astype(float)
        sums, counts, least, most = self._table
        sums[rows] += np.add.reduceat(np.where(measured, values * weights, 0.0), starts)
        counts[rows] += np.add.reduceat(measured * weights, starts)
        least[rows] = np.minimum(least[rows], np.minimum.reduceat(np.where(measured, values, np.inf), starts))
        most[rows] = np.maximum(most[rows], np.maximum.reduceat(np.where(measured, values, -np.inf), starts))
        self.rounds += int(rounds.sum())

    def _merge(self) -> None:
        even, odd = self._table[:, 0::2], self._table[:, 1::2]
        least, most = np.minimum(even[2], odd[2]), np.maximum(even[3], odd[3])
        merged = np.stack([even[0] + odd[0], even[1] + odd[1], least, most])
        self._table = np.concatenate([merged, np.broadcast_to(EMPTY, merged.shape)], axis=1)
        self.per_row *= 2


def _rounds(record: Mapping[str, Any]) -> int:
    n = rounds_of(record)
    return n if isinstance(n, int) and 1 <= n <= MOST_ROUNDS else 1


def _numbers(values: list[Any]) -> list[float | None]:
    if set(map(type, values)) <= {float, NoneType}:  # nearly always, and much faster
        return values
    return [_number(value) for value in values]


def _number(value: Any) -> float | None:
    """A number, or None (an array's NaN) if the value is none or too large."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < LARGEST else None


def _listed(values: np.ndarray, digits: int | None = DIGITS) -> list[float | None]:
    """A list for JSON: None where not finite, `digits` significant digits."""
    shown = values.tolist() if digits is None else [float(f"{value:.{digits}g}") for value in values.tolist()]
    return [value if math.isfinite(value) else None for value in shown]
