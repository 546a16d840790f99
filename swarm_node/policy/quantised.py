"""Weights in 4 or 8 bits, by bitsandbytes. They are frozen: an adapter in float32 is all that such a policy trains.

    nf4    4 bits a weight, one scale for 64 of them, and the scales in 8 bits (QLoRA, arXiv 2305.14314)
    int8   8 bits a weight, one scale for each output

Linear layers are quantised while they are loaded; embedding, norms and head keep the policy's dtype. For a product,
weights are dequantised to that dtype, so memory is saved and not time.

bitsandbytes has two ways of its own that are switched off here (`settle`), since a policy stays in evaluation mode:
- on CPUs with bfloat16 instructions (AVX-512) it packs NF4 weights anew at the first product without a gradient. No
  gradient passes through such a layer from then on, and nothing says so;
- its int8 product of evaluation rounds activations to 8 bits as well. Its product of training for CPUs does not; a GPU
  has no other than the first one. That of training keeps its inputs, which only a gradient of the weights would need:
  they are let go.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from swarm_node.errors import UserError
from swarm_node.policy.digests import lines
from swarm_node.policy.oom import return_freed_memory
from swarm_node.policy.packed import is_packed

KIND = "quantised"
"""Name in the lines of a digest under which the way of quantising stands. No tensor has it: their names have dots."""


def check_quantisable(kind: str, base: str, model_config: Any, device: torch.device) -> None:
    """Raise UserError if the weights of this model cannot be quantised on this device."""
    if getattr(model_config, "quantization_config", None) is not None:
        raise UserError(f"{base} is quantised already: leave out --quantize (policy.quantize)")
    if device.type not in ("cpu", "cuda"):
        raise UserError(
            f"--quantize {kind} is for CPUs and NVIDIA GPUs: what bitsandbytes computes with on {device.type} is code "
            "that it fetches from the hub; leave it out, or set policy.device = cpu"
        )


def loading_options(kind: str | None, dtype: torch.dtype, device: torch.device) -> dict[str, object]:
    """Options of `from_pretrained` that quantise a model while it is loaded; none without a `kind`."""
    if kind is None:
        return {}
    from transformers import BitsAndBytesConfig

    settings = (
        BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
        if kind == "nf4"
        else BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)  # above 0, rows of a batch affect each other
    )
    return {"quantization_config": settings, "device_map": {"": str(device)}}


def settle(model: nn.Module) -> None:
    """Have all products of a loaded model, in evaluation mode, computed with gradients and with whole activations; give
    back what quantising it took."""
    if not any(map(is_packed, model.parameters())):
        return
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False
        elif isinstance(module, Linear8bitLt) and module.weight.device.type == "cpu":
            module.training = True  # affects nothing but the choice of the product
            module.register_forward_hook(_without_input)
    for p in model.parameters():
        if not is_packed(p) and p.device.type == "cpu":
            p.data = p.data.clone()  # it lies in the mapped file, all of which stays in memory for it
    return_freed_memory()


def _without_input(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    """Have the backward pass of bitsandbytes' int8 product let go of its input."""
    if hasattr(output.grad_fn, "A"):
        output.grad_fn.A = None


def linear_values(model: nn.Module) -> int:
    """Weights of a model that are quantised if it is: those of linear layers, without the head."""
    head = model.get_output_embeddings()
    return sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear) and m is not head)


def original_lines(files: Iterable[Path], names: Collection[str], kind: str) -> dict[str, str]:
    """`lines` of a model as it lies in its files, and one of how it was quantised: digests of them are equal on all
    machines that quantise the same model alike, whatever rounding does to the quantised values.

    names   the model's own tensors; all tensors of the files count if these have other names
    """
    found: dict[str, str] = {}
    opened = [safe_open(file, "pt") for file in files]
    there = {name for file in opened for name in file.keys()}
    wanted = set(names) if there >= set(names) else there
    for file in opened:  # mapped, not read: a few hundred values of each tensor are
        for name in file.keys():
            if name in wanted:
                found |= lines([(name, file.get_tensor(name))], adapters=True)
    return {**found, KIND: kind}
