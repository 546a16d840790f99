"""Cutting weights into fragments, and putting them back."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from swarm_node.averaging.fragments import Fragments
from tests.support.tiny_models import make


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.data for name, p in model.named_parameters() if p.requires_grad}


def lora() -> nn.Module:
    return get_peft_model(make("qwen2"), LoraConfig(r=4, target_modules="all-linear"))


def layered(layers: int, width: int = 4, **outside: int) -> dict[str, torch.Tensor]:
    tensors = {f"model.layers.{i}.{part}.weight": torch.randn(width) for i in range(layers) for part in "ab"}
    return tensors | {name: torch.randn(size) for name, size in outside.items()}


def test_layers_are_strided():
    fragments = Fragments(layered(5), 2)
    assert {name.split(".")[2] for name in fragments.names[0]} == {"0", "2", "4"}
    assert {name.split(".")[2] for name in fragments.names[1]} == {"1", "3"}
    assert fragments.sizes == [24, 16]


def test_other_tensors_go_to_the_smallest_fragment():
    fragments = Fragments(layered(5, embed=10, head=3, norm=1), 2)  # 24 and 16, then 26, 27, 27
    assert {"embed", "norm"} < set(fragments.names[1])
    assert {"head"} < set(fragments.names[0])
    assert fragments.sizes == [27, 27]


@pytest.mark.parametrize(
    "name", ["transformer.h.{}.w", "gpt_neox.layers.{}.experts.7.w", "base_model.model.l.{}.a.default"]
)
def test_a_names_first_integer_is_its_layer(name):
    fragments = Fragments({name.format(i): torch.zeros(2) for i in range(4)}, 4)
    assert [fragments.names[i] for i in range(4)] == [[name.format(i)] for i in range(4)]


@pytest.mark.parametrize("model", [make("llama"), make("gpt_neox"), lora()], ids=["llama", "gpt_neox", "lora"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_value_is_in_one_fragment(model, count):
    tensors = trained(model)
    fragments = Fragments(tensors, count)
    assert sorted(name for i in range(count) for name in fragments.names[i]) == sorted(tensors)
    assert fragments.sizes == [sum(tensors[name].numel() for name in fragments.names[i]) for i in range(count)]
    assert all(fragments.sizes)
    for i in range(count):
        assert fragments.names[i] == sorted(fragments.names[i])
        expected = torch.cat([tensors[name].flatten() for name in fragments.names[i]])
        assert torch.equal(fragments.gather(i), expected)


@pytest.mark.parametrize("model", [make("llama"), lora()], ids=["llama", "lora"])
def test_scatter_and_add_reach_the_live_weights(model):
    fragments = Fragments(trained(model), 2)
    before = [fragments.gather(i) for i in range(2)]
    new = torch.randn(fragments.sizes[1])
    fragments.scatter(1, new)
    assert torch.equal(torch.cat([model.get_parameter(n).flatten() for n in fragments.names[1]]), new)
    fragments.add(1, new)
    assert torch.equal(fragments.gather(1), new * 2)
    assert torch.equal(fragments.gather(0), before[0])


def test_gather_makes_a_copy():
    tensors = layered(2)
    fragments = Fragments(tensors, 1)
    out = fragments.gather(0)
    kept = out.clone()
    for tensor in tensors.values():
        tensor.zero_()
    assert torch.equal(out, kept) and kept.any()


def test_other_types_are_rounded_once():
    weight = torch.full((3,), 1.0, dtype=torch.bfloat16)  # steps of 1/128 above 1, of 1/256 below
    fragments = Fragments({"w": weight}, 1)
    assert fragments.gather(0).dtype == torch.float32
    fragments.add(0, torch.tensor([0.0117, 0.0119, -0.0039]))
    assert weight.tolist() == [1.0078125, 1.015625, 0.99609375]
    fragments.scatter(0, torch.tensor([1.004, 2.0, -0.5]))
    assert weight.tolist() == [1.0078125, 2.0, -0.5]


def test_tensors_that_are_not_contiguous():
    tensors = {"w": torch.arange(6.0).view(2, 3).T}
    fragments = Fragments(tensors, 1)
    assert fragments.gather(0).tolist() == [0, 3, 1, 4, 2, 5]
    fragments.scatter(0, torch.arange(6.0))
    assert tensors["w"].tolist() == [[0, 1], [2, 3], [4, 5]]


def test_more_fragments_than_layers_spread_tensors():
    fragments = Fragments(layered(2, embed=10), 4)  # four tensors of 4 and one of 10
    assert sorted(fragments.sizes) == [4, 4, 8, 10]
    assert Fragments(layered(2, embed=10), 5).sizes == [10, 4, 4, 4, 4]
    with pytest.raises(ValueError, match="5 tensors"):
        Fragments(layered(2, embed=10), 6)


def test_the_layout_is_of_names_shapes_and_count():
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}
    layout = Fragments(tensors, 2).layout
    assert len(layout) == 16 and int(layout, 16)
    assert layout == Fragments({"b": torch.ones(4), "a": torch.ones(2, 3)}, 2).layout
    others = [
        Fragments(tensors, 1).layout,
        Fragments({"a": torch.zeros(3, 2), "b": torch.zeros(4)}, 2).layout,
        Fragments({"a": torch.zeros(2, 3), "c": torch.zeros(4)}, 2).layout,
    ]
    assert len({layout, *others}) == 4


def test_order_of_names_not_of_the_mapping_counts():
    tensors = layered(3, embed=7)
    shuffled = dict(reversed(tensors.items()))
    for i in range(2):
        assert torch.equal(Fragments(tensors, 2).gather(i), Fragments(shuffled, 2).gather(i))
