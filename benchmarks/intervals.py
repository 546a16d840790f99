"""Means over seeds with 95 % bootstrap intervals, and values read off curves."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any


def interval(values: Sequence[float], form: str) -> str:
    low, high = bootstrap(values, fmean)
    return f"{fmean(values):{form}} [{low:{form}}, {high:{form}}]"


def against(runs: dict[int, Any], base: dict[int, Any], get: Callable[[dict[str, Any]], float]) -> str:
    """Difference of the means in percent, with the bootstrap interval over paired seeds."""
    seeds = sorted(runs.keys() & base.keys())
    if not seeds or runs is base:
        return ""
    pairs = [(get(runs[s]), get(base[s])) for s in seeds]
    ratio = lambda sample: 100 * (sum(a for a, _ in sample) / max(sum(b for _, b in sample), 1e-9) - 1)  # noqa: E731
    low, high = bootstrap(pairs, ratio)
    return f"{ratio(pairs):+.0f} % [{low:+.0f}, {high:+.0f}]"


def bootstrap(values: Sequence[Any], statistic: Callable[[Sequence[Any]], float], n: int = 4000) -> tuple[float, float]:
    """95 % percentile interval of `statistic` over resampled `values`."""
    rng = random.Random(0)
    drawn = sorted(statistic(rng.choices(values, k=len(values))) for _ in range(n))
    return drawn[int(0.025 * n)], drawn[int(0.975 * n) - 1]


Point = tuple[float, float]


def value_at(points: Sequence[Point], x: float) -> float | None:
    """y at `x`, linear between points; None beyond the last, the first y before the first."""
    before: Point | None = None
    for point in points:
        if point[0] >= x:
            if before is None:
                return point[1]
            share = (x - before[0]) / max(point[0] - before[0], 1e-12)
            return before[1] + share * (point[1] - before[1])
        before = point
    return None


def first_reach(points: Sequence[Point], y: float) -> float | None:
    """The first x at which y is reached, linear between points; None if it never is."""
    before: Point | None = None
    for point in points:
        if point[1] >= y:
            if before is None:
                return point[0]
            return before[0] + (y - before[1]) / (point[1] - before[1]) * (point[0] - before[0])
        before = point
    return None
