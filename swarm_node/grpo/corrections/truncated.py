"""Truncated importance sampling by token: TIS (https://fengyao.notion.site/off-policy-rl) with the cap of verl.

    f_t = min(exp(old_t - sampled_t), CAP)      of a peer's token: at most 1;   without a recorded log-probability: 1

Ratios are taken to the step's first pass, so this is the decoupled objective of PPO (arXiv 2110.00641, AReaL
2505.24298) with a bound: the first pass is the proximal policy, and f_t its weight against the policy that sampled.
"""

from __future__ import annotations

from torch import Tensor

from swarm_node.grpo.objective import Correction, Tokens

CAP = 2.0


def log_weights(tokens: Tokens) -> Tensor:
    """[N] log(proximal / sampling probability) of each token; 0 where no log-probability was recorded."""
    return (tokens.old - tokens.sampled).nan_to_num(nan=0.0)


def believed(weights: Tensor, tokens: Tokens) -> Tensor:
    """`weights` [N], those of peers at most 1: their log-probabilities are claims, which may lower a sample's weight
    and never raise it."""
    return weights.where(~tokens.foreign, weights.clamp(max=1.0))


class Truncated(Correction):
    """Each token is weighed by itself."""

    def factor(self, tokens: Tokens) -> Tensor:
        return believed(log_weights(tokens).exp().clamp(max=CAP), tokens)
