"""What is known of a model's architecture beforehand: numbers of its config, and parts that no text goes through."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from swarm_node.policy.sizes import KnownModel
from swarm_node.storage.model_names import model_name

SELECTED = "index_topk", "indexer_budget", "keep_window_size"
"""Keys of a config that say how many tokens are selected to be seen."""
WINDOW = re.compile(r"window(_size|_len)?$|^(attention_chunk_size|local_attention|rel_extent)$")
"""Keys of a config that say how many tokens a layer sees at most."""


def entry(config: Any, name: str, default: Any = None) -> Any:
    """A value of a config; the list of all layers' values, if they differ."""
    try:
        return getattr(config, name, default)
    except RuntimeError:  # transformers refuses to give one value for all
        return [getattr(layer, name, default) for layer in config.per_layer_config]


def largest(config: Any, name: str, default: int) -> int:
    """The number that a config gives under a name, the largest of all layers'; `default` if it gives none."""
    found = entry(config, name)
    return max((n for n in (found if isinstance(found, list | tuple) else [found]) if n), default=default)


def model_of(name: str, parameters: int, config: Any) -> KnownModel:
    """The model that a config describes, as far as it is like a Llama: for estimates of memory."""
    text = config.get_text_config()
    hidden = largest(text, "hidden_size", 1)
    heads = largest(text, "num_attention_heads", 1)  # none in a model that is a state space throughout
    return KnownModel(
        model_name(name),
        parameters,
        layers=largest(text, "num_hidden_layers", 1),
        hidden=hidden,
        inner=largest(text, "intermediate_size", 4 * hidden),
        heads=heads,
        kv_heads=largest(text, "num_key_value_heads", heads),
        head=largest(text, "head_dim", max(1, hidden // heads)),
        vocabulary=largest(text, "vocab_size", 1),
        normed=str(text.model_type).startswith("qwen3"),
    )


def is_windowed(text_config: Any, longest: int) -> bool:
    """Whether some layer of a model does not see all of a row of `longest` tokens."""
    names = [name for name in text_config.to_dict() if WINDOW.search(name) or name in SELECTED]
    if not entry(text_config, "use_sliding_window", True):
        names = [name for name in names if name != "sliding_window"]
    return any(n < longest for n in _numbers(text_config, names))


def selected(text_config: Any) -> int | None:
    """The number of tokens above which a layer selects those that it sees; None if none does."""
    return min(_numbers(text_config, SELECTED), default=None)


def _numbers(config: Any, names: Iterable[str]) -> list[int]:
    """All positive numbers that a config gives under these names."""
    found = [entry(config, name) for name in names]
    return [n for each in found for n in (each if isinstance(each, list) else [each]) if isinstance(n, int) and n > 0]


def beside_text(model: PreTrainedModel) -> frozenset[str]:
    """Names of the parameters of a model that no text goes through, such as those of a tower for images."""
    if model.config.get_text_config() is model.config or (decoder := model.get_decoder()) is model:
        return frozenset()
    parts = decoder, model.get_input_embeddings(), model.get_output_embeddings()
    text = {id(p) for part in parts if part is not None for p in part.parameters()}
    return frozenset(name for name, p in model.named_parameters() if id(p) not in text)


def without_adapter(model: PreTrainedModel) -> list[str]:
    """Names of the linear modules of a model that get no adapter where "all linear" ones shall have one:

    - those beside the text;
    - those whose output is not that of a linear module, such as routers of experts that give two tensors;
    - the last one of a state space of Mamba's kind: kernels take its weight and leave its adapter out.
    """
    names, beside = [], beside_text(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            if f"{name}.weight" in beside or not _is_linear(module):
                names.append(name)
        elif all(hasattr(module, part) for part in ("conv1d", "D", "out_proj")):
            names.append(f"{name}.out_proj")
    return names


@torch.no_grad()
def _is_linear(module: nn.Linear) -> bool:
    """Whether the output has the form of a linear module's, if its class computes it by itself."""
    kind = type(module)
    if kind.forward is nn.Linear.forward or kind.__module__.startswith("bitsandbytes"):
        return True
    weight = module.weight
    try:
        found = module(torch.zeros(1, 1, module.in_features, dtype=weight.dtype, device=weight.device))
    except (RuntimeError, ValueError, TypeError, IndexError):  # it wants another input
        return False
    return isinstance(found, Tensor) and found.shape == (1, 1, module.out_features)
