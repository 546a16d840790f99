"""The port of an off-policy correction."""

from __future__ import annotations

from torch import Tensor

from swarm_node.grpo.losses.base import Tokens


class Correction:
    """How an update treats rollouts that another policy sampled: an older version of this one, or a peer's.

    `sampled` [N] are the log-probabilities that the sampler recorded, NaN where there are none. Those of a peer are
    the peer's word: nothing proves them.
    """

    def old(self, sampled: Tensor, stale: Tensor, foreign: Tensor) -> Tensor:
        """Log-probabilities [N] that ratios are taken to; NaN = those of the step's first pass, a ratio of 1.

        `stale` [N]: an older version of this policy sampled the token; `foreign` [N]: a peer did.
        """
        raise NotImplementedError

    def factor(self, tokens: Tokens) -> Tensor | None:
        """Factor [N] >= 0 on each token's loss, without a gradient; None = 1. The KL term is not scaled."""
        raise NotImplementedError
