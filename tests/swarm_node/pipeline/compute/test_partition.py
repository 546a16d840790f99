"""The layers of each stage, compared with every possible partition and with real models."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from swarm_node.errors import UserError
from swarm_node.pipeline.compute.partition import UNKNOWN, partition


def loads(bounds, layers, embed, head, capacities):
    """The load of each stage: its cost over its capacity."""
    whole = [sum(layers[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]
    whole[0] += embed
    whole[-1] += head
    return [size / capacity for size, capacity in zip(whole, capacities, strict=True)]


def best(layers, embed, head, capacities):
    """(largest load, sum of squares) of the best of all partitions."""
    inner = combinations(range(1, len(layers)), len(capacities) - 1)
    every = (loads((0, *cut, len(layers)), layers, embed, head, capacities) for cut in inner)
    return min((max(each), sum(load**2 for load in each)) for each in every)


@pytest.mark.parametrize("seed", range(40))
def test_no_cut_is_better(seed):
    rng = random.Random(seed)
    layers = [rng.randint(1, 9) for _ in range(rng.randint(1, 8))]
    embed, head = rng.randint(0, 20), rng.randint(0, 20)
    count = rng.randint(1, len(layers))
    capacities = [UNKNOWN] * count if seed % 2 else [float(rng.randint(80, 300)) for _ in range(count)]
    spans = partition(layers, embed, head, capacities)
    assert len(spans) == count and all(first < end for first, end in spans)
    assert [end for _, end in spans[:-1]] == [first for first, _ in spans[1:]]
    shares = [capacity or 1.0 for capacity in capacities]
    found = loads((0, *(end for _, end in spans)), layers, embed, head, shares)
    assert (max(found), sum(load**2 for load in found)) == pytest.approx(best(layers, embed, head, shares))
    assert spans[0][0] == 0 and spans[-1][1] == len(layers)


def test_shares_are_equal_but_for_a_large_head():
    assert partition([5] * 8, 0, 0, [UNKNOWN] * 4) == ((0, 2), (2, 4), (4, 6), (6, 8))
    assert partition([5] * 8, 0, 10, [UNKNOWN] * 2) == ((0, 5), (5, 8))
    assert partition([5] * 9, 100, 0, [float("inf")] * 3) == ((0, 1), (1, 5), (5, 9))
    assert partition([5] * 9, 0, 0, [20.0, 40.0]) == ((0, 3), (3, 9))


@pytest.mark.parametrize("seed", range(40))
def test_a_cut_that_fits_is_always_found(seed):
    rng = random.Random(seed)
    layers = [rng.randint(1, 9) for _ in range(rng.randint(2, 8))]
    embed, head = rng.randint(0, 9), rng.randint(0, 9)
    count = rng.randint(2, len(layers))
    capacities = [
        rng.choice([UNKNOWN, float("inf"), *(float(rng.randint(5, 30)) for _ in range(4))]) for _ in range(count)
    ]
    rooms = [capacity or float("inf") for capacity in capacities]
    cuts = ((0, *cut, len(layers)) for cut in combinations(range(1, len(layers)), count - 1))
    if any(max(loads(cut, layers, embed, head, rooms)) <= 1 for cut in cuts):
        found = (0, *(end for _, end in partition(layers, embed, head, capacities)))
        assert max(loads(found, layers, embed, head, rooms)) <= 1
    else:
        with pytest.raises(ValueError, match="more memory"):
            partition(layers, embed, head, capacities)


def test_an_unknown_machine_takes_what_the_others_cannot():
    assert partition([5] * 9, 0, 0, [20.0, 40.0, UNKNOWN]) == partition([5] * 9, 0, 0, [20.0, 40.0, 40.0])
    assert partition([5] * 9, 0, 0, [10.0, UNKNOWN, 10.0]) == ((0, 2), (2, 7), (7, 9))


@pytest.mark.parametrize("count", [0, 4])
def test_there_are_no_more_stages_than_layers(count):
    with pytest.raises(UserError, match="1 to 3 stages"):
        partition([5] * 3, 0, 0, [UNKNOWN] * count)


@pytest.mark.parametrize("capacities", [[100.0, -1.0], [100.0, float("nan")]])
def test_capacities_that_make_no_sense_are_refused(capacities):
    with pytest.raises(ValueError, match="numbers of bytes"):
        partition([5] * 3, 0, 0, capacities)


def test_a_model_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"machines with 1.2, 3, \? GiB .* 4.5 GiB"):
        partition([2**30] * 4, 2**29, 0, [1.2 * 2**30, 3.0 * 2**30, UNKNOWN])
    with pytest.raises(ValueError, match="more memory"):
        partition([5] * 4, 3, 3, [13.0, 12.0])
    assert partition([5] * 4, 3, 3, [13.0, 13.0]) == ((0, 2), (2, 4))
