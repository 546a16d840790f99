"""Before a node leaves: an exchange of weights that is due or under way may come about."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from swarm_node.averaging.pairing import partner
from swarm_node.runtime.drain import AFTER_EXCHANGE_S, last_exchange
from swarm_protocol.transports.memory import LinkModel
from tests.support.averaging_cohort import COHORT, PERIOD_S, Cohort, Trainee


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


def test_no_exchange_is_not_waited_for() -> None:
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


class Leaver:
    """The first of a cohort in the middle of an outer round in which it has averaged; then it learned something."""

    def __init__(self, n: int, **options: Any) -> None:
        self.cohort = Cohort(n, every=5, **PLAIN_MEAN, **options)
        for trainee in self.cohort.trainees:
            trainee.dead = True
        self.cohort.clock.run_until(1010.3 * PERIOD_S)
        self.averagers = [trainee.averager for trainee in self.cohort.trainees]
        self.updates = dict.fromkeys(self.averagers, 5)
        for _ in range(20):
            self.turn()
        self.mine, *self.others = self.cohort.trainees
        self.counts = [averager.counts["exchanges"] for averager in self.averagers]
        for tensor in self.mine.weights.values():
            tensor += 1.0
        self.updates[self.mine.averager] = 7  # not enough to be due

    def turn(self) -> None:
        """Of everybody."""
        for averager in self.averagers:
            averager.step(self.updates[averager])
        self.cohort.run(0.2)

    def leaves(self) -> bool:
        came_about = last_exchange(self.mine.averager, self.turn, lambda: math.inf)
        self.turn()
        return came_about


PLAIN_MEAN = {"alpha": 0.0, "beta": 1.0, "gamma": 1.0}


def heirs(leaver: Leaver) -> list[Trainee]:
    """Who has half of what it learned."""
    return [trainee for trainee in leaver.others if torch.allclose(trainee.flat, torch.tensor(0.5), atol=1e-3)]


def test_a_leaver_s_update_goes_to_an_heir() -> None:
    leaver = Leaver(4)
    assert leaver.leaves()
    assert len(heirs(leaver)) == 1
    after = [averager.counts["exchanges"] for averager in leaver.averagers]
    assert sum(after) - sum(leaver.counts) == 2
    assert torch.allclose(leaver.mine.flat, torch.tensor(0.5), atol=1e-3)


@pytest.mark.parametrize("fragments", [2, 3])
def test_of_every_fragment(fragments: int) -> None:
    leaver = Leaver(2, fragments=fragments)
    assert leaver.leaves()
    assert heirs(leaver) == leaver.others


def test_a_peer_that_cannot_is_passed_over() -> None:
    leaver = Leaver(4)
    gone, *there = leaver.others
    gone.transport.close()
    there[0].averager.drain(1.0)
    assert leaver.leaves()
    assert heirs(leaver) == there[1:]


def test_a_mute_heir_is_replaced_in_time() -> None:
    leaver = Leaver(4)
    clock, mute = leaver.cohort.clock, []
    mine, members = leaver.mine.averager, [trainee.transport.peer_id for trainee in leaver.cohort.trainees]
    first = partner(mine.place.peer_id, members, 1010, COHORT)
    for trainee in leaver.others:
        if trainee.transport.peer_id == first:
            trainee.transport.link = LinkModel(latency_s=30.0)
            mute.append(trainee)
    end = clock.now() + AFTER_EXCHANGE_S + 3.0
    assert last_exchange(mine, leaver.turn, lambda: end - clock.now())
    leaver.turn()
    assert len(mute) == 1 and len(heirs(leaver)) == 1 and heirs(leaver) != mute


def test_repeated_farewells_are_heard_once_an_hour() -> None:
    leaver = Leaver(2)
    (heir,) = leaver.others
    for hours, heard in ((0, True), (0, False), (1, True)):
        leaver.cohort.run(hours * 3600.0)
        leaver.updates[leaver.mine.averager] += 1
        for tensor in leaver.mine.weights.values():
            tensor += 1.0
        before = heir.flat.clone()
        mine = leaver.mine.averager
        mine._drain.refused.clear()  # type: ignore[attr-defined]  # a liar goes by no memory; an honest node has no way to
        assert last_exchange(mine, leaver.turn, lambda: math.inf) == heard
        leaver.turn()
        assert bool((heir.flat - before).abs().max() > 0.1) == heard
    assert heir.averager.refused["late"] == 1


def test_a_stalling_leaver_blocks_no_due_exchange() -> None:
    leaver = LeftOver()
    leaver.mine.transport.link = LinkModel(latency_s=0.02, bandwidth_bytes_s=50.0)  # a minute for its weights
    leaver.mine.averager.drain(1.0)
    for _ in range(5):
        leaver.turn()
    assert any(trainee.averager.under_way() for trainee in leaver.others)
    for averager in (trainee.averager for trainee in leaver.others):
        assert not averager.waiting()
    leaver.others_are_due()
    for _ in range(15):
        leaver.turn()
    assert leaver.of_others() == leaver.before + 2


def test_one_inheritance_a_round_at_most() -> None:
    leaver = Leaver(3)
    assert leaver.leaves()
    first = heirs(leaver)
    second = next(trainee for trainee in leaver.others if trainee not in first)
    for tensor in second.weights.values():
        tensor += 8.0
    leaver.updates[second.averager] = 8
    leaver.mine.transport.close()
    assert not last_exchange(second.averager, leaver.turn, lambda: math.inf)
    assert heirs(leaver) == first and first[0].averager.refused["late"] == 1


def test_a_strangers_weights_are_nobodys_inheritance() -> None:
    leaver = Leaver(3)
    for trainee in leaver.others:
        trainee.averager.place = replace(trainee.averager.place, cohort="d" * 16)
        leaver.cohort.announce(trainee)
    leaver.cohort.run(2 * PERIOD_S)
    assert not leaver.leaves()
    assert heirs(leaver) == []


class LeftOver(Leaver):
    """Of three, in a round in which the two others are each other's partners."""

    def __init__(self) -> None:
        super().__init__(3, link=LinkModel(latency_s=0.02, bandwidth_bytes_s=2000.0), overlap=False)
        a, b = (trainee.transport.peer_id for trainee in self.others)
        everybody = a, b, self.mine.transport.peer_id
        round = next(r for r in range(1011, 1040) if partner(a, everybody, r, COHORT) == b)
        self.cohort.clock.run_until((round + 0.1) * PERIOD_S)
        self.before = self.of_others()

    def of_others(self) -> int:
        """Exchanges."""
        return sum(trainee.averager.counts["exchanges"] for trainee in self.others)

    def others_are_due(self) -> None:
        for trainee in self.others:
            self.updates[trainee.averager] = 10
        self.turn()


def test_a_busy_peer_is_asked_again() -> None:
    leaver = LeftOver()
    leaver.others_are_due()
    assert leaver.others[0].averager.under_way()
    assert leaver.leaves()
    assert leaver.of_others() == leaver.before + 3


def test_an_heir_goes_on_in_its_round() -> None:
    leaver = LeftOver()
    assert leaver.leaves()
    assert leaver.of_others() == leaver.before + 1
    leaver.others_are_due()
    for _ in range(15):
        leaver.turn()
    assert leaver.of_others() == leaver.before + 3
