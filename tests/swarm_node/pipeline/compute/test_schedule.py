"""Schedules: known cases of 1F1B; no deadlock and bounded memory for every mix of routes."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from benchmarks.crew_speed import bubble_fraction
from swarm_node.pipeline.compute.schedule import Operation, Visit, route, schedule

SIZES = [(k, m) for k in range(1, 7) for m in range(1, 10)]


def text(operations: tuple[Operation, ...]) -> str:
    return " ".join(f"{o.kind}{o.microbatch}" for o in operations)


def test_it_is_1f1b() -> None:
    assert [text(operations) for operations in schedule(4, 6)] == [
        "F0 F1 F2 F3 F4 B0 F5 B1 B2 B3 B4 B5",
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5",
    ]
    assert text(schedule(1, 3)[0]) == "F0 B0 F1 B1 F2 B2"


def stages_of(stages: int, microbatch: int) -> list[int]:
    return [visit.stage for visit in route(stages, microbatch, swapped=True) if visit.layers]


def test_routes() -> None:
    assert route(1) == (Visit(0, embed=True, head=True),)
    assert route(3) == (Visit(0, embed=True), Visit(1), Visit(2, head=True))
    assert stages_of(6, 0) == [0, 1, 2, 3, 4, 5]
    assert stages_of(6, 1) == stages_of(6, 3) == [1, 0, 2, 3, 5, 4]
    assert stages_of(4, 1) == [1, 0, 3, 2]
    assert stages_of(2, 1) == [1, 0]
    assert [stages_of(3, i) for i in range(4)] == [[0, 1, 2], [1, 0, 2], [0, 1, 2], [0, 2, 1]]
    assert stages_of(1, 1) == [0]


@pytest.mark.parametrize("stages", range(1, 7))
def test_embedding_first_and_head_last_on_every_route(stages: int) -> None:
    for i in range(8):
        way = route(stages, i, swapped=True)
        assert [j for j, visit in enumerate(way) if visit.embed] == [0] and way[0].stage == 0
        assert [j for j, visit in enumerate(way) if visit.head] == [len(way) - 1] and way[-1].stage == stages - 1
        assert sorted(stages_of(stages, i)) == list(range(stages))


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_any_order_of_arrivals_runs_to_the_end(stages: int, microbatches: int, swapped: bool) -> None:
    for seed in range(4):
        held = run(stages, microbatches, swapped, random.Random(seed))
        for stage, most in enumerate(held):
            ahead = int(stages > 1)  # while the loss is computed elsewhere
            # a swapped route has up to two places more
            assert most <= (stages + 2 if swapped else stages - stage) + ahead


def run(stages: int, microbatches: int, swapped: bool, rng: random.Random) -> list[int]:
    """Execute by arrival of messages at random speeds. Returns the most microbatches that each stage held at a time."""
    lists = [list(operations) for operations in schedule(stages, microbatches, swapped)]
    ways = [route(stages, i, swapped) for i in range(microbatches)]
    arrived = {Operation("F", i, 0) for i in range(microbatches)}
    held, most = [0] * stages, [0] * stages
    done: dict[Operation, int] = defaultdict(int)
    while any(lists):
        able = [k for k in range(stages) if lists[k] and lists[k][0] in arrived]
        assert able, "deadlock"
        stage = rng.choice(able)
        operation = lists[stage].pop(0)
        kind, i, place = operation
        assert ways[i][place].stage == stage
        done[operation] += 1
        if ways[i][place].layers:
            held[stage] += 1 if kind == "F" else -1
        most[stage] = max(most[stage], held[stage])
        if kind == "F":
            last = place + 1 == len(ways[i])
            arrived.add(Operation("B", i, place) if last else Operation("F", i, place + 1))
        elif place:
            arrived.add(Operation("B", i, place - 1))
    assert held == [0] * stages
    assert done == {Operation(k, i, p): 1 for i in range(microbatches) for p in range(len(ways[i])) for k in "FB"}
    return most


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_equal_stages_wait_as_long_as_theory_says(stages: int, microbatches: int) -> None:
    """While a loss is computed, stages go on with the next microbatch."""
    lists, loss = schedule(stages, microbatches), int(stages > 1)
    end: dict[Operation, int] = {}
    free, todo = [0] * stages, [list(operations) for operations in lists]
    while any(todo):
        for k in range(stages):
            while todo[k]:
                kind, i, place = todo[k][0]
                if kind == "F":
                    needs = Operation("F", i, place - 1) if place else None
                else:
                    needs = Operation("B", i, place + 1) if place + 1 < stages else Operation("F", i, place)
                if needs is not None and needs not in end:
                    break
                ready = 0 if needs is None else end[needs] + loss * (needs.kind != kind)
                free[k] = max(free[k], ready) + 1
                end[todo[k].pop(0)] = free[k]
    span = max(end.values()) - loss * (microbatches == 1)
    assert (span - 2 * microbatches) / span == pytest.approx(bubble_fraction(stages, microbatches))
