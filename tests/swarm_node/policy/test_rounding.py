"""Fast paths are judged by what rounding does to the model itself: right ones are taken, wrong ones refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from swarm_node.config import PolicyConfig, RolloutsConfig
from swarm_node.policy import probes
from swarm_node.policy.engines.native import Cache, Decoder, NativeEngine
from swarm_node.policy.engines.products import layout_of
from swarm_node.policy.policy import Policy
from swarm_node.policy.probes import ProbeText
from swarm_node.policy.rounding import Agreement, OwnNumbers, divergence, random_rounding, worst
from swarm_node.policy.starter import build_tokenizer
from tests.support.tiny_models import make

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHARPNESS = {"flat": 0.3, "trained": 3.0, "peaked": 8.0}
"""Standard deviation of a distribution's logits."""
ROLLOUTS = RolloutsConfig(max_prompt_tokens=20, max_new_tokens=8)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


@pytest.fixture(params=SHARPNESS)
def sharpness(request):
    return SHARPNESS[request.param]


def policy_of(kind, dtype, sharpness, seed=0, said=None):
    """A tiny policy whose distributions have logits of that standard deviation."""
    model = make(kind, seed)
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())  # apart from the embedding
    with torch.no_grad():
        spread = model(input_ids=torch.arange(3, 19)[None]).logits.std(-1).mean()
        head.weight.mul_(sharpness / spread)
        if head.bias is not None:
            head.bias.mul_(sharpness / spread)
    tokenizer = build_tokenizer(["what is one plus two", "how many bits are there"] * 8)
    return Policy(model.to(dtype), tokenizer, PolicyConfig(), [].append if said is None else said.append)


def rows_of(policy):
    probe = ProbeText.of(policy)
    return probe, [OwnNumbers.of(policy, probe.prompt + tail) for tail in (probe.one, probe.two)]


@torch.no_grad()
def is_native_taken(policy):
    return probes._native_agrees(policy, *rows_of(policy), layout_of(policy.model))


@torch.no_grad()
def is_packing_taken(policy):
    return probes._packed_agrees(policy, *rows_of(policy))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["llama", "llama_bias", "qwen2", "qwen3", "mistral"])
def test_right_paths_are_taken_in_each_dtype(kind, seed, dtype, sharpness):
    said = []
    policy = policy_of(kind, dtype, sharpness, seed, said)
    probes.choose_paths(policy, ROLLOUTS)
    assert isinstance(policy.engine, NativeEngine) and policy.packing and policy.split_head, said


def other_base(decoder):
    """Rotary embeddings of another base: 2,000 instead of 10,000."""
    decoder.slice.rotary = copy.deepcopy(decoder.slice.rotary)
    frequencies = decoder.slice.rotary.inv_freq
    frequencies.copy_(2000.0 ** -(torch.arange(len(frequencies)) / len(frequencies)))


def capped(decoder):
    """Logits with a soft cap as high as the highest of them."""
    head = decoder.head
    decoder.head = lambda x: (most := head(x).abs().max()) * (head(x) / most).tanh()


def scaled(decoder):
    """Logits that are twice as large."""
    head = decoder.head
    decoder.head = lambda x: 2 * head(x)


def without_a_norm(decoder):
    """A layer whose norm is left out."""
    decoder.slice.layers[1] = decoder.slice.layers[1].__class__(
        **{**decoder.slice.layers[1].__dict__, "norm2": lambda x: x}
    )


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("wrong", [other_base, capped, scaled, without_a_norm])
def test_a_wrong_decoder_is_refused(wrong, kind, seed, dtype, sharpness, monkeypatch):
    def broken(*arguments):
        decoder = Decoder(*arguments)
        wrong(decoder)
        return decoder

    policy = policy_of(kind, dtype, sharpness, seed)
    assert is_native_taken(policy)
    monkeypatch.setattr(probes, "Decoder", broken)
    assert not is_native_taken(policy)


