"""Outer steps: how slow weights follow the fast ones that local training changes, at each exchange.

theta are the fast weights, phi the slow ones: what they were after the last exchange. Deltas point where training went;
in the papers they have the opposite sign. All tensors are flat, float32 and of one size.

NoLoCo (arXiv 2506.10911) has neither collective nor barrier. Each mean is over this peer i and its partner:

    Delta_i = theta_i - phi_i                                                                       (1)
    m_i     = alpha m_i + beta mean_j(Delta_j) + gamma (mean_j(phi_j) - phi_i)                      (2)
    phi_i   = phi_i + m_i                                                                           (3)

With gamma = beta, phi_j is not needed in equation 2:

    m_i     = alpha m_i + beta (mean_j(theta_j) - phi_i)

The caller sets theta to phi afterwards. Without training in between, slow weights of any number of peers draw together
for 0 < gamma < 2 (1 - alpha^2).

DiLoCo (arXiv 2311.08105, algorithm 1) is SGD with Nesterov momentum, in the form of torch.optim.SGD. Each mean is over
the whole cohort:

    v   = mu v + mean_j(Delta_j)
    phi = phi + eta (mean_j(Delta_j) + mu v)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_node.averaging.robust import cache_parts, square


@dataclass(frozen=True)
class NoLoCo:
    alpha: float  # momentum
    beta: float  # step along the pair's mean progress
    gamma: float  # pull together

    def momentum_in_place(
        self, slow: Tensor, momentum: Tensor, fast: Tensor, partner_fast: Tensor, partner_slow: Tensor | None = None
    ) -> float:
        """Equation 2 without further memory: the new momentum overwrites `partner_fast`.

        `partner_slow` is read only if gamma differs from beta. Returns the root mean square distance of the two peers'
        fast weights.
        """
        squares, vectors = 0.0, [slow, momentum, fast, partner_fast]
        if self.gamma != self.beta:
            assert partner_slow is not None
            vectors.append(partner_slow)
        for start, before, mine, partner, *partner_start in cache_parts(*vectors):
            squares += square(partner - mine)
            progress = (mine + partner).div_(2).sub_(start)
            partner.copy_(before).mul_(self.alpha)
            if partner_start:
                apart = partner_start[0] - start
                partner.add_(progress.sub_(apart, alpha=0.5), alpha=self.beta).add_(apart, alpha=self.gamma / 2)
            else:
                partner.add_(progress, alpha=self.beta)
        return math.sqrt(squares / len(fast))


def slow_minus_fast(slow: Tensor, momentum: Tensor, fast: Tensor) -> None:
    """Overwrite `fast` with what takes it to the new slow weights of equation 3: slow + momentum - fast."""
    for start, move, mine in cache_parts(slow, momentum, fast):
        torch.sub(start + move, mine, out=mine)


@dataclass(frozen=True)
class DiLoCo:
    learning_rate: float  # eta
    momentum: float  # mu

    def step(self, slow: Tensor, velocity: Tensor, mean_delta: Tensor) -> None:
        """Change `slow` (phi) and `velocity` (v) in place."""
        velocity.mul_(self.momentum).add_(mean_delta)
        slow.add_(mean_delta, alpha=self.learning_rate).add_(velocity, alpha=self.learning_rate * self.momentum)


MEAN = DiLoCo(learning_rate=1.0, momentum=0.0)  # plain averaging: phi = phi + mean_j(Delta_j)
