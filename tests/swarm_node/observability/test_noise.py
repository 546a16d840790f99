"""Whether a change of a held-out figure is told from noise."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from swarm_node.observability.noise import MAX_DRAWN, RESAMPLES, interval


def questions(n: int, gain: float, seed: int = 0, samples: int = 8) -> tuple[list[float], list[float]]:
    """Shares of right answers to `n` questions of all difficulties, before and after each got easier by `gain`."""
    rng = random.Random(seed)
    chances = [rng.betavariate(0.5, 2) for _ in range(n)]
    now = [min(1.0, chance + gain) for chance in chances]
    before, after = ([sum(rng.random() < p for _ in range(samples)) / samples for p in ps] for ps in (chances, now))
    return before, after


def test_a_gain_is_told_from_noise() -> None:
    low, high = interval(*questions(128, gain=0.1)) or (0.0, 0.0)
    assert 0 < low < 0.1 < high
    outside = sum(low > 0 or high < 0 for seed in range(200) for low, high in [interval(*questions(64, 0.0, seed))])
    assert 1 <= outside <= 20, "about one in twenty"


def test_the_interval_is_that_of_pairs() -> None:
    before = [float(i % 2) for i in range(100)]
    after = [min(1.0, x + 0.5 * (i % 10 == 0)) for i, x in enumerate(before)]
    low, high = interval(before, after) or (0.0, 0.0)
    assert 0 < low < 0.05 < high < 0.12, "of unpaired ones it would be about -0.09 to +0.19"
    assert interval(before, before) == (0.0, 0.0)


def test_many_questions_take_no_more_memory_than_some() -> None:
    before, after = questions(3000, gain=0.1)
    tracemalloc.start()
    try:
        low, high = interval(before, after) or (0.0, 0.0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 40 * MAX_DRAWN < 8 * RESAMPLES * 3000 and 0.07 < low < high < 0.12


@pytest.mark.parametrize(("before", "after"), [(9, 9), (100, 99), (0, 128)])
def test_few_or_other_questions_support_no_claim(before: int, after: int) -> None:
    assert interval([0.0] * before, [1.0] * after) is None
