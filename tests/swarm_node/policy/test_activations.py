"""What a forward pass keeps for its backward pass, measured, computed and made less."""

from __future__ import annotations

import gc

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from swarm_node.config import PolicyConfig
from swarm_node.grpo.memory import shape_of
from swarm_node.policy.activations import kept_bytes, measured, row
from swarm_node.policy.checkpointing import Checkpointing
from swarm_node.policy.logprobs import token_logprobs
from swarm_node.policy.policy import Policy
from swarm_node.policy.starter import build_tokenizer

SIZES = dict(
    vocab_size=400,
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def policy_of(
    family: str, lora: bool, dtype: torch.dtype = torch.float32, packing: bool = True, **sizes: int
) -> Policy:
    config, model = FAMILIES[family]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        base: PreTrainedModel = model(config(**SIZES | sizes, head_dim=16)).to(dtype)
        made: nn.Module = base
        if lora:
            made = get_peft_model(base, LoraConfig(r=16, target_modules="all-linear"))
            for name, p in made.named_parameters():
                if ".lora_" in name:
                    p.data = nn.init.normal_(p.data.float(), std=0.05)
    policy = Policy(made.eval(), build_tokenizer(["a b"] * 8), PolicyConfig())
    policy.packing, policy.split_head = packing, True
    return policy


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("packing", [False, True])
def test_short_rows_tell_of_long_ones_exactly(lora: bool, packing: bool) -> None:
    policy = policy_of("llama", lora, packing=packing)
    assert measured(policy).of(201, 201, False) == kept_bytes(policy, 201)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("lora", "dtype"), [(False, torch.float32), (True, torch.float32), (True, torch.bfloat16)], ids=str
)
def test_the_shape_alone_tells_nearly_the_same(family: str, lora: bool, dtype: torch.dtype) -> None:
    policy = policy_of(family, lora, dtype)
    mine, computed = measured(policy), shape_of(policy).activations
    for checkpointing in (False, True):
        found, expected = (each.of(2000, 500, checkpointing) for each in (mine, computed))
        assert found == pytest.approx(expected, rel=0.1 if checkpointing else 0.05)


def live_tensors(width: int) -> int:
    """Live tensors with hidden states of this width: threads of other tests may make and free others meanwhile."""
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) and width in each.shape for each in gc.get_objects())


@pytest.mark.parametrize("lora", [False, True])
def test_measuring_leaves_no_trace(lora: bool) -> None:
    width = 92  # no other test has it
    policy = policy_of("qwen2", lora, hidden_size=width)
    before, fingerprint = torch.get_rng_state(), policy.fingerprint
    tensors = live_tensors(width)
    measured(policy)
    assert live_tensors(width) == tensors > 0, "all that was kept is freed"
    assert torch.equal(torch.get_rng_state(), before) and policy.fingerprint == fingerprint
    assert all(p.grad is None for p in policy.model.parameters())
    assert not any(module.training for module in policy.model.modules())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lora", [False, True])
def test_checkpointing_makes_equal_gradients_in_less_memory(family: str, lora: bool) -> None:
    def gradients(policy: Policy) -> dict[str, torch.Tensor]:
        ((_, logprobs, _),) = policy.passes([row(policy, 40)], 1.0)
        logprobs.sum().backward()
        return {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}

    policy = policy_of(family, lora)
    plain, before = gradients(policy), torch.get_rng_state()
    policy.model.zero_grad()
    policy.checkpointing = Checkpointing(policy.model)
    checkpointed = gradients(policy)
    assert plain.keys() == checkpointed.keys() and len(plain) == len(policy.trainable_parameters())
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(module.training for module in policy.model.modules())
    assert kept_bytes(policy, 40, policy.checkpointing) < kept_bytes(policy, 40) / 4


def test_layers_that_drop_are_not_checkpointed() -> None:
    """OPT's layers drop by themselves in training mode, and draw random numbers for that."""
    sizes = dict(hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=32)

    batch, before = row(policy_of("llama", False, packing=False), 5), torch.get_rng_state()
    for dropout in (0.0, 0.5):
        config = OPTConfig(vocab_size=100, max_position_embeddings=64, dropout=dropout, **sizes)
        with torch.random.fork_rng():
            model = OPTForCausalLM(config).eval()
        assert Checkpointing(model).agrees(model, batch, True) == (dropout == 0.0)
        once = token_logprobs(model, batch, 1.0, full_logits=True)[0]
        assert torch.equal(once, token_logprobs(model, batch, 1.0, full_logits=True)[0]), "dropout is off again"
    assert torch.equal(torch.get_rng_state(), before), "global random numbers stay"


def test_layers_with_another_result_the_second_time_are_not_checkpointed() -> None:
    """The log-probabilities are equal: only gradients show what is computed again."""
    policy = policy_of("llama", False)
    mlp = policy.model.model.layers[0].mlp
    own, calls = mlp.forward, []

    def changing(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return own(x * (2.0 if len(calls) > 2 else 1.0))

    mlp.forward = changing
    assert not Checkpointing(policy.model).agrees(policy.model, row(policy, 5), False)
    assert len(calls) == 3 and all(p.grad is None for p in policy.model.parameters())


def test_layers_that_fail_are_not_checkpointed() -> None:
    policy = policy_of("llama", False)
    layer = policy.model.model.layers[0]
    own = layer.mlp.forward

    def failing(x: torch.Tensor) -> torch.Tensor:
        if layer.training:
            raise RuntimeError("not in training mode")
        return own(x)

    layer.mlp.forward = failing
    assert not Checkpointing(policy.model).agrees(policy.model, row(policy, 5), False)
    assert not any(module.training for module in policy.model.modules())


def test_a_model_without_such_layers_is_not_checkpointed() -> None:
    policy = policy_of("llama", False)
    assert not Checkpointing(nn.Linear(2, 2)).agrees(policy.model, row(policy, 5), False)
