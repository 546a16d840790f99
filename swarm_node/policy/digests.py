"""Weights in a few bytes: digests by which models are compared."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn


def digest(model: nn.Module, adapters: bool, exact: bool = False) -> str:
    """Fingerprint of a model: names, shapes and a few hundred values of every tensor, with or without its adapters.

    Unless they are to be `exact`, values are rounded to bfloat16 first, so that loading in float32 or bfloat16 makes no
    difference. Cheap enough for every start; it tells models apart, it does not authenticate them.
    """
    return model_digest(lines(model.named_parameters(), adapters, exact))


def lines(named: Iterable[tuple[str, Tensor]], adapters: bool, exact: bool = False) -> dict[str, str]:
    """The parts of `digest`: a hash of each tensor, by its name in the model without an adapter around it. The hashes
    of all parts of a model are together those of the whole."""
    shapes, parts = {}, []
    for name, tensor in named:
        of_adapter = is_of_adapter(name)  # of those of experts, one is around the other, and their names say it
        if adapters or not of_adapter:
            name = name.removeprefix("base_model.model.")
            shapes[name if of_adapter else name.replace(".base_layer", "")] = tuple(tensor.shape)
            values = some_of(tensor)
            parts.append((values if exact else values.bfloat16()).float())
    if not parts:
        return {}
    values = torch.cat(parts).cpu()  # one wait for a GPU, not one a tensor
    hashes = {}
    for (name, shape), part in zip(shapes.items(), values.split([len(part) for part in parts]), strict=True):
        line = hashlib.sha256(f"{name} {shape}".encode())
        line.update(part.numpy().tobytes())
        hashes[name] = line.hexdigest()
    return hashes


def is_of_adapter(name: str) -> bool:
    """Whether a parameter of that name belongs to a LoRA adapter."""
    return ".lora_" in name


def model_digest(hashes: Mapping[str, str]) -> str:
    """The digest of a model with these `lines`, in whatever order they come."""
    return hashlib.sha256("\n".join(f"{name} {line}" for name, line in sorted(hashes.items())).encode()).hexdigest()


def some_of(tensor: Tensor) -> Tensor:
    """A few hundred values of the tensor."""
    return tensor.detach().flatten()[:: max(1, tensor.numel() // 256)]
