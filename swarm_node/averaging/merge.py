"""One merge at the end: weights of several nodes that began with the same model become one model.

    uniform           theta = (1/k) sum_i theta_i
    task arithmetic   tau_i = theta_i - base,    theta = base + lambda sum_i c_i tau_i      (arXiv 2212.04089)
    clipped           c_i = min(1, median_j |tau_j| / |tau_i|), else 1

lambda = 1/k without clipping is the uniform mean; a negative lambda unlearns. With clipping, a node that strayed far
does not outweigh the others.

Both are weighted sums, computed in float64 piece by piece and rounded once to float32. Memory is that of the result
and of a few pieces; the states may be mapped files. Tied weights (names that share their memory in every state) are
merged once and stay tied. A and B of LoRA adapters are merged separately. That differs from the mean of the products
BA, but little if all adapters began with the same A.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

import torch
from torch import Tensor

from swarm_node.errors import UserError

State = dict[str, Tensor]  # name -> tensor

BASE = "the base"  # its name in messages
MERGE_PIECE = 2**20  # values of each state that are merged at a time: 8 MiB in float64


def check_alike(states: Mapping[str, State]) -> None:
    """Raises UserError, with the difference, unless all states have the same names and shapes."""
    first, *others = states
    mine = states[first]
    for other in others:
        theirs = states[other]
        if odd := sorted(mine.keys() ^ theirs.keys()):
            has, lacks = (first, other) if odd[0] in mine else (other, first)
            raise UserError(f"{has} has {odd[0]}, {lacks} does not ({len(odd)} names differ)")
        for name, tensor in mine.items():
            if tensor.shape != theirs[name].shape:
                raise UserError(f"{name} is {list(tensor.shape)} in {first}, {list(theirs[name].shape)} in {other}")


def uniform_mean(states: Mapping[str, State]) -> State:
    """The mean of all states, float32 on the CPU. UserError if names or shapes differ, or values are not finite."""
    check_alike(states)
    return _weighted_sum(states, dict.fromkeys(states, 1.0), len(states))


def task_arithmetic(
    states: Mapping[str, State], base: State, scale: float, factors: Mapping[str, float] | None = None
) -> State:
    """base + scale * sum of factors[i] * (states[i] - base), float32 on the CPU. `factors` as from `clip_factors`,
    otherwise 1. Raises UserError as `uniform_mean`."""
    together = {BASE: base, **states}
    check_alike(together)
    weights = {name: scale * (1.0 if factors is None else factors[name]) for name in states}
    return _weighted_sum(together, {BASE: 1.0 - math.fsum(weights.values()), **weights})


def task_norms(states: Mapping[str, State], base: State) -> dict[str, float]:
    """|theta_i - base| of each state, with tied tensors counted once. Raises UserError as `uniform_mean`."""
    check_alike({BASE: base, **states})
    norms = {}
    for node, state in states.items():
        squares: dict[object, float] = {}
        for name, start in base.items():
            pair = [state[name], start]
            if (memory := _memory(pair)) not in squares:
                both = zip(*map(_pieces, pair), strict=True)
                squares[memory] = sum(float((theirs - ours).square().sum()) for theirs, ours in both)
        norms[node] = math.sqrt(math.fsum(squares.values()))
        if not math.isfinite(norms[node]):
            raise UserError(f"these weights cannot be merged: the weights of {node} are not finite")
    return norms


def clip_factors(norms: Mapping[str, float]) -> dict[str, float]:
    """Factor of each task vector that makes none longer than the median one."""
    middle = median(norms.values())
    return {name: middle / norm if norm > middle else 1.0 for name, norm in norms.items()}


def _weighted_sum(states: Mapping[str, State], weights: Mapping[str, float], over: int = 1) -> State:
    """sum of weights[i] * states[i] / over, in the order of the names: bit for bit the same on every node."""
    nodes = sorted(states)
    merged: State = {}
    done: dict[object, Tensor] = {}
    for name, first in states[nodes[0]].items():
        tensors = [states[node][name] for node in nodes]
        memory = _memory(tensors)
        if memory not in done:
            total = torch.zeros(first.shape, dtype=torch.float32)
            for target, *pieces in zip(total.view(-1).split(MERGE_PIECE), *map(_pieces, tensors), strict=True):
                target.copy_(sum(weights[node] * piece for node, piece in zip(nodes, pieces, strict=True)) / over)
            if not total.isfinite().all():
                whose = [node for node, tensor in zip(nodes, tensors, strict=True) if not tensor.isfinite().all()]
                where = whose[0] if whose else "their sum"
                raise UserError(f"these weights cannot be merged: {name} is not finite in {where}")
            done[memory] = total
        merged[name] = done[memory]
    return merged


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """The values of a tensor in pieces, float64 on the CPU."""
    return (piece.cpu().double() for piece in tensor.detach().reshape(-1).split(MERGE_PIECE))


def _memory(tensors: Sequence[Tensor]) -> object:
    """Equal for tensors that share their memory and read it the same way."""
    return tuple((t.device, t.data_ptr(), t.dtype, t.shape, t.stride()) for t in tensors)
