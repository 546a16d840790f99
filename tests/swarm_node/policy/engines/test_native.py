"""The native engine against the model's own forward pass, and against the fallback engine."""

from __future__ import annotations

import copy
from typing import get_args

import pytest
import torch
from peft import LoraConfig, get_peft_model

from swarm_node.policy.engines import native as decode
from swarm_node.policy.engines.base import sample, uniforms
from swarm_node.policy.engines.native import NativeEngine, Rows, Slice
from swarm_node.policy.engines.products import Layout, Name
from swarm_node.policy.engines.transformers import ModelSlice, TransformersEngine
from swarm_node.types import Sampling
from tests.support.layouts import skip_if_missing
from tests.support.tiny_models import make

PROMPTS = [[5, 9, 200, 31], [7], [40, 41, 42, 43, 44, 45, 46, 47, 300], [17, 18]]
EOS = list(range(2, 384, 30))
OFTEN = list(range(2, 384, 8))
"""So many that rows end, and are moved, all the time."""
LAYOUTS = get_args(Name)
NATIVE = ["llama", "llama_bias", "qwen2", "qwen3", "mistral"]


def engine(model, eos, layout):
    """A native engine with that layout, whatever is best here."""
    skip_if_missing(layout)
    native = NativeEngine(model, eos, 0)
    native.layout = Layout(layout, "")
    return native


def full_logprobs(model, prompt, tokens, sampling):
    """Log-probabilities of `tokens` by one full forward pass over prompt and completion."""
    logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits / sampling.temperature, -1)
    if sampling.top_p < 1:
        probs, order = logprobs.exp().sort(descending=True)
        probs[probs.cumsum(-1) - probs >= sampling.top_p] = 0
        probs = torch.zeros_like(probs).scatter(1, order, probs)
        logprobs = (probs / probs.sum(-1, keepdim=True)).log()
    return logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]


