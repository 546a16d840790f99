"""Whether a policy's numbers are finite: its weights, and the logits that it makes of a few tokens.

A value that is NaN or infinite spreads to every answer, and from there to every update: nothing is trained with it, and
nothing of it is saved.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from swarm_node.errors import UserError


class NotFinite(UserError):
    """Weights or logits of a policy are not finite."""


def first_broken(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """Name of the first tensor with a value that is not finite; None if there is none. Quantised ones are left out."""
    some = {n: t.detach() for n, t in named if t.is_floating_point() and t.itemsize > 1 and t.numel()}
    if not some:
        return None
    ends = [torch.stack(tensor.aminmax()).float() for tensor in some.values()]  # NaN if one value is
    finite = torch.stack(ends).isfinite().all(-1).tolist()  # one wait for a GPU
    return next((name for name, is_finite in zip(some, finite, strict=True) if not is_finite), None)


def is_finite(numbers: Iterable[float]) -> bool:
    """Whether all numbers are finite, as long as they are of like size."""
    return math.isfinite(sum(numbers))


def check_weights(named: Iterable[tuple[str, Tensor]], source: str) -> None:
    """Raise NotFinite if a weight of the model that its user calls `source` is not finite."""
    if (name := first_broken(named)) is not None:
        raise NotFinite(
            f"{source} has broken weights: {name} has values that are not finite (the first such tensor); download or "
            "save the model again, or take another one"
        )


def check_logits(source: str, dtype: torch.dtype, logits: Tensor) -> None:
    """Raise NotFinite if `logits` are not finite, of the model that its user calls `source`, with finite weights."""
    if not torch.isfinite(logits).all():
        narrow = dtype == torch.float16
        remedy = "set policy.dtype = float32, since float16 ends at 65,504" if narrow else "take another model"
        raise NotFinite(f"{source} makes numbers that are not finite of finite weights: {remedy}")


def check_updated(trained: Mapping[str, Tensor]) -> None:
    """Raise NotFinite if training has left a weight that is not finite."""
    if (name := first_broken(trained.items())) is not None:
        raise spoiled(f"{name} has values that are")


def spoiled(what: str) -> NotFinite:
    """The error about a policy of which `what` is not finite after training."""
    return NotFinite(f"training has spoiled the policy: {what} not finite; lower grpo.learning_rate")
