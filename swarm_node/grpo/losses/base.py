"""The port of a loss, what it sees of a step, and the parts that several losses share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """N completion tokens of a step, laid end to end; all tokens of a rollout are there. Tensors are [N]."""

    logprobs: Tensor  # log-probabilities under the policy that is trained, with a gradient
    old: Tensor  # log-probabilities that ratios are taken to
    sampled: Tensor  # log-probabilities that the sampler recorded; NaN where there are none
    foreign: Tensor  # whether a peer sampled the token
    ratio: Tensor  # exp(logprobs - old) of the token, or of its mean over the rollout; with a gradient
    advantage: Tensor
    sequence: Tensor  # number of the rollout that the token belongs to
    rollouts: int  # rollouts of the step: numbers are below it
    low: float  # lower clip range
    high: float  # upper clip range
    delta: float | None  # bound on the ratio where the advantage is negative; None = none


class Loss:
    """A policy-gradient loss: l_t of each token, and the weight w_t of the token in the sum (see `objective`)."""

    level: Literal["token", "sequence"] = "token"
    """What has one ratio: a token, or a whole rollout (the geometric mean of its tokens' ratios)."""
    clip: tuple[float, float] = (0.2, 0.28)  # lower and upper clip range if the configuration sets none

    def surrogate(self, tokens: Tokens) -> Tensor:
        """l_t [N], with a gradient."""
        raise NotImplementedError

    def weights(self, lengths: Tensor, max_new_tokens: int) -> Tensor:
        """w_t [B] of the tokens of each rollout; `lengths` [B] in tokens, 0 = left out of the loss."""
        raise NotImplementedError

    def highest(self, high: float) -> float:
        """Ratio above which a token with a positive advantage counts as clipped."""
        return 1 + high

    def metrics(self, low: float, high: float, count: float) -> dict[str, float]:
        """Metrics of clipping: of `count` tokens (or rollouts), `low` and `high` were clipped."""
        return {
            "clip_ratio/low_mean": low / count,
            "clip_ratio/high_mean": high / count,
            "clip_ratio/region_mean": (low + high) / count,
        }


def clipped(tokens: Tokens) -> Tensor:
    """PPO's clipped surrogate [N], -min(min(ratio, delta) A, clip(ratio, 1 - low, 1 + high) A): arXiv 1707.06347."""
    capped = tokens.ratio if tokens.delta is None else tokens.ratio.clamp(max=tokens.delta)
    inside = tokens.ratio.clamp(1 - tokens.low, 1 + tokens.high)
    return -torch.min(capped * tokens.advantage, inside * tokens.advantage)


def mean_of_sequences(lengths: Tensor) -> Tensor:
    """Weights [B] with which every rollout counts the same: 1 / (B |y|)."""
    return 1.0 / (lengths.clamp(min=1) * len(lengths))


def mean_of_tokens(lengths: Tensor) -> Tensor:
    """Weights [B] with which every token counts the same: 1 / sum |y|."""
    return torch.full(lengths.shape, 1.0 / max(1, int(lengths.sum())))


def mean_by_sequence(x: Tensor, sequence: Tensor, rollouts: int) -> Tensor:
    """For each token [N] the mean of `x` [N] over the tokens of its rollout."""
    total = x.new_zeros(rollouts).index_add(0, sequence, x)
    return total[sequence] / torch.bincount(sequence, minlength=rollouts)[sequence]
