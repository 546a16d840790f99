"""Layouts of weights in a decoder: the same products, and which layout is taken."""

from __future__ import annotations

import weakref
from typing import get_args

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from swarm_node.policy.engines import products
from swarm_node.policy.engines.base import Request
from swarm_node.policy.engines.native import NativeEngine
from swarm_node.policy.engines.products import Layout, Name, joined, layout_of, packed_layout, packing_gain
from swarm_node.types import Sampling
from tests.support.layouts import skip_if_missing
from tests.support.tiny_models import make


@pytest.mark.parametrize("layout", get_args(Name))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 48), (8, 48), (2, 9, 48)])
def test_every_layout_has_the_modules_products(layout, dtype, shape):
    skip_if_missing(layout, dtype)
    torch.manual_seed(0)
    modules = [nn.Linear(48, 32, bias=True), nn.Linear(48, 16, bias=False), nn.Linear(48, 24, bias=True)]
    modules, x = [m.to(dtype) for m in modules], torch.randn(shape, dtype=dtype)
    with torch.inference_mode():
        expected = torch.cat([m(x) for m in modules], -1)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(joined(modules, layout)(x), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("layout", ["joined", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_are_merged(layout, dtype):
    skip_if_missing(layout, dtype)
    torch.manual_seed(0)
    model = get_peft_model(
        make("qwen2").to(dtype), LoraConfig(r=4, target_modules=["up_proj"]), autocast_adapter_dtype=True
    )
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    nn.init.normal_(layer.lora_B["default"].weight, std=0.3)
    x = torch.randn(3, layer.in_features, dtype=dtype)
    with torch.inference_mode():
        plain, expected = layer.base_layer(x), layer(x)
        found = joined([layer], layout)(x)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    assert (plain - expected).abs().max() > 10 * tolerance


def test_a_small_model_is_joined():
    assert layout_of(make("qwen2")).name == "joined"


@pytest.mark.parametrize(
    ("gain", "name", "why"),
    [
        (1.6, "packed", "measured 1.6 times as fast"),
        (1.1, "own", "measured 1.1 times as fast"),
        (0.0, "own", "no packed weights"),
    ],
)
def test_a_large_model_is_packed_where_that_pays(gain, name, why, monkeypatch):
    monkeypatch.setattr(products, "COPIED_BYTES", 0)
    monkeypatch.setattr(products, "packing_gain", lambda hidden, dtype: gain)
    assert layout_of(make("qwen2")).name == "own"
    layout = packed_layout(make("qwen2"))
    assert layout.name == name and why in layout.why


def test_a_quantised_model_is_copied_without_packing(monkeypatch):
    monkeypatch.setattr(products, "is_packed", lambda weight: True)
    monkeypatch.setattr(products, "packing_gain", lambda hidden, dtype: 1.0)
    layout = packed_layout(make("qwen2"))
    assert layout.name == "joined" and "dequantised once a round" in layout.why


@pytest.mark.parametrize("layout", ["joined", "packed"])
def test_copied_weights_give_way_to_an_update(layout):
    skip_if_missing(layout)
    engine = NativeEngine(make("qwen2"), [1], 0)
    engine.layout = Layout(layout, "")
    decoder = weakref.ref(engine.decoder)
    assert decoder() is engine.decoder
    engine.submit([Request(0, [3, 4], Sampling(4), n=2)])
    assert len([*engine.samples()]) == 2
    engine.release()
    assert decoder() is None


@pytest.mark.parametrize("error", [RuntimeError, AttributeError])
def test_a_machine_without_packed_weights_has_no_gain(error, monkeypatch):
    def missing(weight):
        raise error("no such operation")

    monkeypatch.setattr(products, "_packed", missing)
    assert packing_gain.__wrapped__(64, torch.float32) == 0.0


def test_other_products_are_no_gain(monkeypatch):
    monkeypatch.setattr(products, "_product", lambda x, packed, bias: torch.zeros(len(x), 256))
    assert packing_gain.__wrapped__(64, torch.float32) == 0.0