def test_a_decoder_that_scales_its_scores_otherwise_is_refused(dtype, sharpness, monkeypatch):
    attend = Cache.attend
    monkeypatch.setattr(Cache, "attend", lambda self, i, q, *rest: attend(self, i, 1.5 * q, *rest))
    assert not is_native_taken(policy_of("llama", dtype, sharpness))


def test_a_decoder_without_the_window_is_refused(dtype, sharpness):
    """Of a model whose window is shorter than the rows."""
    assert not is_native_taken(policy_of("mistral_window", dtype, sharpness))


class _Leaks(nn.Module):
    """A backbone of which a packed answer sees the one beside it."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone

    def forward(self, attention_mask=None, **inputs):
        seen = None if attention_mask is None else torch.ones_like(attention_mask).tril()
        return self.backbone(attention_mask=seen, **inputs)


class _Forgets(_Leaks):
    """A backbone that ignores the positions of packed rows."""

    def forward(self, position_ids=None, **inputs):
        return self.backbone(**inputs)


@pytest.mark.parametrize("wrong", [_Leaks, _Forgets])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt_neox"])
def test_wrong_packed_rows_are_refused(wrong, kind, dtype, sharpness, monkeypatch):
    policy = policy_of(kind, dtype, sharpness)
    assert is_packing_taken(policy)
    backbone = wrong(policy.base.get_decoder())
    monkeypatch.setattr(policy.base, "get_decoder", lambda: backbone)
    assert not is_packing_taken(policy)


def test_random_rounding_moves_a_model_as_far_as_rounding_does(sharpness):
    """In bfloat16, of the same weights in float32, and leaves no trace."""
    kinds = ["llama", "qwen2", "gpt_neox"]
    ratios = []
    for kind in kinds:
        policy = policy_of(kind, torch.bfloat16, sharpness)
        probe, (own, _) = rows_of(policy)
        ids = torch.tensor([probe.prompt + probe.one])
        with torch.no_grad():
            exact = copy.deepcopy(policy.model).float()(input_ids=ids).logits[0]
            assert torch.equal(policy.model(input_ids=ids, use_cache=False).logits[0], own.logits)
        moved = torch.stack([divergence(own.logits, each) for each in own.moved]).mean()
        ratios.append(float(moved / divergence(own.logits, exact).mean()))
    assert all(0.5 < ratio < 4 for ratio in ratios), ratios


def test_infinite_numbers_stay_as_they_are():
    class Mask(nn.Module):
        def forward(self, x):
            return torch.tensor([float("-inf"), torch.finfo(x.dtype).min, 0.0, 1.0], dtype=x.dtype)

    with random_rounding(mask := Mask(), torch.bfloat16):
        out = mask(torch.zeros(1, dtype=torch.bfloat16))
    assert out[:3].tolist() == mask(torch.zeros(1, dtype=torch.bfloat16))[:3].tolist()
    with random_rounding(mask, torch.bfloat16):
        assert mask(torch.zeros(1)).tolist() == mask(torch.zeros(1)).tolist(), "another dtype is not moved"


def test_the_worst_agreement_is_one_that_does_not_agree():
    near, wrong = Agreement(0.09, 0.1), Agreement(0.02, 0.01)
    assert worst(iter([near, wrong])) == wrong and worst(iter([Agreement(0.0, 1.0), near])) == near
    assert not Agreement(float("nan"), 0.1).agrees


def test_each_path_is_told_with_its_figures():
    said = []
    probes.choose_paths(policy_of("mistral_window", torch.bfloat16, 3.0, said=said), ROLLOUTS)
    assert any("a window is shorter than 28 tokens: no native engine, plain rows" in line for line in said)
    said.clear()
    probes.choose_paths(policy_of("gpt_neox", torch.float32, 3.0, said=said), ROLLOUTS)
    assert any("the native engine serves llama, mistral, " in line and "not gpt_neox" in line for line in said)
    said.clear()
    probes.choose_paths(policy_of("llama", torch.bfloat16, 3.0, said=said), ROLLOUTS)
    told = [line for line in said if " nats from this model's own numbers, rounding explains " in line]
    assert [line.partition(":")[0] for line in told] == ["packed rows", "the native engine"]
    assert all(line.endswith(": taken") for line in told)
