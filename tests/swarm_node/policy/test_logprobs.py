"""Packed rows, plain rows, chunked heads and full logits against the model's own forward pass."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from swarm_node.grpo.batch import Row, flatten, plan, token_batch
from swarm_node.policy import logprobs
from swarm_node.policy.logprobs import TokenBatch, additive, logits_bytes, token_logprobs
from tests.support.tiny_models import make

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it

PROMPTS = [[5, 17, 9, 33], [8, 6]]
COMPLETIONS = [[[7, 300, 12, 2], [44, 2]], [[19, 20, 21], [2], [31, 32, 33, 34, 35, 2]]]
TEMPERATURE = 0.7


def batch(packing: bool) -> TokenBatch:
    groups = [Row(PROMPTS[0], COMPLETIONS[0], 0), Row(PROMPTS[1], COMPLETIONS[1], 2)]
    (rows,) = plan(groups, packing, limit=1000, hidden=48)
    return token_batch(rows, flatten(groups), 0, torch.device("cpu"))


def one_by_one(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [N], each completion on its own through the model's own forward pass."""
    chosen, entropies = [], []
    for prompt, completions in zip(PROMPTS, COMPLETIONS, strict=True):
        for completion in completions:
            logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
            distribution = torch.distributions.Categorical(logits=logits / TEMPERATURE)
            chosen.append(distribution.log_prob(torch.tensor(completion)))
            entropies.append(distribution.entropy())
    return torch.cat(chosen), torch.cat(entropies)


def in_order(batch: TokenBatch, values: Tensor) -> Tensor:
    return torch.zeros_like(values).index_copy(0, batch.index, values)


