"""LoRA adapters: which base they belong to, how a new one is made, and its first values."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from swarm_node.config import PolicyConfig
from swarm_node.errors import UserError
from swarm_node.policy.architecture import entry, without_adapter
from swarm_node.policy.vetting import read_json

if TYPE_CHECKING:  # half a second, and one and a half more where bitsandbytes is: loaded where there is an adapter
    from peft import LoraConfig, PeftModel

ALL_LINEAR = "all-linear"


def adapter_base(path: str) -> str | None:
    """Base model of a local LoRA adapter directory; `None` if `path` is not one. A relative path is looked up here, and
    beside the adapter."""
    file = Path(path).expanduser() / "adapter_config.json"
    if not file.is_file():
        return None
    base = read_json(file).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UserError(
            f"{file} does not name its base model: set base_model_name_or_path in it to the directory of the base or "
            "its name on the hub"
        )
    beside = file.parent / base
    return str(beside) if base.startswith(".") and not os.path.isdir(base) and os.path.isdir(beside) else base


def trains_layers(folder: str) -> bool:
    """Whether the adapter saved there trains whole layers (`modules_to_save`) or biases of its base as well."""
    found = json.loads((Path(folder) / "adapter_config.json").read_text())
    return bool(found.get("modules_to_save")) or found.get("bias", "none") != "none"


def lora_config(config: PolicyConfig) -> LoraConfig:
    """The settings of a new adapter."""
    from peft import LoraConfig

    return LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=config.lora_targets,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )


def with_adapter(model: PreTrainedModel, lora: LoraConfig, config: PolicyConfig) -> PeftModel:
    """The model with an adapter around it; only the adapter is trained."""
    from peft import get_peft_model

    if lora.target_modules == ALL_LINEAR and (names := without_adapter(model)):
        lora.exclude_modules = names
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers by a name on its way out
        try:
            return get_peft_model(model, lora)
        except ValueError as exc:
            raise UserError(f"policy.lora_targets {config.lora_targets!r} does not fit this model: {exc}") from exc


ARCHITECTURE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
"""Keys of a config that tell models apart in every version of transformers."""


def start_adapter(named: Mapping[str, nn.Parameter], model_config: Any) -> None:
    """Give a new adapter, or a part of one, its first values, as PEFT does: A Kaiming-uniform, B zero (for embeddings A
    zero, B normal).

    named         its parameters by the names that they have in the whole policy
    model_config  the config of the whole model

    Each tensor is drawn with a seed of its own (its name, its shape, the architecture): equal for all peers with the
    same model, and the same in a stage as in the whole policy.
    """
    text = model_config.get_text_config()
    architecture = json.dumps([entry(text, key) for key in ARCHITECTURE])
    for name, parameter in named.items():
        if ".lora_A." not in name and ".lora_embedding_B." not in name:
            continue
        seed = sha256(f"{name} {tuple(parameter.shape)} {architecture}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(seed[:8], "big") >> 1)
        values = torch.empty(parameter.shape)
        if ".lora_A." in name:
            nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
        else:
            nn.init.normal_(values, generator=generator)
        parameter.data.copy_(values)
