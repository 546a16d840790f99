from __future__ import annotations

import itertools
import math

import pytest
import torch

from swarm_node.averaging import merge
from swarm_node.averaging.merge import clip_factors, task_arithmetic, task_norms, uniform_mean
from swarm_node.errors import UserError

SHAPES = {"embed": (7, 5), "norm": (5,), "scalar": ()}


def state(seed, dtype=torch.float32, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    return {name: (spread * torch.randn(shape, generator=generator)).to(dtype) for name, shape in SHAPES.items()}


def states(k=3, **options):
    return {f"node {i}": state(i + 1, **options) for i in range(k)}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_uniform_is_the_mean_rounded_once():
    three = states()
    mean = uniform_mean(three)
    for name in SHAPES:
        exact = torch.stack([s[name].double() for s in three.values()]).mean(0)
        assert mean[name].dtype == torch.float32 and torch.equal(mean[name], exact.float())
    two = {"a": {"w": torch.tensor([1.0, 2.0])}, "b": {"w": torch.tensor([3.0, 8.0])}}
    assert uniform_mean(two)["w"].tolist() == [2, 5]


def test_equal_states_merge_to_themselves():
    one = state(1)
    assert same(uniform_mean({str(i): one for i in range(7)}), one)


@pytest.mark.parametrize("k", [2, 3, 5, 7])
def test_scale_1_over_k_is_the_uniform_mean(k):
    many = states(k)
    mean = uniform_mean(many)
    for name, tensor in task_arithmetic(many, state(0), 1 / k).items():
        assert torch.allclose(tensor, mean[name], rtol=2e-7, atol=0)  # all but the last bit


def test_task_arithmetic_adds_all_changes():
    base = {"w": torch.tensor([1.0, 1.0, 1.0])}
    two = {"a": {"w": torch.tensor([2.0, 1.0, 1.0])}, "b": {"w": torch.tensor([1.0, 5.0, 1.0])}}
    assert task_arithmetic(two, base, 1.0)["w"].tolist() == [2, 5, 1]
    assert task_arithmetic(two, base, 0.5)["w"].tolist() == [1.5, 3, 1]
    assert task_arithmetic(two, base, -1.0)["w"].tolist() == [0, -3, 1]  # unlearns
    assert task_arithmetic(two, base, 0.0)["w"].tolist() == [1, 1, 1]


def test_no_clipped_task_vector_exceeds_the_median():
    base = {"w": torch.zeros(2), "v": torch.zeros(1)}
    three = {
        "short": {"w": torch.tensor([1.0, 0.0]), "v": torch.zeros(1)},
        "middle": {"w": torch.tensor([0.0, 2.0]), "v": torch.zeros(1)},
        "far": {"w": torch.tensor([0.0, 30.0]), "v": torch.tensor([40.0])},
    }
    norms = task_norms(three, base)
    assert norms == {"short": 1, "middle": 2, "far": 50}
    factors = clip_factors(norms)
    assert factors == {"short": 1, "middle": 1, "far": 2 / 50}
    merged = task_arithmetic(three, base, 1.0, factors)
    assert torch.allclose(merged["w"], torch.tensor([1.0, 3.2])) and torch.allclose(merged["v"], torch.tensor([1.6]))
    assert clip_factors({"a": 0.0, "b": 0.0, "c": 1.0}) == {"a": 1, "b": 1, "c": 0}


def test_the_order_of_the_nodes_does_not_matter():
    four, base = states(4, spread=1e3), state(0)
    for tensors, value in zip(four.values(), [1e17, 1.0, -1e17, 0.5], strict=True):
        tensors["far"] = torch.tensor([value])  # float64 forgets the small ones, or not, by the order it adds in
    base["far"] = torch.zeros(1)
    factors = clip_factors(task_norms(four, base))
    means, sums = [], []
    for order in itertools.permutations(four):
        means.append(uniform_mean({name: four[name] for name in order}))
        sums.append(task_arithmetic({name: four[name] for name in order}, base, 0.4, factors))
    assert all(same(mean, means[0]) for mean in means) and all(same(total, sums[0]) for total in sums)


def test_bfloat16_is_averaged_in_higher_precision():
    # 256 + 1 is 256 in bfloat16: a sum in that type would lose every one of the ones
    many = {"big": {"w": torch.tensor([256.0], dtype=torch.bfloat16)}}
    many |= {str(i): {"w": torch.tensor([1.0], dtype=torch.bfloat16)} for i in range(7)}
    assert uniform_mean(many)["w"].tolist() == [263 / 8]
    mixed = {"a": {"w": torch.tensor([1.0], dtype=torch.bfloat16)}, "b": {"w": torch.tensor([1 + 2**-20])}}
    assert uniform_mean(mixed)["w"].tolist() == [1 + 2**-21]


def test_pieces_make_no_difference(monkeypatch):
    three, base = states(), state(0)
    whole, norms = task_arithmetic(three, base, 0.3), task_norms(three, base)
    monkeypatch.setattr(merge, "MERGE_PIECE", 4)
    assert same(task_arithmetic(three, base, 0.3), whole)
    assert task_norms(three, base) == pytest.approx(norms, rel=1e-12)


def test_a_strided_tensor_is_merged_value_by_value():
    w = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(uniform_mean({"a": {"w": w}, "b": {"w": w.T.contiguous().T}})["w"], w)


def tied(state):
    return state | {"head": state["embed"]}


def test_tied_tensors_are_merged_once_and_stay_tied():
    three, base = {name: tied(s) for name, s in states().items()}, tied(state(0))
    for merged in (uniform_mean(three), task_arithmetic(three, base, 0.3)):
        assert merged["head"] is merged["embed"] and merged["norm"] is not merged["embed"]
    assert task_norms(three, base) == task_norms(states(), state(0))
    three["node 1"]["head"] = three["node 1"]["head"] + 3  # one of them is not tied: then none is
    merged = uniform_mean(three)
    assert torch.allclose(merged["head"], merged["embed"] + 1)


def test_names_or_shapes_that_differ_are_refused():
    two = states(2)
    del two["node 1"]["norm"]
    with pytest.raises(UserError, match=r"node 0 has norm, node 1 does not \(1 names differ\)"):
        uniform_mean(two)
    two["node 1"]["norm"] = torch.zeros(6)
    with pytest.raises(UserError, match=r"norm is \[5\] in node 0, \[6\] in node 1"):
        uniform_mean(two)
    with pytest.raises(UserError, match=r"the base has scalar, node 0 does not"):
        task_arithmetic({"node 0": {"w": torch.zeros(1)}}, {"scalar": torch.zeros(())}, 0.5)
    with pytest.raises(UserError, match="in the base"):
        task_norms({"node 0": state(1)}, state(1) | {"norm": torch.zeros(4)})


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_weights_are_refused_by_name(value):
    two = states(2)
    two["node 1"]["norm"][2] = value
    with pytest.raises(UserError, match="norm is not finite in node 1"):
        uniform_mean(two)
    with pytest.raises(UserError, match="node 1 are not finite"):
        task_norms(two, state(0))
