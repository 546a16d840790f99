"""A tiny model of every architecture that transformers can make a causal language model of.

The configuration class says which numbers there are; `SIZES` gives the small ones. Of layers of several kinds (windows,
state spaces, experts), one of each kind is kept. `EXCEPTIONS` has what the rules do not say.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from swarm_node.policy.starter import build_tokenizer

MODEL_TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
WINDOW = 18
"""Longer than the rows that are compared when a model is loaded, and shorter than those of a test: a mask that forgets
the window shows in the test."""
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size", "backbone_hidden_size"), 32),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size"), 48
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    "head_dim": 8,
    "index_topk": 128,
    "keep_window_size": 128,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "vocab_size": 384,
    "n_shared_experts": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,  # far from uniform, so that a wrong mask or position shows
    "init_std": 0.3,
    **dict.fromkeys(("sliding_window", "window_size", "attention_chunk_size", "attention_window_size"), WINDOW),
    **dict.fromkeys(("local_attention", "sliding_window_size", "rel_extent"), WINDOW),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_groups"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank", "hidden_size_per_layer_input", "hc_lowrank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "attention_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "swa_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("linear_num_key_heads", "index_n_heads", "swa_num_key_value_heads", "o_groups"), 2),
    **dict.fromkeys(("linear_num_value_heads", "swa_num_attention_heads", "linear_num_heads"), 4),
    **dict.fromkeys(
        ("shared_expert_intermediate_size", "shared_experts_intermediate_size", "expert_ffn_hidden_size"), 48
    ),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "dense_intermediate_size", "shared_intermediate_size"), 48),
    **dict.fromkeys(("ffn_hidden_size", "intermediate_size_mlp", "dff", "dim_ff", "d_inner"), 48),
    **dict.fromkeys(("mamba_n_heads", "n_mamba_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 8),
    **dict.fromkeys(("index_head_dim", "router_hidden_size", "adapter_rank", "kv_channels"), 16),
    **dict.fromkeys(("vocab_size_per_layer_input", "decoder_vocab_size"), 384),
}
OPTIONAL = {"sliding_window", "attention_chunk_size", "num_experts", "top_k_experts", "moe_intermediate_size"}
"""Parts that are left out where the configuration leaves them out."""
DOTS3 = {
    "num_key_value_heads": 4,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 16,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 8,
}
DRAFT = {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}}
GEMMA_LAYERS = ["sliding_attention", "full_attention"] * 2
QWEN4 = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 128,
    "indexer_compress_ratio": 4,
}
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {
        "encoder_hash_byte_group_vocab": 384,
        "encoder_config": {"hidden_size_global": 32},
        "decoder_config": {"hidden_size_global": 32},
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "cpmant": {"dim_head": 8},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}, "max_seq_len": 256},
    "dots3_note": {
        "text_config": DOTS3,
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "dots3_note_text": DOTS3,
    "emu3": {
        "vocabulary_map": {"<image>": 383, "<|extra_200|>": 382},
        "vq_config": {"base_channels": 32, "channel_multiplier": [1, 1]},
    },
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {"num_hidden_layers": 4, "layer_types": GEMMA_LAYERS, "num_kv_shared_layers": 2},
    "gemma4_assistant": {"text_config": {**DRAFT["text_config"], "num_kv_shared_layers": 0}},
    "gemma4_unified_assistant": {"text_config": {"num_kv_shared_layers": 0}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "qwen4_exp": {"text_config": QWEN4},
    "qwen4_exp_text": QWEN4,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"is_decoder": True, "axial_pos_shape": [16, 16], "axial_pos_embds_dim": [16, 16]},
    "rembert": {"input_embedding_size": 32, "output_embedding_size": 32},
    "roc_bert": {"pronunciation_vocab_size": 384, "shape_vocab_size": 384},
    "xlstm": {"hidden_size": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
"""Model type -> values of its configuration."""


def config_of(model_type: str) -> PreTrainedConfig:
    """The configuration of a tiny model."""
    start = DRAFT if model_type.endswith("assistant") else {}
    return shrunk(CONFIG_MAPPING[model_type](**start), EXCEPTIONS.get(model_type, {}))


def shrunk(config: PreTrainedConfig, exceptions: dict[str, Any]) -> PreTrainedConfig:
    """A configuration of the same class with small numbers."""
    fields = getattr(type(config), "__dataclass_fields__", {})
    values: dict[str, Any] = {}
    layers = _layers(config)
    for name in fields:
        value, own = _value(config, name), exceptions.get(name)
        if isinstance(value, PreTrainedConfig):
            values[name] = shrunk(value, own or {})
        elif own is not None or name in exceptions:
            values[name] = own
        elif name in SIZES:
            if value is not None or name not in OPTIONAL:
                values[name] = SIZES[name]
        elif isinstance(value, (list, tuple)) and layers and len(value) == len(_per_layer(config)):
            values[name] = [value[i] for i in layers]
    if "kv_lora_rank" in fields:  # all heads share the compressed keys
        values["num_key_value_heads"] = exceptions.get("num_key_value_heads", SIZES["num_attention_heads"])
    if layers:
        values |= {name: len(layers) for name in ("num_hidden_layers",) if name in fields and name not in exceptions}
    others = {name: value for name, value in exceptions.items() if name not in fields}
    return type(config)(**values, **others)


def _value(config: PreTrainedConfig, name: str) -> Any:
    """A value of a configuration; of one that differs from layer to layer, the one of most layers."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return vars(config)[name]


def _per_layer(config: PreTrainedConfig) -> range:
    return range(vars(config).get("num_hidden_layers") or 0)


def _layers(config: PreTrainedConfig) -> list[int]:
    """Numbers of layers that are of different kinds, one of each; none if all are of one kind."""
    count = len(_per_layer(config))
    lists = [v for v in vars(config).values() if isinstance(v, (list, tuple)) and len(v) == count and count > 1]
    first: dict[str, int] = {}
    for i in range(count):
        first.setdefault(repr([v[i] for v in lists]), i)
    return sorted(first.values())[:4] if len(first) > 1 else []


def make(model_type: str, seed: int = 0) -> PreTrainedModel:
    """A tiny model with random weights, biases included. Of a model that sees or hears as well, the whole of it."""
    config = config_of(model_type)
    whole = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config) if whole is None else whole(config)
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(p, std=0.3)
    return model.eval()


def causal_class(model_type: str) -> str:
    """Name of the class that transformers makes a causal language model of this type with."""
    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]


def save(model_type: str, out: Path) -> Path:
    """A tiny model and tokenizer in Hugging Face layout; no weights if transformers cannot make the model."""
    build_tokenizer(["what is one plus two", "how many bits are there"] * 8).save_pretrained(out)
    try:
        make(model_type).save_pretrained(out)
    except (ImportError, AttributeError, ValueError):
        config_of(model_type).save_pretrained(out)
        save_file({}, out / "model.safetensors")
    return out
