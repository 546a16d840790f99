"""Whether a held-out figure (pass@1 or mean reward) changed by more than noise.

It is judged by the 95 % percentile interval of a paired bootstrap over questions. Miller 2024 (arXiv 2411.00640)
explains why over pairs, and why over questions rather than answers. The same questions are asked before and after, so
easy and hard ones cancel. The change is more than noise if the interval excludes 0. That is noise of questions and of
sampling, not of another seed. Without a change, one in twelve intervals of 30 questions excludes 0; of 50 and more
about one in twenty, as it should be. So the summary says of fewer than 50 that the interval is somewhat too narrow, and
of fewer than ten it gives none.
"""

from __future__ import annotations

from collections.abc import Sequence

LEAST_QUESTIONS = 10  # with fewer there is no interval
ENOUGH_QUESTIONS = 50  # with fewer, an interval is somewhat too narrow
RESAMPLES = 4000
MAX_DRAWN = 10**6  # numbers in memory at once: this is drawn while a node leaves


def interval(
    before: Sequence[float], after: Sequence[float], least: int = LEAST_QUESTIONS, level: float = 0.95
) -> tuple[float, float] | None:
    """Interval of that level for the mean of `after` - `before`, which hold one number per question in the same order.
    None if there are fewer than `least` questions, or different ones."""
    if len(before) != len(after) or len(before) < least:
        return None
    import numpy as np  # which commands that compare nothing start without

    changes = np.asarray(after) - np.asarray(before)
    rng, means = np.random.default_rng(0), np.empty(RESAMPLES)
    rows = max(1, MAX_DRAWN // len(changes))
    for start in range(0, RESAMPLES, rows):
        some = means[start : start + rows]
        some[:] = changes[rng.integers(0, len(changes), (len(some), len(changes)))].mean(axis=1)
    low, high = np.quantile(means, ((1 - level) / 2, (1 + level) / 2))
    return float(low), float(high)


def verdict(interval_of_change: tuple[float, float] | None, questions: int) -> str:
    """Whether a change over so many questions is more than noise, in words. The interval is that of `interval`."""
    if interval_of_change is None:
        few = "1 question is" if questions == 1 else f"{questions} questions are"
        return f"{few} too few to tell it from noise"
    return "more than noise" if interval_of_change[0] > 0 or interval_of_change[1] < 0 else "no more than noise"
