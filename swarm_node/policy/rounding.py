"""Whether another computation of a model's numbers gives the same ones, up to what rounding does to the model itself.

    distance of log-probabilities p (own), q (other):   sum_v p_v |log p_v - log q_v|   nats, the mean over positions

In float32, rounding changes no entry by more than `tolerance`, so the worst entry counts. In types of less precision it
changes entries of small probability by several tenths of a nat in a trained model, and hardly any in one with random
weights. So a model is its own measure there: it is computed again with the output of each of its modules moved at
random by up to half a unit in the last place (Monte Carlo arithmetic). That takes no second copy of the weights, holds
for quantised ones, and moves SmolLM2-135M in bfloat16 1.5 to 2.4 times as far as it is from its float32 numbers.
Another computation may be `FACTOR` times as far off as that.

The limit: rows of a dozen or two tokens are compared. A fault that grows with the position can be as small there as
rounding, and is taken, such as a rotary base half as large (`benchmarks.rounding`). What is known to show later only,
as a window, is read from the model's config instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from swarm_node.policy.policy import Policy

FACTOR = 1.5
"""`benchmarks.rounding`: fast paths of SmolLM2-135M are 0.4 to 0.8 times as far off as itself with random rounding, a
decoder whose rotary base is a tenth as large 2.7 times or more."""
FACTOR_OF_TOKENS = 3.0  # where a dozen tokens stand for whole distributions, their mean may be twice as far off
MOST = 0.25  # nats that are never explained by rounding
DRAWS = 2  # times that a row is computed with random rounding


class Agreement(NamedTuple):
    """How far numbers are from a model's own, and how far rounding may take them, in nats."""

    found: float
    allowed: float

    @property
    def agrees(self) -> bool:
        return self.found <= self.allowed  # not if one of them is NaN

    def __str__(self) -> str:
        return f"{self.found:.2g} nats from this model's own numbers, rounding explains {self.allowed:.2g}"


def worst(found: Iterator[Agreement]) -> Agreement:
    """The first that does not agree, else the one that comes nearest to that."""
    kept = list(found)
    return next((each for each in kept if not each.agrees), max(kept, key=lambda each: each.found / each.allowed))


def tolerance() -> float:
    """Difference of log-probabilities that rounding explains in float32."""
    return 1e-3 if torch.get_float32_matmul_precision() == "highest" else 2e-2


def allowed(moved: float, dtype: torch.dtype, factor: float) -> float:
    """Nats that rounding explains if random rounding in `dtype`, below float32, moves the numbers by `moved`."""
    return min(MOST, factor * moved + torch.finfo(dtype).eps / 2)


@dataclass(frozen=True)
class OwnNumbers:
    """What a model's own forward pass gives for one row of T tokens."""

    logits: Tensor  # [T, V]
    moved: Tensor  # [DRAWS, T, V] with random rounding; [0, T, V] in float32

    @classmethod
    def of(cls, policy: Policy, ids: list[int]) -> OwnNumbers:
        """The numbers of `policy` for a row of tokens."""
        row = torch.tensor([ids], device=policy.device)
        with torch.no_grad():
            logits = policy.model(input_ids=row, use_cache=False).logits[0]
            if policy.dtype == torch.float32:
                return cls(logits, logits.new_empty(0, *logits.shape))
            with random_rounding(policy.model, policy.dtype):
                moved = policy.model(input_ids=row.expand(DRAWS, -1), use_cache=False).logits
        return cls(logits, moved)

    def judge(self, found: Tensor, start: int = 0, stop: int | None = None) -> Agreement:
        """Compare other logits [t, V] with those at the positions from `start` to `stop`."""
        own, moved = self.logits[start:stop], self.moved[:, start:stop]
        if not len(moved):
            return Agreement(float((_log(own) - _log(found)).abs().max()), tolerance())
        by = torch.stack([divergence(own, each) for each in moved]).mean()
        return Agreement(float(divergence(own, found).mean()), allowed(float(by), own.dtype, FACTOR))

    def of_tokens(self, start: int, ids: list[int]) -> tuple[Tensor, Tensor]:
        """Log-probabilities [N] of the N tokens `ids` at the positions from `start` on, and how far random rounding
        moves each [N]."""
        part = slice(start, start + len(ids))
        index = torch.tensor(ids, device=self.logits.device)[:, None]
        own = _log(self.logits[part]).gather(1, index)[:, 0]
        moved = [(_log(each[part]).gather(1, index)[:, 0] - own).abs() for each in self.moved]
        return own, torch.stack(moved).mean(0) if moved else torch.zeros_like(own)


def judge_tokens(
    differences: Tensor, moved: Tensor, dtype: torch.dtype, middle: Callable[[Tensor], Tensor] = torch.mean
) -> Agreement:
    """Compare how far log-probabilities of some tokens are from a model's own with how far random rounding moves them,
    [N] both. Below float32 the `middle` of each counts."""
    if dtype == torch.float32:
        return Agreement(float(differences.max()), tolerance())
    return Agreement(float(middle(differences)), allowed(float(middle(moved)), dtype, FACTOR_OF_TOKENS))


def divergence(own: Tensor, other: Tensor) -> Tensor:
    """Nats [T] by which log-probabilities differ, of logits [T, V], in the mean over what `own` would sample."""
    p = _log(own)
    return (p.exp() * (p - _log(other)).abs()).sum(-1)


@contextmanager
def random_rounding(model: nn.Module, dtype: torch.dtype, seed: int = 0) -> Iterator[None]:
    """Move all outputs of the model's modules in `dtype` at random, by up to half a unit in the last place."""
    half, most = torch.finfo(dtype).eps / 2, torch.finfo(dtype).max / 2
    random: dict[torch.device, torch.Generator] = {}

    def moved(module: nn.Module, inputs: object, output: object) -> Tensor | None:
        if not isinstance(output, Tensor) or output.dtype != dtype:
            return None
        if output.device not in random:
            random[output.device] = torch.Generator(output.device).manual_seed(seed)
        by = torch.empty(output.shape, device=output.device).uniform_(-half, half, generator=random[output.device])
        return torch.where(output.abs() < most, by.add_(1).mul_(output).to(dtype), output)  # a mask has infinite ones

    hooks = [module.register_forward_hook(moved) for module in model.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _log(logits: Tensor) -> Tensor:
    return logits.float().log_softmax(-1)
