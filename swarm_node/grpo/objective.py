"""The objective, as one sum over all completion tokens of the step:

    L = sum_t  w_t * ( f_t * l_t + beta * kl_t )

    l_t, w_t                                            the loss: one file each in `losses`
    f_t                                                 the off-policy correction (`corrections`)
    kl_t = (exp(d) - d - 1) * rho                       k3, off-policy corrected; d = logprob_ref - logprob
    rho  = exp(logprob - logprob_old)                   of the token, or exp of its mean over the rollout

The weights w_t count *all* rollouts of the step, also those that are not computed because their advantage is zero.
So leaving these out, or splitting the step into microbatches, changes nothing. Sources: docs/grpo.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from swarm_node.config import GrpoConfig
from swarm_node.errors import UserError


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


def mean_by_sequence(x: Tensor, sequence: Tensor, rollouts: int) -> Tensor:
    """For each token [N] the mean of `x` [N] over the tokens of its rollout."""
    total = x.new_zeros(rollouts).index_add(0, sequence, x)
    return total[sequence] / torch.bincount(sequence, minlength=rollouts)[sequence]


class Loss:
    """A policy-gradient loss: l_t of each token, and the weight w_t of the token in the sum.

    The parts here are PPO's clipped surrogate (arXiv 1707.06347) and a mean over tokens; a loss replaces what differs.
    """

    level: Literal["token", "sequence"] = "token"
    """What has one ratio: a token, or a whole rollout (the geometric mean of its tokens' ratios)."""
    clip: tuple[float, float] = (0.2, 0.28)  # lower and upper clip range if none is set: DAPO's

    def surrogate(self, tokens: Tokens) -> Tensor:
        """l_t [N], with a gradient: -min(min(ratio, delta) A, clip(ratio, 1 - low, 1 + high) A)."""
        capped = tokens.ratio if tokens.delta is None else tokens.ratio.clamp(max=tokens.delta)
        inside = tokens.ratio.clamp(1 - tokens.low, 1 + tokens.high)
        return -torch.min(capped * tokens.advantage, inside * tokens.advantage)

    def weights(self, lengths: Tensor, max_new_tokens: int) -> Tensor:
        """w_t [B] of the tokens of each rollout, 1 / sum |y|; `lengths` [B] in tokens, 0 = left out of the loss."""
        return torch.full(lengths.shape, 1.0 / max(1, int(lengths.sum())))

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


class Correction:
    """How an update treats rollouts that another policy sampled: an older version of this one, or a peer's.

    The parts here correct nothing: every ratio starts at 1.

    `sampled` [N] are the log-probabilities that the sampler recorded, NaN where there are none. Those of a peer are
    the peer's word: nothing proves them.
    """

    def old(self, sampled: Tensor, stale: Tensor, foreign: Tensor) -> Tensor:
        """Log-probabilities [N] that ratios are taken to; NaN = those of the step's first pass, a ratio of 1.

        `stale` [N]: an older version of this policy sampled the token; `foreign` [N]: a peer did.
        """
        return torch.full_like(sampled, torch.nan)

    def factor(self, tokens: Tokens) -> Tensor | None:
        """Factor [N] >= 0 on each token's loss, without a gradient; None = 1. The KL term is not scaled."""
        return None


def clip_range(config: GrpoConfig, loss: Loss) -> tuple[float, float]:
    """Lower and upper epsilon: those of the configuration, else those of the loss's paper."""
    low, high = loss.clip
    return (
        low if config.epsilon_low is None else config.epsilon_low,
        high if config.epsilon_high is None else config.epsilon_high,
    )


def policy_loss(
    logprobs: Tensor,
    old: Tensor,
    sequence: Tensor,
    advantages: Tensor,
    weights: Tensor,
    config: GrpoConfig,
    loss: Loss,
    correction: Correction,
    reference: Tensor | None = None,
    sampled: Tensor | None = None,
    foreign: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The share of the objective that these N tokens have, and sums over them for the metrics.

    UserError if the loss is not one number a token with a gradient.

    logprobs, old     [N]; all tokens of a rollout must be here together
    sequence          [N] points into `advantages` and `weights` [B]
    reference         [N] reference log-probs, needed for `beta` > 0
    sampled           [N] log-probs recorded by the sampler, NaN where there are none; not given: `old`
    foreign           [N] whether a peer sampled the token; not given: none
    """
    low, high = clip_range(config, loss)
    by_sequence = (config.importance_level or loss.level) == "sequence"
    log_ratio = logprobs - old
    if by_sequence:
        log_ratio = mean_by_sequence(log_ratio, sequence, len(advantages))
    ratio, advantage = log_ratio.exp(), advantages[sequence]
    tokens = Tokens(
        logprobs=logprobs,
        old=old,
        sampled=old if sampled is None else sampled,
        foreign=torch.zeros_like(sequence, dtype=torch.bool) if foreign is None else foreign,
        ratio=ratio,
        advantage=advantage,
        sequence=sequence,
        rollouts=len(advantages),
        low=low,
        high=high,
        delta=config.delta,
    )
    total = loss.surrogate(tokens)
    if not isinstance(total, Tensor) or total.shape != logprobs.shape or logprobs.requires_grad > total.requires_grad:
        raise UserError(f"grpo.loss must give a tensor of {list(logprobs.shape)}, one number a token, with a gradient")
    factor = correction.factor(tokens)
    if factor is not None:
        total = total * factor

    with torch.no_grad():
        share = torch.ones_like(logprobs)
        if by_sequence:
            share /= torch.bincount(sequence, minlength=len(advantages))[sequence]
        sums = {
            "clip/count": share.sum(),
            "clip/high": ((ratio > loss.highest(high)) & (advantage > 0)).mul(share).sum(),
            "clip/low": ((ratio < 1 - low) & (advantage < 0)).mul(share).sum(),
        }
    if config.beta:
        assert reference is not None
        d = reference - logprobs
        kl = (d.exp() - d - 1) * ratio
        total = total + config.beta * kl
        sums["kl"] = kl.detach().sum()
    return (total * weights[sequence]).sum(), sums
