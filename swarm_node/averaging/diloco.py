"""DiLoCo's outer step (arXiv 2311.08105, algorithm 1): SGD with Nesterov momentum, in the form of torch.optim.SGD.

    v   = mu v + mean_j(Delta_j)                    Delta_j = theta_j - phi, over the whole cohort
    phi = phi + eta (mean_j(Delta_j) + mu v)

`MEAN` has eta = 1 and mu = 0: phi = phi + mean_j(Delta_j), plain averaging. Deltas point where training went; in the
paper they have the opposite sign. All tensors are flat, float32 and of one size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DiLoCo:
    learning_rate: float  # eta
    momentum: float  # mu

    def step(self, slow: Tensor, velocity: Tensor, mean_delta: Tensor) -> None:
        """Change `slow` (phi) and `velocity` (v) in place."""
        velocity.mul_(self.momentum).add_(mean_delta)
        slow.add_(mean_delta, alpha=self.learning_rate).add_(velocity, alpha=self.learning_rate * self.momentum)


MEAN = DiLoCo(learning_rate=1.0, momentum=0.0)
