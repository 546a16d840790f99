"""Stages that are rebuilt from their neighbours, by CheckFree and by the methods that the benchmark compares."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from benchmarks.recovery_methods import METHODS, copied, gradient_norm, random, uniform
from swarm_node.pipeline.recovery.checkfree import Neighbour, checkfree, share, stretched

NORMS = [
    (3.0, 1.0),
    (1.0, 3.0),
    (0.0, 0.0),
    (0.0, 2.0),
    (1e-30, 1e-30),
    (1e308, 1e308),
    (math.inf, 1.0),
    (math.nan, 1.0),
]


def stage(layers: int, value: float | None = None, seed: int = 0) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    shapes = {"mlp.up.weight": (3, 2), "norm.weight": (2,), "mlp.up.bias": (3,)}
    make = lambda shape: torch.randn(shape, generator=rng) if value is None else torch.full(shape, value)  # noqa: E731
    return {f"model.layers.{k}.{name}": make(shape) for k in range(layers) for name, shape in shapes.items()}


def values(tensors: dict[str, Tensor]) -> set[float]:
    return {float(x) for tensor in tensors.values() for x in tensor.flatten()}


def test_golden_value() -> None:
    # neighbours 2 (norm 3) and 6 (norm 1): (3 x 2 + 1 x 6) / 4
    made = checkfree(Neighbour(stage(2, 2.0), 3.0), Neighbour(stage(2, 6.0), 1.0), 2)
    assert values(made) == {3.0}
    assert made.keys() == stage(2).keys()


@pytest.mark.parametrize(("before", "after"), NORMS)
def test_weights_sum_to_one(before: float, after: float) -> None:
    assert share(before, after) + share(after, before) == pytest.approx(1.0)
    same = stage(2, seed=1)
    made = checkfree(Neighbour(same, before), Neighbour(same, after), 2)
    for name, tensor in same.items():
        torch.testing.assert_close(made[name], tensor)


@pytest.mark.parametrize("norm", [0.0, 1e-20, 0.7, 1e30])
def test_equal_norms_are_the_plain_mean(norm: float) -> None:
    a, b = stage(2, seed=1), stage(2, seed=2)
    weighted = checkfree(Neighbour(a, norm), Neighbour(b, norm), 2)
    plain = uniform(Neighbour(a, 5.0), Neighbour(b, 1.0), 2)
    for name in a:
        torch.testing.assert_close(weighted[name], (a[name] + b[name]) / 2)
        assert torch.equal(weighted[name], plain[name])


def test_a_norm_of_zero_copies_the_other() -> None:
    a, b = stage(2, seed=1), stage(2, seed=2)
    b["model.layers.0.norm.weight"][0] = 0.0
    made = checkfree(Neighbour(a, 0.0), Neighbour(b, 0.3), 2)
    assert all(torch.equal(made[name], b[name]) for name in b)
    assert all(made[name].data_ptr() != b[name].data_ptr() for name in b)


def test_clipped_gradient_norms_give_the_plain_mean() -> None:
    """The reference implementation computes this: gradients of norm 8 and 2, clipped to 1 before they are measured."""
    gradients = [torch.full((4,), 4.0)], [torch.full((4,), 1.0)]
    measured = [gradient_norm(of) for of in gradients]
    assert measured == [8.0, 2.0]
    clipped = []
    for of in gradients:
        parameter = torch.nn.Parameter(torch.zeros(4))
        parameter.grad = of[0].clone()
        torch.nn.utils.clip_grad_norm_([parameter], 1.0)
        clipped.append(gradient_norm([parameter.grad]))
    a, b = stage(1, 2.0), stage(1, 6.0)
    right = checkfree(Neighbour(a, measured[0]), Neighbour(b, measured[1]), 1)
    flawed = checkfree(Neighbour(a, clipped[0]), Neighbour(b, clipped[1]), 1)
    plain = uniform(Neighbour(a), Neighbour(b), 1)
    for name in a:
        torch.testing.assert_close(right[name], torch.full_like(a[name], 2.8))
        torch.testing.assert_close(flawed[name], plain[name])


@pytest.mark.parametrize("method", METHODS.values())
def test_ends_and_loneliness(method) -> None:
    one = Neighbour(stage(2, seed=1), 0.5)
    for made in (method(one, None, 2), method(None, one, 2)):
        assert made.keys() == one.tensors.keys()
        if method is not random:
            assert all(torch.equal(made[name], one.tensors[name]) for name in made)
    with pytest.raises(ValueError, match="without neighbours"):
        method(None, None, 2)


def test_copy_takes_the_stage_before() -> None:
    assert values(copied(Neighbour(stage(1, 2.0)), Neighbour(stage(1, 6.0)), 1)) == {2.0}


@pytest.mark.parametrize(
    ("there", "wanted", "sources"),
    [
        (2, 2, [0, 1]),
        (4, 2, [1, 3]),
        (2, 4, [0, 0, 1, 1]),
        (3, 2, [0, 2]),
        (1, 3, [0, 0, 0]),
        (3, 1, [1]),
        (2, 3, [0, 1, 1]),
    ],
)
def test_other_numbers_of_layers(there: int, wanted: int, sources: list[int]) -> None:
    tensors = {f"model.layers.{k}.w": torch.tensor([float(k)]) for k in range(there)}
    made = stretched(tensors, wanted)
    assert [int(made[f"model.layers.{k}.w"]) for k in range(wanted)] == sources
    later = {f"model.layers.{5 + k}.w": tensor for k, tensor in enumerate(tensors.values())}
    made = stretched(later, wanted, 3)
    assert [int(made[f"model.layers.{k}.w"]) for k in range(3, 3 + wanted)] == sources


def test_neighbours_of_unequal_length_are_averaged() -> None:
    long = {f"model.layers.{k}.w": torch.tensor([float(k)]) for k in range(4)}
    short = {f"model.layers.{k}.w": torch.tensor([10.0 * k]) for k in range(2)}
    made = uniform(Neighbour(long), Neighbour(short), 2)
    assert [float(made[f"model.layers.{k}.w"]) for k in range(2)] == [0.5, 6.5]


def test_only_layers_are_made() -> None:
    embedding = {"model.embed_tokens.weight": torch.ones(2, 2), "model.norm.weight": torch.ones(2)}
    assert checkfree(Neighbour(stage(2) | embedding), Neighbour(stage(2)), 2).keys() == stage(2).keys()


def test_neighbours_of_another_shape_are_refused() -> None:
    other = {name: torch.cat([tensor, tensor]) for name, tensor in stage(2).items()}
    with pytest.raises(ValueError, match="same names and shapes"):
        checkfree(Neighbour(stage(2)), Neighbour(other), 2)
    with pytest.raises(ValueError, match="layers"):
        copied(Neighbour({f"model.layers.{k}.w": torch.ones(1) for k in (1, 3)}), None, 1)


def test_dtype_stays_and_sums_are_made_in_float32() -> None:
    a = {"layers.0.w": torch.tensor([30000.0], dtype=torch.float16)}
    b = {"layers.0.w": torch.tensor([60000.0], dtype=torch.float16)}
    made = checkfree(Neighbour(a, 1.0), Neighbour(b, 1.0), 1)["layers.0.w"]
    assert made.dtype == torch.float16
    assert float(made) == 44992.0  # 45000, as float16 has it


def test_a_random_stage_is_as_at_the_beginning() -> None:
    like = {
        "layers.0.w.weight": torch.full((200, 200), 9.0),
        "layers.0.norm.weight": torch.full((5,), 9.0),
        "layers.0.w.bias": torch.full((5,), 9.0),
        "layers.0.w.lora_A.weight": torch.full((4, 100), 9.0),
        "layers.0.w.lora_B.weight": torch.full((100, 4), 9.0),
    }
    made = random(Neighbour(like), None, 1, rng=torch.Generator().manual_seed(0))
    again = random(Neighbour(like), None, 1, rng=torch.Generator().manual_seed(0))
    assert all(torch.equal(made[name], again[name]) for name in like)
    assert float(made["layers.0.w.weight"].std()) == pytest.approx(0.02, rel=0.05)
    assert values({"": made["layers.0.norm.weight"]}) == {1.0}
    assert values({"": made["layers.0.w.bias"]}) == {0.0} == values({"": made["layers.0.w.lora_B.weight"]})
    assert 0 < float(made["layers.0.w.lora_A.weight"].abs().max()) <= 0.1
