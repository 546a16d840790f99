"""Off-policy corrections that lost in `benchmarks.staleness` and left the package: importance weights on each token.

    r_t = exp(old_t - sampled_t)         old: the step's first pass;   1 without a recorded log-probability

    Truncated            f_t = min(r_t, CAP)                     https://fengyao.notion.site/off-policy-rl, verl's cap
    TruncatedSequence    f   = min(prod_t r_t, CAP)              of a whole rollout
    IcePop               f_t = r_t if LOW <= r_t <= HIGH else 0  arXiv 2510.18855

Ratios are taken to the first pass, so these are PPO's decoupled objective (arXiv 2110.00641, AReaL 2505.24298) with a
bound: the first pass is the proximal policy, and f_t its weight against the policy that sampled. Log-probabilities of
peers are claims: they may lower a sample's weight, and never raise it above 1.
"""

from __future__ import annotations

import math

from torch import Tensor

from swarm_node.grpo.objective import Correction, Tokens

CAP = 2.0
LOW, HIGH = 0.5, 5.0


def log_weights(tokens: Tokens) -> Tensor:
    """[N] log r_t."""
    return (tokens.old - tokens.sampled).nan_to_num(nan=0.0)


def believed(weights: Tensor, tokens: Tokens) -> Tensor:
    """`weights` [N], those of peers at most 1."""
    return weights.where(~tokens.foreign, weights.clamp(max=1.0))


class Truncated(Correction):
    """Each token is weighed by itself."""

    def factor(self, tokens: Tokens) -> Tensor:
        return believed(log_weights(tokens).exp().clamp(max=CAP), tokens)


class TruncatedSequence(Correction):
    """A rollout is weighed as a whole. The cap acts on the sum of logarithms: no product over- or underflows."""

    def factor(self, tokens: Tokens) -> Tensor:
        each = log_weights(tokens)
        total = each.new_zeros(tokens.rollouts).index_add(0, tokens.sequence, each)
        return believed(total.clamp(max=math.log(CAP)).exp()[tokens.sequence], tokens)


class IcePop(Correction):
    """Each token is weighed or left out by itself."""

    def factor(self, tokens: Tokens) -> Tensor:
        ratio = log_weights(tokens).exp()
        return believed(ratio.where((ratio >= LOW) & (ratio <= HIGH), 0.0), tokens)
