"""The methods that `recovery` compares: CheckFree, and simpler ways to rebuild a stage from its neighbours."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from swarm_node.pipeline.recovery.checkfree import Neighbour, checkfree

SPREAD = 0.02
"""Standard deviation of fresh matrices."""
Method = Callable[..., dict[str, Tensor]]
"""(stage before, stage after, layers of the lost stage, number of the first of them) -> its tensors, new ones;
ValueError without any neighbour."""


def uniform(before: Neighbour | None, after: Neighbour | None, layers: int, first: int = 0) -> dict[str, Tensor]:
    """Plain mean of the neighbours, or a copy of the only one."""
    equal = [None if neighbour is None else replace(neighbour, norm=1.0) for neighbour in (before, after)]
    return checkfree(equal[0], equal[1], layers, first)


def copied(before: Neighbour | None, after: Neighbour | None, layers: int, first: int = 0) -> dict[str, Tensor]:
    """Copy of the stage before, or of the stage after if there is none before."""
    return checkfree(before or after, None, layers, first)


def random(
    before: Neighbour | None,
    after: Neighbour | None,
    layers: int,
    first: int = 0,
    rng: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """A new stage: matrices are normal, weights of norms 1, biases 0, and adapters have no effect."""
    return {name: _fresh(name, tensor, rng) for name, tensor in copied(before, after, layers, first).items()}


METHODS: Mapping[str, Method] = {"checkfree": checkfree, "uniform": uniform, "copy": copied, "random": random}


def gradient_norm(gradients: Iterable[Tensor]) -> float:
    """Root of the sum of all squares; to be taken before clipping."""
    return float(torch.nn.utils.get_total_norm(list(gradients)))


def _fresh(name: str, like: Tensor, rng: torch.Generator | None) -> Tensor:
    made = torch.empty_like(like)
    if "lora_B" in name or name.endswith("bias"):
        return made.zero_()
    if "lora_A" in name:  # as PEFT does
        return made.uniform_(-1, 1, generator=rng) / math.sqrt(like.shape[1])
    return made.fill_(1.0) if like.ndim == 1 else made.normal_(0.0, SPREAD, generator=rng)