@torch.no_grad()
@pytest.mark.parametrize("kind", NATIVE)
@pytest.mark.parametrize("sampling", [Sampling(20), Sampling(20, temperature=0.7, top_p=0.8)])
def test_recorded_logprobs_equal_a_full_forward_pass(kind, sampling):
    model = make(kind)
    uniform = uniforms([1, 2, 3, 4], 5, sampling.max_new_tokens)
    samples = NativeEngine(model, EOS, 0).decode(PROMPTS, 5, sampling, uniform, tuple)
    lengths = {len(tokens) for tokens, _, _ in samples}
    assert len(lengths) > 2  # rows ended at different steps, so rows were dropped and moved
    for i, (tokens, logprobs, finished) in enumerate(samples):
        expected = full_logprobs(model, PROMPTS[i // 5], tokens, sampling)
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=0)
        assert finished == (tokens[-1] in EOS)
        assert not set(tokens[:-1]) & set(EOS)
        assert finished or len(tokens) == sampling.max_new_tokens


@torch.no_grad()
def test_samples_do_not_depend_on_padding_or_batch():
    model, sampling = make("llama"), Sampling(16)
    together = NativeEngine(model, EOS, 0).decode(PROMPTS, 4, sampling, uniforms([1, 2, 3, 4], 4, 16), tuple)
    for i, prompt in enumerate(PROMPTS):
        alone = NativeEngine(model, EOS, 0).decode([prompt], 4, sampling, uniforms([i + 1], 4, 16), tuple)
        for (tokens, logprobs, _), (own_tokens, own_logprobs, _) in zip(
            together[4 * i : 4 * i + 4], alone, strict=True
        ):
            assert tokens == own_tokens
            torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(own_logprobs), atol=1e-4, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_both_engines_make_the_same_samples(kind):
    model, sampling = make(kind), Sampling(12, temperature=0.9, top_p=0.95)
    model.generation_config.repetition_penalty = 5.0  # a model's own taste must not bend the distribution
    model.generation_config.top_k = 2
    model.generation_config.suppress_tokens = list(range(100, 200))
    model.generation_config.min_new_tokens = 12
    uniform = uniforms([1, 2, 3, 4], 3, 12)
    native = NativeEngine(model, EOS, 0).decode(PROMPTS, 3, sampling, uniform, tuple)
    fallback = TransformersEngine(model, EOS, 0).decode(PROMPTS, 3, sampling, uniform, tuple)
    assert [s[0] for s in native] == [s[0] for s in fallback]
    assert [s[2] for s in native] == [s[2] for s in fallback]
    for (_, ours, _), (_, theirs, _) in zip(native, fallback, strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), atol=1e-4, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_adapter_is_part_of_what_is_sampled(layout):
    model = get_peft_model(make("qwen2"), LoraConfig(r=4, target_modules="all-linear"))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.3)
    samples = engine(model, EOS, layout).decode(PROMPTS, 2, Sampling(10), uniforms([1, 2, 3, 4], 2, 10), tuple)
    for i, (tokens, logprobs, _) in enumerate(samples):
        expected = full_logprobs(model, PROMPTS[i // 2], tokens, Sampling(10))
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=0)


def backbone_of(model, layer):
    """A backbone of this layer alone, without its final norm."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[layer : layer + 1]
    backbone = type(model)(config).eval().get_decoder()
    backbone.layers[0].load_state_dict(model.get_decoder().layers[layer].state_dict())
    setattr(backbone, "final_layer_norm" if hasattr(backbone, "final_layer_norm") else "norm", torch.nn.Identity())
    return backbone


@torch.inference_mode()
def generate_in_slices(slices, embed, head, prompts, n, sampling, uniform, eos):
    """What `Decoder.generate` does, over several slices; the samples, and how often rows were moved."""
    lengths, limit = [len(p) for p in prompts], sampling.max_new_tokens
    caches = [part.cache(lengths, n, limit) for part in slices]
    rows, moves = Rows(len(prompts), n, limit, torch.device("cpu")), 0
    x = embed(decode.padded(prompts))
    for cache in caches:
        x = cache.prefill(x)
        assert x.isfinite().all()
    x = decode.last_of(x, lengths).repeat_interleave(n, 0)
    for step in range(limit):
        token, logprob = sample(head(x), uniform[rows.origin.flatten(), step], sampling)
        if rows.record(step, token, logprob, torch.tensor(eos)):
            if not rows.live.any():
                break
            width = rows.live.shape[1]
            kept = rows.compact()
            if kept is not None:
                moves += 1
                token = decode.picked(token, width, *kept)
                for cache in caches:
                    cache.pick(*kept)
        if step < limit - 1:
            x = embed(token)
            for cache in caches:
                x = cache.forward(x, step)
    return rows.samples(), moves


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", NATIVE)
def test_layers_in_two_places_make_equal_samples(kind, layout):
    skip_if_missing(layout)
    model, sampling = make(kind), Sampling(20)
    uniform = uniforms([1, 2, 3, 4], 5, 20)
    embed = model.get_input_embeddings()
    slices = [Slice(backbone_of(model, i), layout) for i in range(2)]
    head = decode.head_of(model.model.norm, model.lm_head, layout)
    samples, moves = generate_in_slices(slices, embed, head, PROMPTS, 5, sampling, uniform, OFTEN)
    assert moves > 1
    assert samples == engine(model, OFTEN, layout).decode(PROMPTS, 5, sampling, uniform, tuple)


@pytest.mark.parametrize("kind", ["gpt_neox", "qwen3", "mistral_window"])
def test_slices_of_any_architecture_make_equal_samples(kind):
    model, sampling = make(kind), Sampling(16, temperature=0.9)
    backbone = model.get_decoder()
    uniform = uniforms([1, 2, 3, 4], 5, 16)
    norm, head = getattr(backbone, "final_layer_norm", None) or backbone.norm, model.get_output_embeddings()
    slices = [ModelSlice(backbone_of(model, i)) for i in range(2)]
    embed = model.get_input_embeddings()
    ours, moves = generate_in_slices(slices, embed, lambda x: head(norm(x)), PROMPTS, 5, sampling, uniform, OFTEN)
    assert moves > 1
    theirs = TransformersEngine(model, OFTEN, 0).decode(PROMPTS, 5, sampling, uniform, tuple)
    assert [(s[0], s[2]) for s in ours] == [(s[0], s[2]) for s in theirs]
    for (_, our_logprobs, _), (_, their_logprobs, _) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(torch.tensor(our_logprobs), torch.tensor(their_logprobs), atol=1e-4, rtol=0)


def test_rows_that_end_leave_the_grid():
    """Two prompts, three samples each; token 9 ends one. Worked out by hand."""
    rows, eos = Rows(2, 3, 4, torch.device("cpu")), torch.tensor([9])
    number = torch.arange(6.0)
    assert not rows.record(0, torch.tensor([1, 2, 3, 4, 5, 6]), -number, eos)
    assert rows.record(1, torch.tensor([9, 2, 3, 4, 5, 6]), -number, eos)
    assert rows.compact() is None  # the widest prompt still has all of its samples
    token = torch.tensor([7, 2, 3, 9, 5, 6])
    assert rows.record(2, token, -number, eos)
    alive, column = rows.compact()
    assert alive.tolist() == [0, 1] and column.tolist() == [[1, 2], [1, 2]]
    assert decode.picked(token, 3, alive, column).tolist() == [2, 3, 5, 6]
    assert rows.origin.tolist() == [[1, 2], [4, 5]] and rows.live.all()
    assert rows.record(3, torch.tensor([9, 9, 5, 6]), torch.full((4,), -8.0), eos)
    assert rows.compact()[0].tolist() == [1] and rows.origin.tolist() == [[4, 5]]
    assert rows.samples() == [
        ([1, 9], [0.0, 0.0], True),
        ([2, 2, 2, 9], [-1.0, -1.0, -1.0, -8.0], True),
        ([3, 3, 3, 9], [-2.0, -2.0, -2.0, -8.0], True),
        ([4, 4, 9], [-3.0, -3.0, -3.0], True),
        ([5, 5, 5, 5], [-4.0, -4.0, -4.0, -8.0], False),
        ([6, 6, 6, 6], [-5.0, -5.0, -5.0, -8.0], False),
    ]


def test_draws_follow_the_distribution():
    """Chi-square of 40,000 draws over 6 tokens: far below the 99.99 % point for 5 degrees of freedom, 25.7."""
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0, 0.5, float("-inf"), -3.0]])
    uniform = torch.rand(40_000, generator=torch.Generator().manual_seed(0))
    token, logprob = sample(logits.expand(40_000, -1), uniform, Sampling(1))
    expected = 40_000 * logits.softmax(-1)[0]
    counts = torch.bincount(token, minlength=7).float()
    assert counts[5] == 0
    keep = expected > 0
    assert ((counts - expected)[keep] ** 2 / expected[keep]).sum() < 25.7
    torch.testing.assert_close(logprob, logits.log_softmax(-1)[0][token])


@pytest.mark.parametrize("edge", [0.0, 1.0 - 2**-24])
def test_interval_ends_give_only_possible_tokens(edge):
    logits = torch.full((1, 5), float("-inf"))
    logits[0, 1:4] = 0.0
    token, _ = sample(logits, torch.tensor([edge]), Sampling(1))
    assert token.item() in (1, 2, 3)


def test_nucleus_keeps_the_smallest_sufficient_set():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()[None].expand(1000, -1)
    uniform = torch.linspace(0, 0.999, 1000)
    token, logprob = sample(logits, uniform, Sampling(1, top_p=0.8))
    assert set(token.tolist()) == {0, 1}
    torch.testing.assert_close(logprob[token == 0].exp().mean().item(), 0.625, atol=1e-5, rtol=0)
