"""Dr. GRPO, arXiv 2503.20783: the clipped surrogate with a constant weight, so long answers are not favoured."""

from __future__ import annotations

import torch
from torch import Tensor

from swarm_node.grpo.losses.base import Loss, Tokens, clipped


class DrGrpo(Loss):
    """w_t = 1 / (B L_max)."""

    def surrogate(self, tokens: Tokens) -> Tensor:
        return clipped(tokens)

    def weights(self, lengths: Tensor, max_new_tokens: int) -> Tensor:
        return torch.full(lengths.shape, 1.0 / (len(lengths) * max_new_tokens))
