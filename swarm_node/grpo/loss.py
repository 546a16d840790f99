"""The objective, as one sum over all completion tokens of the step:

    L = sum_t  w_t * ( l_t + beta * kl_t )

    l_t  = -min( min(rho, delta) * A, clip(rho, 1 - low, 1 + high) * A )      grpo dr_grpo dapo gspo
    l_t  = -stop_gradient(min(rho, high)) * A * logprob_t                      cispo
    kl_t = (exp(d) - d - 1) * rho,   d = logprob_ref - logprob                 k3, off-policy corrected

    rho  = exp(logprob - logprob_old) of the token, or exp of its mean over the sequence (gspo)

    w_t  = 1 / (B |y|)     grpo gspo       every sequence counts the same
           1 / (B L_max)   dr_grpo         a constant
           1 / sum |y|     dapo cispo      every token counts the same; so for a loss of the user's own

B, |y| and the sum run over *all* rollouts of the step, also those that are not computed because their
advantage is zero; so leaving these out, or splitting the step into microbatches, changes nothing. Sources:
docs/grpo.md.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from swarm_node.config import GrpoConfig
from swarm_node.config.plugins import describe, load_function
from swarm_node.errors import UserError
from swarm_node.policy.oom import is_out_of_memory

OutsideLoss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(logprobs [N], old [N], advantage of each token [N], sequence of each token [N]) -> l_t [N], which is weighed and
masked like those above."""


def find_loss(name: str) -> OutsideLoss | None:
    """The loss that `grpo.loss` names if it is outside code, else `None`. UserError if that cannot be loaded."""
    return _checked(load_function(name, "grpo.loss")) if ":" in name else None


def _checked(function: OutsideLoss) -> OutsideLoss:
    """`function`, the user's own; UserError if it fails or breaks its contract. Memory that runs out is the
    caller's."""

    def checked(logprobs: Tensor, old: Tensor, advantage: Tensor, sequence: Tensor) -> Tensor:
        try:
            loss = function(logprobs, old, advantage, sequence)
        except Exception as error:  # the user's code may raise anything
            if is_out_of_memory(error):
                raise
            raise UserError(f"grpo.loss failed: {describe(error)}") from error
        if not isinstance(loss, Tensor) or loss.shape != logprobs.shape or not loss.requires_grad:
            raise UserError(
                f"grpo.loss must give a tensor of {list(logprobs.shape)}, one number a token, with a gradient"
            )
        return loss

    return checked


def clip_range(config: GrpoConfig) -> tuple[float, float]:
    """Lower and upper epsilon: those of the configuration, else those of the loss's paper."""
    low, high = {"gspo": (3e-4, 4e-4), "cispo": (0.2, 5.0)}.get(config.loss, (0.2, 0.28))
    return (
        low if config.epsilon_low is None else config.epsilon_low,
        high if config.epsilon_high is None else config.epsilon_high,
    )


def importance_level(config: GrpoConfig) -> str:
    """`token` or `sequence`."""
    return config.importance_level or ("sequence" if config.loss == "gspo" else "token")


def sequence_weights(lengths: Tensor, config: GrpoConfig, max_new_tokens: int) -> Tensor:
    """Weight [B] of each token of each rollout of the step; `lengths` [B] in tokens, 0 = masked out."""
    if config.loss in ("grpo", "gspo"):
        return 1.0 / (lengths.clamp(min=1) * len(lengths))
    if config.loss == "dr_grpo":
        return torch.full(lengths.shape, 1.0 / (len(lengths) * max_new_tokens))
    return torch.full(lengths.shape, 1.0 / max(1, int(lengths.sum())))


def policy_loss(
    logprobs: Tensor,
    old: Tensor,
    sequence: Tensor,
    advantages: Tensor,
    weights: Tensor,
    config: GrpoConfig,
    reference: Tensor | None = None,
    sampled: Tensor | None = None,
    importance_ratio: Tensor | None = None,
    outside: OutsideLoss | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The share of the loss that these N tokens have, and sums over them for the metrics.

    `logprobs` and `old` [N]; `sequence` [N] points into `advantages` and `weights` [B]; all tokens of a
    sequence must be here together. `reference` [N]: reference log-probs, needed for `beta` > 0. `sampled`
    [N]: log-probs at sampling time for `off_policy_mask`, `old` if not given. `importance_ratio` [N] scales
    each token's loss (correction for another sampler; the KL term is not scaled). `outside` computes l_t if
    `config.loss` is the user's own (`find_loss`).
    """
    low, high = clip_range(config)
    advantage = advantages[sequence]
    by_sequence = importance_level(config) == "sequence"
    if by_sequence or config.off_policy_mask is not None:
        length = torch.bincount(sequence, minlength=len(advantages))[sequence]

    def sequence_mean(x: Tensor) -> Tensor:
        return torch.zeros_like(advantages).index_add(0, sequence, x)[sequence] / length

    log_ratio = logprobs - old
    ratio = (sequence_mean(log_ratio) if by_sequence else log_ratio).exp()
    if outside is not None:
        loss = outside(logprobs, old, advantage, sequence)
    elif config.loss == "cispo":
        loss = -ratio.clamp(max=high).detach() * advantage * logprobs
    else:
        capped = ratio if config.delta is None else ratio.clamp(max=config.delta)
        loss = -torch.min(capped * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    if config.off_policy_mask is not None:
        drift = sequence_mean((old if sampled is None else sampled) - logprobs.detach())
        loss = loss * ((advantage >= 0) | (drift <= config.off_policy_mask))
    if importance_ratio is not None:
        loss = loss * importance_ratio

    with torch.no_grad():
        share = 1 / length if by_sequence else torch.ones_like(logprobs)
        above = (ratio > (high if config.loss == "cispo" else 1 + high)) & (advantage > 0)
        below = (ratio < 1 - low) & (advantage < 0)
        sums = {
            "clip/count": share.sum(),
            "clip/high": (above * share).sum(),
            "clip/low": (below * share).sum(),
        }
    if config.beta:
        assert reference is not None
        d = reference - logprobs
        kl = (d.exp() - d - 1) * ratio
        loss = loss + config.beta * kl
        sums["kl"] = kl.detach().sum()
    return (loss * weights[sequence]).sum(), sums
