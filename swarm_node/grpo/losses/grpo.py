"""GRPO, arXiv 2402.03300, section 4.1: the clipped surrogate, every rollout counts the same."""

from __future__ import annotations

from torch import Tensor

from swarm_node.grpo.losses.base import Loss, Tokens, clipped, mean_of_sequences


class Grpo(Loss):
    """w_t = 1 / (B |y|)."""

    def surrogate(self, tokens: Tokens) -> Tensor:
        return clipped(tokens)

    def weights(self, lengths: Tensor, max_new_tokens: int) -> Tensor:
        return mean_of_sequences(lengths)
