"""Running figures of a run: exact while it is short, to within a part when it is long, and the same after a restart."""

from __future__ import annotations

import json
import math
import random
import statistics
from typing import Any

import msgspec
import pytest

from swarm_node.observability.tally import BUCKETS, Buckets, Tally
from tests.support.run_files import tallied


def filled(values: list[float]) -> Buckets:
    buckets = Buckets()
    for value in values:
        buckets.add(value)
    return buckets


@pytest.mark.parametrize("n", [20, BUCKETS, BUCKETS + 1, 5000, 100_003])
def test_means_and_variances_of_both_ends(n: int) -> None:
    rng = random.Random(n)
    values = [rng.gauss(number / n, 0.1) for number in range(n)]
    buckets, k = filled(values), n // 10
    assert buckets.count == n and len(buckets.sums) <= BUCKETS
    near = 1e-9 if n <= BUCKETS else 0.02
    for (mean, variance), part in ((buckets.first(k), values[:k]), (buckets.last(k), values[-k:])):
        assert mean == pytest.approx(statistics.fmean(part), abs=near)
        assert variance == pytest.approx(statistics.variance(part), abs=near)
    assert buckets.first(n)[0] == pytest.approx(statistics.fmean(values))


def test_many_at_once_equal_one_by_one() -> None:
    at_once, one_by_one = Buckets(), Buckets()
    for value, times in ((1.0, 700), (2.0, 3), (0.5, 4096), (math.nan, 9)):
        at_once.add(value, times)
        for _ in range(times):
            one_by_one.add(value)
    assert at_once == one_by_one and at_once.count == 4799


def record(round: int) -> dict[str, Any]:
    sent = float(round % 100)  # a start each hundred rounds
    return {"round": round, "reward": round / 7, "step_time": 0.1, "num_tokens": round, "swarm/groups_sent": sent}


def test_what_follows_the_last_round_is_counted() -> None:
    tally = tallied([record(1) | {"averaging/exchanges": 5.0}])
    tally.count({"averaging/exchanges": 6.0})
    tally.count({"averaging/exchanges": 6.0})
    assert (tally.totals["averaging/exchanges"], tally.rounds) == (6.0, 1)
    tally.begin()
    tally.add(record(2) | {"averaging/exchanges": 7.0})
    assert tally.totals["averaging/exchanges"] == 13.0, "another start, which counts from 0"


def test_figures_go_on_where_a_checkpoint_ends() -> None:
    whole = tallied(map(record, range(1, 2001)))
    kept = json.dumps(msgspec.to_builtins(tallied(map(record, range(1, 1235)))))
    assert len(kept) < 32_000
    resumed = msgspec.convert(json.loads(kept), Tally)
    for number in range(1235, 2001):
        resumed.add(record(number))
    assert resumed == whole and whole.totals["swarm/groups_sent"] == 20 * 99


@pytest.mark.parametrize(
    "damaged", [{"each": 0}, {"count": 9}, {"count": 2}, {"squares": [1.0]}, {"count": 1000, "sums": [], "squares": []}]
)
def test_figures_that_do_not_fit_together_are_refused(damaged: dict[str, object]) -> None:
    good = {"count": 3, "each": 2, "sums": [1.0, 2.0], "squares": [1.0, 2.0]}
    assert msgspec.convert(good, Buckets).count == 3
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(good | damaged, Buckets)
