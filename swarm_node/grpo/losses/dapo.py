"""DAPO, arXiv 2503.14476: the clipped surrogate, every token counts the same."""

from __future__ import annotations

from torch import Tensor

from swarm_node.grpo.losses.base import Loss, Tokens, clipped, mean_of_tokens


class Dapo(Loss):
    """w_t = 1 / sum |y|."""

    def surrogate(self, tokens: Tokens) -> Tensor:
        return clipped(tokens)

    def weights(self, lengths: Tensor, max_new_tokens: int) -> Tensor:
        return mean_of_tokens(lengths)
