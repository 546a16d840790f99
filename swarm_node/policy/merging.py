"""Merge an adapter into its base: one ordinary model, for programs that know no adapters.

    base + adapter, loaded once  ->  each layer's weight becomes W + scale * B A, in place  ->  a transformers model

Layers in 4 or 8 bits are dequantised one at a time: what was trained over rounded weights is merged into those, so
the answers stay the same. Embedding and head of a base that ties them stay one matrix unless the adapter changes one
of them alone. A few tokens are scored before and after.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import Counter
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from swarm_node.config import PolicyConfig
from swarm_node.errors import UserError
from swarm_node.policy import vetting
from swarm_node.policy.architecture import largest
from swarm_node.policy.loading import Plan, model_file, prepare, weight_map
from swarm_node.policy.packed import is_packed, plain_weight
from swarm_node.policy.policy import Policy

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # safetensors' name -> torch's
SCORED = 24  # tokens that are scored before and after
TOLERANCE = 1e-3
"""Most nats, weighted by probability, by which log-probabilities may differ in float32."""
COARSE = 0.2  # the same in a dtype of 16 bits: rounding moves those of a real model by 0.06 to 0.09
GIB = 2**30


def dtype_of_base(config: PolicyConfig) -> str | None:
    """The number format of most values in the base's files; None if all weights are trained. UserError if the base
    cannot be merged into."""
    plan = prepare(config.model_copy(update={"dtype": "float32", "device": "cpu"}))
    if not plan.lora:
        return None
    if getattr(plan.config, "quantization_config", None) is not None:
        raise UserError(
            f"{plan.base} is quantised in its files, and what is merged into it would be rounded: export the adapter "
            "(without --merged), and give --base the same model with whole weights"
        )
    values = Counter[str]()
    for name in sorted(set(weight_map(plan).values())):
        if (file := model_file(plan, name)) is not None:
            names = vetting.check_header(file)
            with safe_open(file, "pt") as tensors:
                for tensor in map(tensors.get_slice, names):
                    values[DTYPES.get(tensor.get_dtype(), "float32")] += math.prod(tensor.get_shape())
    return values.most_common(1)[0][0] if values else "float32"


def check_room_to_merge(plan: Plan, dtype: torch.dtype, out: Path, available: float, free: float) -> None:
    """Raise UserError unless the model, merged in `dtype`, fits into `available` bytes of memory (0 = not known) and
    `free` bytes of disk."""
    size = plan.size * dtype.itemsize
    less = "" if dtype.itemsize == 2 else ", or give --dtype bfloat16, which takes half"
    text = plan.config.get_text_config()
    beside = 12 * largest(text, "vocab_size", 1) * largest(text, "hidden_size", 1)  # a matrix, its change and their sum
    needed = max(size, plan.size * plan.dtype.itemsize) + beside
    if available and needed > available:
        raise UserError(
            f"merging takes about {needed / GIB:.1f} GiB of memory, and {available / GIB:.1f} are free: end "
            f"other programs{less}; without --merged the adapter alone is written"
        )
    if size > free:
        raise UserError(
            f"no room at {out} for a model of {size / GIB:.1f} GiB: {free / GIB:.1f} are free; choose another "
            f"directory{less}"
        )


@torch.no_grad()
def merged_model(policy: Policy, dtype: torch.dtype) -> PreTrainedModel:
    """The model of `policy` with its adapter merged in, in `dtype`. The policy cannot be used any more. UserError if
    the merged model gives other probabilities."""
    before, before_dtype = _scores(policy.model), policy.dtype
    _untie(policy.base)
    _unpack(policy.base, dtype)
    with warnings.catch_warnings():
        for told in ("Model with .tie_word_embeddings=True", "Input and output embeddings are no longer tied"):
            warnings.filterwarnings("ignore", told)  # `_untie` does what PEFT advises
        model = policy.model.merge_and_unload().to(dtype)
    _tell_tied(model)
    difference = (before.exp() * (before - _scores(model)).abs()).sum(-1).mean().item()
    if not difference <= (TOLERANCE if before_dtype == dtype == torch.float32 else COARSE):
        raise UserError(
            f"the merged model gives other probabilities than base and adapter ({difference:.2g} nats): export without "
            "--merged, or with --dtype float32"
        )
    return model


def _scores(model: nn.Module) -> Tensor:
    """Log-probabilities [SCORED, vocabulary] of a model on some tokens."""
    vocabulary, device = model.get_input_embeddings().weight.shape[0], model.get_input_embeddings().weight.device
    ids = (torch.arange(1, SCORED + 1, device=device) * 97) % vocabulary
    return model(input_ids=ids[None]).logits[0].float().log_softmax(-1)


def _plain(module: nn.Module) -> nn.Module:
    """The base's own module under what PEFT put around it."""
    return getattr(module, "base_layer", None) or getattr(module, "original_module", None) or module


def _untie(base: PreTrainedModel) -> None:
    """Give the head a matrix of its own, if it has the embedding's and an adapter changes one of both in place."""
    from peft.tuners.lora import LoraLayer

    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    if head is None or _plain(head).weight is not _plain(embedding).weight:
        return
    if isinstance(embedding, LoraLayer) or isinstance(head, LoraLayer):
        _plain(head).weight = nn.Parameter(_plain(head).weight.clone(), requires_grad=False)


def _tell_tied(model: PreTrainedModel) -> None:
    """Have the config say whether embedding and head are one matrix."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is not None and head.weight is not embedding.weight:
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False


def _unpack(base: PreTrainedModel, dtype: torch.dtype) -> None:
    """Replace linear layers in 4 or 8 bits by plain ones in `dtype`, with their adapters merged in."""
    packed = [
        name
        for name, m in base.named_modules()
        if isinstance(getattr(m, "weight", None), Tensor) and is_packed(m.weight)
    ]
    for name in sorted({name.removesuffix(".base_layer") for name in packed}):
        module = base.get_submodule(name)
        own = _plain(module)
        weight = plain_weight(own).float()
        for adapter in getattr(module, "active_adapters", ()):
            weight += module.get_delta_weight(adapter)
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=own.bias is not None, device="meta")
        linear.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
        if own.bias is not None:
            linear.bias = nn.Parameter(own.bias.detach().to(dtype), requires_grad=False)
        base.set_submodule(name, linear)
    if packed:
        _forget_quantiser(base)


def _forget_quantiser(base: PreTrainedModel) -> None:
    """Have transformers save the model as one that never was quantised."""
    base.config = copy.copy(base.config)
    del base.config.quantization_config
    base.hf_quantizer = None
    base.quantization_method = None
    base.is_loaded_in_4bit = base.is_loaded_in_8bit = False
