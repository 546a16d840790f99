"""Weights in 4 or 8 bits as bitsandbytes holds them: their size, and their values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

PACKED = "Params4bit", "Int8Params"  # types of bitsandbytes' weights


def is_packed(weight: Tensor) -> bool:
    """Whether a weight is in 4 or 8 bits."""
    return type(weight).__name__ in PACKED


def values_of(weight: Tensor) -> int:
    """Number of values of a weight, however it is stored."""
    state = getattr(weight, "quant_state", None)
    return weight.numel() if state is None else math.prod(state.shape)


def held_bytes(weights: Iterable[Tensor]) -> int:
    """Bytes that weights take, with the scales of those in 4 or 8 bits."""
    return sum(tensor.nbytes for weight in weights for tensor in (weight, *_scales(weight)))


def _scales(weight: Tensor) -> Iterator[Tensor]:
    state = getattr(weight, "quant_state", None)
    if state is not None:
        yield state.absmax
        if state.nested:
            yield state.state2.absmax
    elif isinstance(scales := getattr(weight, "SCB", None), Tensor):
        yield scales


@torch.no_grad()
def plain_weight(module: nn.Module) -> Tensor:
    """The weight [out, in] of a linear module; a dequantised copy, if it is in 4 or 8 bits."""
    weight = module.weight
    if not is_packed(weight):
        return weight
    from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant

    if (state := getattr(weight, "quant_state", None)) is not None:
        return dequantize_4bit(weight.data, state)
    scales = module.state.SCB if module.state.SCB is not None else weight.SCB
    return int8_vectorwise_dequant(weight.data, scales)
