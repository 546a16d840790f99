"""What averaging several vectors means: the plain mean, CenteredClip, or the user's own function.

    CenteredClip    v <- v + mean_j (x_j - v) min(1, tau / |x_j - v|), 20 times or less, from the coordinates' median

Source: Karimireddy, He, Jaggi (arXiv 2012.10333), used as in BTARD (arXiv 2106.11257).

`averaging.reducer = "pkg.mod:fn"` names a function of the user's own, which replaces the mean:

    fn(own [n], others [k, n]) -> [n]        float32, on the CPU; k = 1 in pairs, else one for each other member

It sees others' values after they were found finite, and were clipped and gated if that is on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor

from swarm_node.averaging.robust import cache_parts, distance, square
from swarm_node.config.plugins import load_function, plugin_error
from swarm_node.errors import UserError

ITERATIONS = 20
STILL = 1e-4  # iterations end when the centre moves by less than this part of tau

Reducer = Callable[[Tensor, Tensor], Tensor]


def find_reducer(name: str) -> Reducer | None:
    """The user's function that `averaging.reducer` names, if any. Raises UserError if it cannot be loaded."""
    if ":" not in name:
        return None
    function = load_function(name, "averaging.reducer")

    def reduce(own: Tensor, others: Tensor) -> Tensor:
        try:
            mean = function(own.clone(), others)
        except Exception as error:  # the user's code may raise anything
            raise plugin_error(f"averaging.reducer {name!r} failed", error) from error
        if not isinstance(mean, Tensor) or mean.shape != own.shape or not bool(torch.isfinite(mean).all()):
            raise UserError(f"averaging.reducer {name!r} must return {len(own)} finite values, a tensor")
        return mean.float()

    return reduce


def clipped_mean(vectors: Sequence[Tensor], clip: float) -> Tensor:
    """CenteredClip of several finite vectors [n], with tau = `clip` times their median distance from the coordinate
    median. The plain mean if `clip` is 0. Of two vectors neither can be outvoted."""
    if not clip:
        return torch.stack(tuple(vectors)).mean(0)
    middle = coordinate_median(vectors)
    return centred_clip(vectors, clip * median(distance(x, middle) for x in vectors), middle)


def centred_clip(vectors: Sequence[Tensor], tau: float, middle: Tensor) -> Tensor:
    """CenteredClip of several finite vectors [n]: none pulls by more than `tau`. It iterates from `middle`, in place,
    until that hardly moves."""
    for _ in range(ITERATIONS):
        pulls = [min(1.0, tau / max(distance(x, middle), 1e-300)) / len(vectors) for x in vectors]
        moved = 0.0
        for v, *parts in cache_parts(middle, *vectors):
            move = torch.zeros_like(v, dtype=torch.float64)
            for pull, x in zip(pulls, parts, strict=True):
                move += pull * (x.double() - v)
            v.copy_(v + move)
            moved += square(move)
        if moved <= (STILL * tau) ** 2:
            break
    return middle


def coordinate_median(vectors: Sequence[Tensor]) -> Tensor:
    middle = torch.empty_like(vectors[0])
    below, above = (len(vectors) - 1) // 2, len(vectors) // 2
    for v, *parts in cache_parts(middle, *vectors):
        ordered = torch.stack(parts).sort(0).values
        v.copy_(0.5 * ordered[below] + 0.5 * ordered[above])
    return middle
