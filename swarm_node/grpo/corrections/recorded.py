"""The default: own rollouts are compared with the probabilities recorded at sampling, foreign ones start at ratio 1.

No log-probability of a peer is used, as in SAPO (arXiv 2509.08721).
"""

from __future__ import annotations

import torch
from torch import Tensor

from swarm_node.grpo.objective import Correction


class Recorded(Correction):
    """Ratios of stale own rollouts are taken to their recorded log-probabilities."""

    def old(self, sampled: Tensor, stale: Tensor, foreign: Tensor) -> Tensor:
        return torch.where(stale, sampled, torch.nan)
