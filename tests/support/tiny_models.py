"""Tiny random models of several architectures, saved in Hugging Face layout."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from swarm_node.policy.starter import build_tokenizer

SIZES = dict(
    vocab_size=384,
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    initializer_range=0.3,  # far from uniform, so that a wrong mask or position shows
)
GROUPED = dict(SIZES, num_key_value_heads=2)
MAKERS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**GROUPED, tie_word_embeddings=True)),
    "llama_bias": lambda: LlamaForCausalLM(LlamaConfig(**GROUPED, attention_bias=True, mlp_bias=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**GROUPED)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**GROUPED, head_dim=16)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**GROUPED, sliding_window=None)),
    "mistral_window": lambda: MistralForCausalLM(MistralConfig(**GROUPED, sliding_window=8)),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**GROUPED, head_dim=12, final_logit_softcapping=30.0, sliding_window=64)
    ),
}


def make(kind: str, seed: int = 0) -> PreTrainedModel:
    """A tiny model with random weights, biases included."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = MAKERS[kind]()
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(p, std=0.3)
    return model.eval()


def save(kind: str, out: Path, chat: bool = True, seed: int = 0) -> Path:
    """A tiny model and tokenizer in Hugging Face layout."""
    make(kind, seed).save_pretrained(out)
    tokenizer = build_tokenizer(["what is one plus two", "how many bits are there"] * 8)
    if not chat:
        tokenizer.chat_template = None
    tokenizer.save_pretrained(out)
    return out
