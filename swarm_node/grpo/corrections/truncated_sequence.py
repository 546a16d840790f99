"""Truncated importance sampling by sequence: all tokens of a rollout have the weight of the rollout.

    f = min(exp(sum_t (old_t - sampled_t)), CAP)    of a peer's rollout: at most 1;   t over tokens with a recorded
                                                    log-probability

Unlike weights by token (`truncated`) this is unbiased but for the cap (arXiv 2110.00641, AReaL 2505.24298: the first
pass is the proximal policy). The cap acts on the sum, so that no product over- or underflows before it.
"""

from __future__ import annotations

import math

from torch import Tensor

from swarm_node.grpo.corrections.truncated import CAP, believed, log_weights
from swarm_node.grpo.objective import Correction, Tokens


class TruncatedSequence(Correction):
    """A rollout is weighed as a whole."""

    def factor(self, tokens: Tokens) -> Tensor:
        each = log_weights(tokens)
        total = each.new_zeros(tokens.rollouts).index_add(0, tokens.sequence, each)
        return believed(total.clamp(max=math.log(CAP)).exp()[tokens.sequence], tokens)
