"""DeepSeek-V3.2's off-policy mask, arXiv 2512.02556: leave out what the policy has moved far away from."""

from __future__ import annotations

import torch
from torch import Tensor

from swarm_node.grpo.corrections.recorded import Recorded
from swarm_node.grpo.objective import Tokens, mean_by_sequence


class SequenceMask(Recorded):
    """Drops a rollout with A < 0 if mean(sampled - logprobs) over its tokens exceeds `limit`, in nats."""

    def __init__(self, limit: float) -> None:
        self.limit = limit

    def factor(self, tokens: Tokens) -> Tensor:
        sampled = torch.where(tokens.foreign | tokens.sampled.isnan(), tokens.old, tokens.sampled)
        drift = mean_by_sequence(sampled - tokens.logprobs.detach(), tokens.sequence, tokens.rollouts)
        return (tokens.advantage >= 0) | (drift <= self.limit)
