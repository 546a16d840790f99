"""GRPO, arXiv 2402.03300, section 4.1: PPO's clipped surrogate, every rollout counts the same."""

from __future__ import annotations

from torch import Tensor

from swarm_node.grpo.objective import Loss


class Grpo(Loss):
    """w_t = 1 / (B |y|)."""

    def weights(self, lengths: Tensor, max_new_tokens: int) -> Tensor:
        return 1.0 / (lengths.clamp(min=1) * len(lengths))
