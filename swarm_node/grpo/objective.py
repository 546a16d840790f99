"""The objective, as one sum over all completion tokens of the step:

    L = sum_t  w_t * ( f_t * l_t + beta * kl_t )

    l_t, w_t                                            the loss (`losses`)
    f_t                                                 the off-policy correction (`corrections`)
    kl_t = (exp(d) - d - 1) * rho                       k3, off-policy corrected; d = logprob_ref - logprob
    rho  = exp(logprob - logprob_old)                   of the token, or exp of its mean over the rollout

The weights w_t count *all* rollouts of the step, also those that are not computed because their advantage is zero.
So leaving these out, or splitting the step into microbatches, changes nothing. Sources: docs/grpo.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swarm_node.config import GrpoConfig
from swarm_node.grpo.corrections import Correction, find_correction
from swarm_node.grpo.losses import Loss, Tokens, find_loss
from swarm_node.grpo.losses.base import mean_by_sequence


def clip_range(config: GrpoConfig, loss: Loss | None = None) -> tuple[float, float]:
    """Lower and upper epsilon: those of the configuration, else those of the loss's paper."""
    low, high = (loss or find_loss(config.loss)).clip
    return (
        low if config.epsilon_low is None else config.epsilon_low,
        high if config.epsilon_high is None else config.epsilon_high,
    )


def sequence_weights(lengths: Tensor, config: GrpoConfig, max_new_tokens: int, loss: Loss | None = None) -> Tensor:
    """Weight [B] of each token of each rollout of the step; `lengths` [B] in tokens, 0 = masked out."""
    return (loss or find_loss(config.loss)).weights(lengths, max_new_tokens)


def policy_loss(
    logprobs: Tensor,
    old: Tensor,
    sequence: Tensor,
    advantages: Tensor,
    weights: Tensor,
    config: GrpoConfig,
    reference: Tensor | None = None,
    sampled: Tensor | None = None,
    foreign: Tensor | None = None,
    importance_ratio: Tensor | None = None,
    loss: Loss | None = None,
    correction: Correction | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The share of the objective that these N tokens have, and sums over them for the metrics.

    logprobs, old     [N]; all tokens of a rollout must be here together
    sequence          [N] points into `advantages` and `weights` [B]
    reference         [N] reference log-probs, needed for `beta` > 0
    sampled           [N] log-probs recorded by the sampler, NaN where there are none; not given: `old`
    foreign           [N] whether a peer sampled the token; not given: none
    importance_ratio  [N] scales each token's loss (not its KL term): another sampler than the policy
    loss, correction  those that `config` names, if the caller has looked them up before
    """
    loss = loss or find_loss(config.loss)
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
    for factor in ((correction or find_correction(config)).factor(tokens), importance_ratio):
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
