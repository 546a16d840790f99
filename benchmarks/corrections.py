"""Off-policy corrections that lost in `benchmarks.staleness` and left the package: other importance weights.

    r_t = exp(old_t - sampled_t)         old: the step's first pass;   1 without a recorded log-probability

    TruncatedSequence    f   = min(prod_t r_t, CAP)              of a whole rollout; arXiv 2110.00641, AReaL 2505.24298
    IcePop               f_t = r_t if LOW <= r_t <= HIGH else 0  arXiv 2510.18855

Log-probabilities of peers are claims: they may lower a sample's weight, and never raise it above 1.
"""

from __future__ import annotations

import math

from torch import Tensor

from swarm_node.grpo.corrections.truncated import CAP, believed, log_weights
from swarm_node.grpo.objective import Correction, Tokens

LOW, HIGH = 0.5, 5.0


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
