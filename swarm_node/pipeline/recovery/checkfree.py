"""Rebuild a lost stage from its neighbours, without a checkpoint: CheckFree and CheckFree+ (arXiv 2506.15461).

    between two stages   W = (w_before W_before + w_after W_after) / (w_before + w_after)
    at an end            W = that of the one neighbour                                    (CheckFree+)

w is the norm of a stage's gradient in its last update, before clipping. The reference implementation takes the norm of
the clipped gradient: where both neighbours were clipped, that is 1 and 1, hence the plain mean.
The copy at an end helps only if the neighbour learned to stand there. For that, odd microbatches run the first two and
the last two stages in swapped order. A rebuilt stage begins with a new optimiser, and from then on with a slightly
higher learning rate than the others (`RATE`).

A stage is given as its tensors by name, whatever number its layers begin with. Layer l of the lost stage is made of
layer l of each neighbour; where a neighbour has m layers and the lost stage n, of its layer floor((l + 1/2) m / n).
Only tensors of layers are made. Embedding, final norm and head have no counterpart in a neighbour, which keeps a copy
of them instead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

RATE = 1.1  # factor on the learning rate of a rebuilt stage; being rebuilt twice does not compound it
_LAYER = re.compile(r"(.*\blayers\.)(\d+)(\..+)")


@dataclass(frozen=True)
class Neighbour:
    """A stage next to the lost one."""

    tensors: Mapping[str, Tensor]  # by name; those that belong to no layer are ignored
    norm: float = 1.0  # norm of its last gradient, before clipping


def checkfree(before: Neighbour | None, after: Neighbour | None, layers: int, first: int = 0) -> dict[str, Tensor]:
    """Rebuild a stage of `layers` layers, the first of which is layer `first` of the policy.

    The result is the mean of the neighbours, weighted by their gradient norms, or a copy of the only neighbour. Means
    are computed in float32, whatever the dtype of the tensors is.

    Raises ValueError if there is no neighbour, or if the names or shapes of the two differ.
    """
    sides = [stretched(neighbour.tensors, layers, first) for neighbour in (before, after) if neighbour is not None]
    if not sides:
        raise ValueError("a stage without neighbours cannot be rebuilt")
    one, other = sides[0], sides[-1]
    if one.keys() != other.keys() or any(one[name].shape != other[name].shape for name in one):
        raise ValueError("the layers of the two neighbours do not have the same names and shapes")
    weight = 1.0 if before is None or after is None else share(before.norm, after.norm)
    if weight in (0.0, 1.0):  # a neighbour of weight 0 has no effect, not even if its values are not finite
        return {name: tensor.detach().clone() for name, tensor in (one if weight else other).items()}
    return {
        name: (weight * one[name].detach().float() + (1 - weight) * other[name].detach().float()).to(tensor.dtype)
        for name, tensor in one.items()
    }


def share(before: float, after: float) -> float:
    """The weight of the stage before; the stage after has the rest.

    It is 1/2 if the norms say nothing: both are zero, or one is negative, infinite or not a number."""
    largest = max(before, after)
    if not (math.isfinite(before) and math.isfinite(after)) or min(before, after) < 0 or largest == 0:
        return 0.5
    return (before / largest) / (before / largest + after / largest)  # their sum might overflow


def stretched(tensors: Mapping[str, Tensor], layers: int, first: int = 0) -> dict[str, Tensor]:
    """Tensors of `layers` layers from `first` on, each that of the layer of `tensors` at the same relative depth.

    The tensors are not copied. Raises ValueError if the layers of `tensors` are not contiguous."""
    by_layer: dict[int, dict[tuple[str, str], Tensor]] = {}
    for name, tensor in tensors.items():
        if match := _LAYER.fullmatch(name):
            by_layer.setdefault(int(match[2]), {})[match[1], match[3]] = tensor
    begin = min(by_layer, default=0)
    if not by_layer or set(by_layer) != set(range(begin, begin + len(by_layer))):
        raise ValueError(f"not the tensors of a stage: layers {sorted(by_layer)}")
    made: dict[str, Tensor] = {}
    for layer in range(layers):
        source = by_layer[begin + (2 * layer + 1) * len(by_layer) // (2 * layers)]
        made |= {f"{head}{first + layer}{tail}": tensor for (head, tail), tensor in source.items()}
    return made
