"""IcePop, arXiv 2510.18855: leave out each token whose probability differs too much from the one at sampling.

    f_t = r_t if LOW <= r_t <= HIGH else 0,   r_t = exp(old_t - sampled_t)     of a peer's token: at most 1;   without
                                                                               a recorded log-probability: 1

Ratios are taken to the step's first pass, the proximal policy of the decoupled objective (AReaL, arXiv 2505.24298).
"""

from __future__ import annotations

from torch import Tensor

from swarm_node.grpo.corrections.truncated import believed, log_weights
from swarm_node.grpo.objective import Correction, Tokens

LOW, HIGH = 0.5, 5.0


class IcePop(Correction):
    """Each token is weighed or left out by itself."""

    def factor(self, tokens: Tokens) -> Tensor:
        ratio = log_weights(tokens).exp()
        return believed(ratio.where((ratio >= LOW) & (ratio <= HIGH), 0.0), tokens)
