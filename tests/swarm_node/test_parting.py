"""Before a node leaves: an exchange of weights that is due or under way may come about."""

from __future__ import annotations

import math

import pytest

from swarm_node.parting import last_exchange
from tests.swarm_node.averaging.cohort import PERIOD_S, Cohort


class Pair:
    """Two of a cohort in the middle of an outer round, each with an update that nobody else has."""

    def __init__(self, method: str) -> None:
        self.cohort = Cohort(2, method=method, every=1)
        for trainee in self.cohort.trainees:
            trainee.dead = True  # it trains no more
        self.a, self.b = (trainee.averager for trainee in self.cohort.trainees)
        self.cohort.clock.run_until(1010.5 * PERIOD_S)
        self.b.step(1)
        self.turns = 0

    def average(self) -> None:
        """Of the one that leaves; the other goes on meanwhile."""
        self.turns += 1
        self.a.step(1)
        self.cohort.run(0.2)
        self.b.step(1)


@pytest.mark.parametrize("method", ["noloco", "diloco"])
def test_it_comes_about_while_there_is_time(method: str) -> None:
    pair = Pair(method)
    assert last_exchange(pair.a, pair.average, lambda: math.inf)
    assert pair.a.counts["exchanges"] == 1 and not pair.a.under_way()
    pair.b.step(1)
    assert pair.b.counts["exchanges"] == 1


def test_it_is_not_waited_for_when_there_is_none() -> None:
    pair = Pair("noloco")
    pair.cohort.trainees[1].transport.close()
    assert not last_exchange(pair.a, pair.average, lambda: 0.0)
    assert pair.turns == 1


def test_nothing_is_due_without_an_update() -> None:
    pair = Pair("noloco")
    assert last_exchange(pair.a, pair.average, lambda: math.inf)
    turns = pair.turns
    assert not last_exchange(pair.a, pair.average, lambda: math.inf)
    assert pair.turns == turns + 1