def adapted(kind: str, targets: list[str]) -> nn.Module:
    """A model with a LoRA adapter that is not zero."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = get_peft_model(make(kind), LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    return model.eval()


def gradients(loss: Tensor, model: nn.Module) -> list[Tensor]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return list(torch.autograd.grad(loss, trained))


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("kind", ["llama", "llama_bias", "qwen2", "qwen3", "gpt_neox"])
def test_values_and_gradients_are_the_models_own(kind, packing):
    model, b = make(kind), batch(packing)
    expected, entropies = one_by_one(model)
    actual, entropy = token_logprobs(model, b, TEMPERATURE, entropy=True)
    torch.testing.assert_close(in_order(b, actual), expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(in_order(b, entropy), entropies, atol=2e-5, rtol=0)
    assert not entropy.requires_grad

    weight = torch.randn(len(expected), generator=torch.Generator().manual_seed(0))
    pairs = zip(
        gradients((in_order(b, actual) * weight).sum(), model),
        gradients((expected * weight).sum(), model),
        strict=True,
    )
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "plain"])
def test_full_logits_serve_models_that_cap_them(packing):
    model, b = make("gemma2"), batch(packing)
    expected, _ = one_by_one(model)
    capped, _ = token_logprobs(model, b, TEMPERATURE, full_logits=True)
    torch.testing.assert_close(in_order(b, capped), expected, atol=2e-5, rtol=0)
    assert (token_logprobs(model, b, TEMPERATURE)[0] - capped).abs().max() > 0.1


@pytest.mark.parametrize("targets", [["q_proj", "up_proj"], ["q_proj", "lm_head"]], ids=["body", "body and head"])
@pytest.mark.parametrize("tokens_a_chunk", [None, 3])
def test_an_adapter_counts_and_can_be_switched_off(monkeypatch, targets, tokens_a_chunk):
    if tokens_a_chunk:
        monkeypatch.setattr(logprobs, "LOGITS_BYTES", 4 * 384 * tokens_a_chunk)
    model, b = adapted("qwen2", targets), batch(packing=True)
    expected, _ = one_by_one(model)
    actual = in_order(b, token_logprobs(model, b, TEMPERATURE)[0])
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=0)
    for ours, theirs in zip(gradients(actual.sum(), model), gradients(expected.sum(), model), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    with model.disable_adapter(), torch.no_grad():
        base = in_order(b, token_logprobs(model, b, TEMPERATURE)[0])
    torch.testing.assert_close(base, one_by_one(make("qwen2"))[0], atol=2e-5, rtol=0)


@pytest.mark.parametrize("tokens_a_chunk", [1, 5, 16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chunked_head_equals_a_whole_one(monkeypatch, tokens_a_chunk, bias, dtype):
    model, b = make("llama"), batch(packing=True)
    if bias:
        model.lm_head.bias = nn.Parameter(torch.linspace(-1, 1, 384))
    model.to(dtype)
    results = []
    for size in (10_000, tokens_a_chunk):
        monkeypatch.setattr(logprobs, "LOGITS_BYTES", 4 * 384 * size)
        values, entropy = token_logprobs(model, b, TEMPERATURE, entropy=True)
        assert not entropy.requires_grad
        weight = torch.linspace(-1, 1, len(values))
        results.append([values, entropy, *gradients((values * weight).sum(), model)])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for whole, chunked in zip(*results, strict=True):
        assert whole.dtype == chunked.dtype
        assert (whole - chunked).abs().max() <= tolerance * whole.abs().max().clamp(min=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_for_a_gpu_changes_no_number(monkeypatch, dtype):
    model, b = make("qwen2").to(dtype), batch(packing=True)
    results = []
    for multiple in (1, 8):
        monkeypatch.setitem(logprobs.MASK_MULTIPLES, "cpu", multiple)
        mask = additive(b.attention_mask, dtype)
        assert mask.shape == b.attention_mask.shape
        assert all(stride % multiple == 0 for stride in mask.stride()[:-1])
        assert torch.equal(mask == 0, b.attention_mask)
        values, _ = token_logprobs(model, b, TEMPERATURE)
        results.append([values, *gradients(values.sum(), model)])
    assert mask.stride(-2) > mask.shape[-1]
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("free", "held", "used", "limit", "chunk"),
    [
        (40.0, 0.0, 0.0, 1.0, 512),
        (4.0, 0.0, 0.0, 1.0, 256),
        (0.25, 5.75, 2.0, 1.0, 256),  # what torch holds for later tensors counts
        (70.0, 6.0, 6.0, 0.1, 128),  # of the 8 GiB that the process may take
        (0.125, 7.0, 7.0, 1.0, 64),
    ],
)
def test_chunks_follow_the_memory_of_a_gpu(monkeypatch, free, held, used, limit, chunk):
    told = {
        "mem_get_info": (free * 2**30, 80 * 2**30),
        "memory_reserved": held * 2**30,
        "memory_allocated": used * 2**30,
        "get_per_process_memory_fraction": limit,
    }
    for name, value in told.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert logits_bytes(torch.device("cuda")) == chunk * 2**20
    assert logits_bytes(torch.device("cpu")) == logprobs.LOGITS_BYTES


VOCABULARY, HIDDEN = 384, 48


class Logits(TorchDispatchMode):
    """Notes the most rows of logits, [.., VOCABULARY], that an operator makes while it is in use."""

    most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.shape[-1:] == (VOCABULARY,) and tensor.shape[0] != HIDDEN:
                self.most = max(self.most, tensor.numel() // VOCABULARY)  # a head's weights have HIDDEN rows
        return made


@pytest.mark.parametrize("head", ["plain", "adapted"])
def test_a_large_vocabulary_never_has_all_logits(monkeypatch, head):
    """Of 16 tokens, those of one chunk at a time; autograd keeps none."""
    model = make("llama") if head == "plain" else adapted("qwen2", ["lm_head"])
    b, chunk = batch(packing=True), 3
    monkeypatch.setattr(logprobs, "LOGITS_BYTES", 4 * VOCABULARY * chunk)
    kept: list[torch.Size] = []
    with Logits() as logits, saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        token_logprobs(model, b, TEMPERATURE, entropy=True)[0].sum().backward()
    assert logits.most == chunk < len(b.target)
    assert kept and not [shape for shape in kept if shape[-1:] == (VOCABULARY,) and shape[0] != HIDDEN]
