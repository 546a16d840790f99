"""Random vectors, the same every time."""

from __future__ import annotations

import torch
from torch import Tensor


def normal(n: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(n, generator=torch.Generator().manual_seed(seed))
