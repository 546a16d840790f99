"""Dr. GRPO, arXiv 2503.20783: PPO's clipped surrogate with a constant weight, so long answers are not favoured."""

from __future__ import annotations

import torch
from torch import Tensor

from swarm_node.grpo.objective import Loss


class DrGrpo(Loss):
    """w_t = 1 / (B L_max)."""

    def weights(self, lengths: Tensor, max_new_tokens: int) -> Tensor:
        return torch.full(lengths.shape, 1.0 / (len(lengths) * max_new_tokens))
