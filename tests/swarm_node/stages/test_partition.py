"""Which layers each stage holds: against every possible cut, and against models as they are."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from swarm_node.errors import UserError
from swarm_node.stages.partition import FAMILIES, partition, sizes
from tests.swarm_node.policy.models import MAKERS, make


def loads(bounds, layers, embed, head, capacities):
    """What each stage holds, over what it can."""
    whole = [sum(layers[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]
    whole[0] += embed
    whole[-1] += head
    return [size / capacity for size, capacity in zip(whole, capacities, strict=True)]


def best(layers, embed, head, capacities):
    """(largest load, sum of squares) of the best of all cuts."""
    inner = combinations(range(1, len(layers)), len(capacities) - 1)
    every = (loads((0, *cut, len(layers)), layers, embed, head, capacities) for cut in inner)
    return min((max(each), sum(load**2 for load in each)) for each in every)


@pytest.mark.parametrize("seed", range(40))
def test_no_cut_is_better(seed):
    rng = random.Random(seed)
    layers = [rng.randint(1, 9) for _ in range(rng.randint(1, 8))]
    embed, head = rng.randint(0, 20), rng.randint(0, 20)
    count = rng.randint(1, len(layers))
    capacities = [1.0] * count if seed % 2 else [float(rng.randint(80, 300)) for _ in range(count)]
    spans = partition(layers, embed, head, capacities)
    assert [(s.index, s.count, s.layers) for s in spans] == [(i, count, len(layers)) for i in range(count)]
    assert all(s.first < s.end for s in spans)
    assert [s.end for s in spans[:-1]] == [s.first for s in spans[1:]]
    found = loads((0, *(s.end for s in spans)), layers, embed, head, capacities)
    assert (max(found), sum(load**2 for load in found)) == pytest.approx(best(layers, embed, head, capacities))
    assert spans[0].is_first and spans[0].first == 0 and spans[-1].is_last and spans[-1].end == len(layers)


def test_alike_machines_get_alike_shares_and_a_large_head_fewer_layers():
    assert [(s.first, s.end) for s in partition([5] * 8, 0, 0, [1.0] * 4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert [(s.first, s.end) for s in partition([5] * 8, 0, 10, [1.0] * 2)] == [(0, 5), (5, 8)]
    assert [(s.first, s.end) for s in partition([5] * 9, 100, 0, [1.0] * 3)] == [(0, 1), (1, 5), (5, 9)]
    assert [(s.first, s.end) for s in partition([5] * 9, 0, 0, [20.0, 40.0])] == [(0, 3), (3, 9)]


@pytest.mark.parametrize("capacities", [[1.0] * 4, [], [100.0, 0.0], [100.0, -1.0], [100.0, float("nan")]])
def test_machines_without_room_for_a_layer_are_refused(capacities):
    with pytest.raises(UserError):
        partition([5] * 3, 0, 0, capacities)


def test_a_model_that_does_not_fit_is_refused():
    with pytest.raises(UserError, match="more memory"):
        partition([5] * 4, 3, 3, [13.0, 12.0])
    assert len(partition([5] * 4, 3, 3, [13.0, 13.0])) == 2
    assert len(partition([5] * 4, 3, 3, [1.0, 1.0])) == 2  # unknown


@pytest.mark.parametrize("kind", [kind for kind in MAKERS if kind != "gemma2"])
def test_sizes_are_those_of_the_model(kind):
    model = make(kind)
    assert model.config.model_type in FAMILIES
    layers, embed, head = sizes(model.config)
    assert layers == [sum(p.numel() * 4 for p in layer.parameters()) for layer in model.get_decoder().layers]
    matrix = model.get_input_embeddings().weight.numel() * 4
    assert embed == matrix
    whole = sum(p.numel() * 4 for p in model.parameters())
    assert sum(layers) + embed + head == whole + (matrix if model.config.tie_word_embeddings else 0)
    assert [2 * size for size in sizes(model.config, itemsize=2)[0]] == layers


def test_sizes_of_another_family_are_refused():
    with pytest.raises(UserError, match="gpt_neox, llama, mistral, qwen2, qwen3"):
        sizes(make("gemma2").config)
