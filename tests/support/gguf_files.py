"""A tiny model with a tokenizer of its own, as GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 32, 64, 2, 4, 2
TEMPLATE = (
    "{% for message in messages %}<s>{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}</s>{% endif %}"
)
CONTROL, NORMAL = 3, 1  # kinds of words, as llama.cpp numbers them


def words() -> tuple[list[str], list[str]]:
    """Words and merges of a byte-level tokenizer: <s>, </s>, 256 bytes and a few words."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return ["<s>", "</s>", *bytes_to_unicode().values(), "th", "the", "Ġthe"], ["t h", "th e", "Ġ the"]


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """All tensors of a Llama with tied embeddings, by llama.cpp's names, in float32."""
    rng = np.random.default_rng(seed)
    vocabulary, kv = len(words()[0]), HIDDEN * KV_HEADS // HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocabulary, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        block = {
            "attn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (kv, HIDDEN),
            "attn_v": (kv, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
        }
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in block.items()}
    norm = {name: np.ones(shape, np.float32) for name, shape in shapes.items() if "norm" in name}
    return {name: (0.2 * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()} | norm


def write_gguf(
    file: Path,
    kind: Type = Type.Q8_0,
    architecture: str = "llama",
    without: str = "",
    entries: dict[str, Any] | None = None,
    splitting: str = "smollm",
    seed: int = 0,
    layers: int = LAYERS,
    inner: int = INNER,
) -> Path:
    """A GGUF file of the tiny model, matrices in `kind`. `without`: a tensor to leave out; `entries`: more numbers;
    `layers`, `inner`: what the header says of them."""
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens, merges = words()
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitting)
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL] * 2 + [NORMAL] * (len(tokens) - 2))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(1)
    writer.add_chat_template(TEMPLATE)
    for key, value in (entries or {}).items():
        writer.add_uint32(key, value)
    for name, values in tensors(seed).items():
        if name != without:
            as_is = values.ndim == 1
            data = values if as_is else gguf.quantize(values, kind)
            writer.add_tensor(name, data, raw_dtype=Type.F32 if as_is else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
