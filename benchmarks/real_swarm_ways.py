"""Ways to average LoRA adapters of several members with one frozen base, W_i = W + s B_i A_i for each layer.

    apart        A = mean A_i,  B = mean B_i                      FedIT (arXiv 2305.05644), and this package
    factored     B A = best rank-r matrix for mean(B_i A_i)       FlexLoRA (arXiv 2402.11505):  B = U S,  A = V^T
    fitted       A = mean A_i,  B = mean(B_i A_i) A^+             LoRA-FAIR (arXiv 2411.14961), its B in closed form
    frozen       A is never trained,  B = mean B_i                FFA-LoRA (arXiv 2403.12313): exact
    alternating  B and A are trained in turn, from one averaging  RoLoRA (arXiv 2502.01755): exact where all have the
                 to the next; then as `apart`                     same resting factor, as a whole cohort does

B is [out, r], A [r, in], ^+ the pseudoinverse. Exact: the averaged adapter computes mean(B_i A_i). The others differ
from that: `apart` by mean((B_i - B)(A_i - A)), `factored` by what does not fit into rank r, the least that is possible
there. All begin with the same A, as in this package. A member keeps Adam's moments as they are.

Left out, since members must have the same frozen base and exchange adapters alone: FedEx-LoRA (arXiv 2410.09432) adds
what `apart` lacks to the base, which in pairs would become another one for each member; FLoRA (arXiv 2409.05976) stacks
factors and merges them into the base; Fed-SB trains another kind of adapter. FedSA-LoRA (arXiv 2410.01463) keeps each
member's B, so there is no common model. FLoRA-NA and FedRot-LoRA approach what `factored` and `fitted` compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

State = dict[str, Tensor]
"""Name -> tensor of an adapter."""
Mean = Callable[[Sequence[State]], State]
A_PART, B_PART = ".lora_A.", ".lora_B."


def layers(state: State) -> Iterator[tuple[str, str]]:
    """The names of A and B of each layer."""
    return ((name, name.replace(A_PART, B_PART)) for name in sorted(state) if A_PART in name)


def apart(states: Sequence[State]) -> State:
    return {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}


def factored(states: Sequence[State]) -> State:
    mean: State = {}
    for a, b in layers(states[0]):
        mean[b], mean[a] = truncated([state[b] for state in states], [state[a] for state in states])
    return mean


def truncated(bs: Sequence[Tensor], as_: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """B = U S and A = V^T of the best matrix of rank r for mean(B_i A_i), from factors alone: with the stacked
    [B_1 ... B_k] / k = Q R and [A_1; ...; A_k]^T = P T, the mean is Q (R T^T) P^T, and R T^T is only k r wide."""
    rank = len(as_[0])
    q, r = torch.linalg.qr(torch.cat(list(bs), 1) / len(bs))
    p, t = torch.linalg.qr(torch.cat(list(as_)).T)
    u, s, vt = torch.linalg.svd(r @ t.T)
    a = vt[:rank] @ p.T
    largest = a.gather(1, a.abs().argmax(1, keepdim=True))  # its sign is free: without a rule partners would differ
    return q @ u[:, :rank] * (s[:rank] * largest[:, 0].sign()), a * largest.sign()


def fitted(states: Sequence[State]) -> State:
    mean = apart(states)
    for a, b in layers(mean):
        inverse = torch.linalg.pinv(mean[a])
        mean[b] = torch.stack([state[b] @ (state[a] @ inverse) for state in states]).mean(0)
    return mean


@dataclass(frozen=True)
class Way:
    """How members average."""

    mean: Mean
    turns: tuple[str, ...] = (A_PART + B_PART,)
    """Factors trained before the first averaging, before the second and so on, then from the beginning."""
    reducer: str = "mean"
    """`averaging.reducer` for members of a swarm."""

    def trains(self, name: str, averagings: int) -> bool:
        """Whether the tensor of that name is trained after so many averagings."""
        return any(part in name and part in self.turns[averagings % len(self.turns)] for part in (A_PART, B_PART))


WAYS = {
    "apart": Way(apart),
    "factored": Way(factored, reducer=f"{__name__}:factored_values"),
    "fitted": Way(fitted, reducer=f"{__name__}:fitted_values"),
    "frozen": Way(apart, (B_PART,)),
    "alternating": Way(apart, (B_PART, A_PART)),
}


def train_only(model: nn.Module, way: Way, averagings: int) -> None:
    """Let gradients flow to the factors that are trained after so many averagings, and to no other."""
    for name, parameter in model.named_parameters():
        if A_PART in name or B_PART in name:
            parameter.requires_grad_(way.trains(name, averagings))


# --------------------------------------------------------------------- as plugins of a node

SHAPES: dict[str, torch.Size] = {}
"""Of the adapter whose values the functions below get as one vector, in order of names."""


def take_shapes(state: State) -> None:
    SHAPES.clear()
    SHAPES.update((name, state[name].shape) for name in sorted(state))


def _values(mean: Mean, own: Tensor, others: Tensor) -> Tensor:
    states = [_state(each) for each in (own, *others)]
    averaged = mean(states)
    return torch.cat([averaged[name].flatten() for name in SHAPES])


def _state(values: Tensor) -> State:
    parts = values.split([shape.numel() for shape in SHAPES.values()])
    return {name: part.view(shape) for (name, shape), part in zip(SHAPES.items(), parts, strict=True)}


def factored_values(own: Tensor, others: Tensor) -> Tensor:
    """`averaging.reducer`: own [n], others [k, n] -> [n]."""
    return _values(factored, own, others)


def fitted_values(own: Tensor, others: Tensor) -> Tensor:
    """`averaging.reducer`: own [n], others [k, n] -> [n]."""
    return _values(fitted, own, others)
