"""A lost stage made anew from its neighbours, without a checkpoint: CheckFree and its rivals (arXiv 2506.15461).

    between two stages   W = (w_before W_before + w_after W_after) / (w_before + w_after)
    at an end            W = that of the one neighbour                                    (CheckFree+)

w is the norm of a stage's gradient in its last update, before anything clipped it. The reference implementation takes
the norm of the clipped gradient: wherever both neighbours were clipped that is 1 and 1, hence the plain mean.
The copy at an end is worth having only if the neighbour learned to stand there, that is, if odd microbatches run the
first two and the last two stages in swapped order. Whatever made a stage anew, its optimiser starts anew too, and it
learns a little faster than the others from then on (`RATE`).

A stage is its tensors by name, whatever number its layers begin with. Layer l of the lost stage is made of layer l of
each neighbour; where a neighbour has m layers and the lost stage n, of its layer floor((l + 1/2) m / n). Only tensors
of layers are made: embedding, final norm and head have no like in a neighbour, who keeps a copy of them instead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

RATE = 1.1
"""Times the learning rate, for a stage that was made of its neighbours; does not compound."""
SPREAD = 0.02
"""Standard deviation of fresh matrices."""
_LAYER = re.compile(r"(.*\blayers\.)(\d+)(\..+)")


@dataclass(frozen=True)
class Neighbour:
    """A stage next to the lost one."""

    tensors: Mapping[str, Tensor]
    """By name; those that belong to no layer are ignored."""
    norm: float = 1.0
    """Of its last gradient, before clipping."""


Method = Callable[..., dict[str, Tensor]]
"""(stage before, stage after, layers of the lost stage, number of the first of them) -> its tensors, new ones;
ValueError without any neighbour."""


def checkfree(before: Neighbour | None, after: Neighbour | None, layers: int, first: int = 0) -> dict[str, Tensor]:
    """Mean of the neighbours by the norms of their gradients; the copy of the only one at an end."""
    if before is None or after is None:
        return copied(before, after, layers, first)
    return _mean(before, after, layers, first, share(before.norm, after.norm))


def uniform(before: Neighbour | None, after: Neighbour | None, layers: int, first: int = 0) -> dict[str, Tensor]:
    """Plain mean of the neighbours; the copy of the only one at an end."""
    if before is None or after is None:
        return copied(before, after, layers, first)
    return _mean(before, after, layers, first, 0.5)


def copied(before: Neighbour | None, after: Neighbour | None, layers: int, first: int = 0) -> dict[str, Tensor]:
    """Copy of the stage before, or of the one after if there is none before."""
    neighbour = before or after
    if neighbour is None:
        raise ValueError("a stage without neighbours cannot be rebuilt")
    return {name: tensor.detach().clone() for name, tensor in stretched(neighbour.tensors, layers, first).items()}


def random(
    before: Neighbour | None,
    after: Neighbour | None,
    layers: int,
    first: int = 0,
    rng: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """As a model begins: matrices normal, weights of norms 1, biases 0; adapters as the layer without them."""
    return {name: _fresh(name, tensor, rng) for name, tensor in copied(before, after, layers, first).items()}


METHODS: Mapping[str, Method] = {"checkfree": checkfree, "uniform": uniform, "copy": copied, "random": random}


def share(before: float, after: float) -> float:
    """Weight of the stage before, the other's being the rest; 1/2 if the norms do not say anything: both zero, or one
    negative, infinite or not a number."""
    largest = max(before, after)
    if not (math.isfinite(before) and math.isfinite(after)) or min(before, after) < 0 or largest == 0:
        return 0.5
    return (before / largest) / (before / largest + after / largest)  # their sum might overflow


def gradient_norm(gradients: Iterable[Tensor]) -> float:
    """Root of the sum of all squares; to be taken before clipping."""
    return float(torch.nn.utils.get_total_norm(list(gradients)))


def stretched(tensors: Mapping[str, Tensor], layers: int, first: int = 0) -> dict[str, Tensor]:
    """Tensors of `layers` layers from `first` on, each that of the layer of `tensors` at the same relative depth; not
    copies."""
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


def _mean(before: Neighbour, after: Neighbour, layers: int, first: int, weight: float) -> dict[str, Tensor]:
    """`weight` of the stage before, in float32 whatever the tensors are in."""
    one, other = stretched(before.tensors, layers, first), stretched(after.tensors, layers, first)
    if one.keys() != other.keys() or any(one[name].shape != other[name].shape for name in one):
        raise ValueError("the layers of the two neighbours do not have the same names and shapes")
    if weight in (0.0, 1.0):  # so that a weight of nothing is nothing, whatever it would be multiplied with
        return {name: tensor.detach().clone() for name, tensor in (one if weight else other).items()}
    return {
        name: (weight * one[name].detach().float() + (1 - weight) * other[name].detach().float()).to(tensor.dtype)
        for name, tensor in one.items()
    }


def _fresh(name: str, like: Tensor, rng: torch.Generator | None) -> Tensor:
    made = torch.empty_like(like)
    if "lora_B" in name or name.endswith("bias"):
        return made.zero_()
    if "lora_A" in name:  # as PEFT does
        return made.uniform_(-1, 1, generator=rng) / math.sqrt(like.shape[1])
    return made.fill_(1.0) if like.ndim == 1 else made.normal_(0.0, SPREAD, generator=rng)
