"""NoLoCo's outer step between two peers (arXiv 2506.10911): no collective, no barrier.

    Delta_i = theta_i - phi_i                                                                       (1)
    m_i     = alpha m_i + beta mean_j(Delta_j) + gamma (mean_j(phi_j) - phi_i)                      (2)
    phi_i   = phi_i + m_i                                                                           (3)

theta are the fast weights that local training changes. phi are the slow weights: what they were after the last
exchange. Each mean is over this peer i and its partner. Equation 2 has two special cases:

    gamma = beta        m_i = alpha m_i + beta (mean_j(theta_j) - phi_i)        phi_j need not be sent
    no partner          m_i = alpha m_i + beta Delta_i

Deltas point where training went; in the paper they have the opposite sign. All tensors are flat, float32 and of one
size. The caller sets theta to phi afterwards.

Without training in between, slow weights of any number of peers draw together for 0 < gamma < 2 (1 - alpha^2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_node.averaging.robust import chunks, square


@dataclass(frozen=True)
class NoLoCo:
    alpha: float
    """Momentum."""
    beta: float
    """Step along the pair's mean progress."""
    gamma: float
    """Pull together."""

    def step(
        self,
        slow: Tensor,
        momentum: Tensor,
        fast: Tensor,
        partner_fast: Tensor | None,
        partner_slow: Tensor | None = None,
    ) -> None:
        """Equations 2 and 3: change `slow` and `momentum` in place. `partner_slow` is read only if gamma differs from
        beta."""
        self.update_momentum(slow, momentum, fast, partner_fast, partner_slow)
        slow.add_(momentum)

    def update_momentum(
        self,
        slow: Tensor,
        momentum: Tensor,
        fast: Tensor,
        partner_fast: Tensor | None,
        partner_slow: Tensor | None = None,
    ) -> None:
        """Equation 2: change `momentum` in place, with no partner if `partner_fast` is None."""
        momentum.mul_(self.alpha)
        if partner_fast is None:
            momentum.add_(fast - slow, alpha=self.beta)
        elif self.gamma == self.beta:
            momentum.add_((fast + partner_fast).div_(2).sub_(slow), alpha=self.beta)
        else:
            assert partner_slow is not None
            apart = partner_slow - slow
            momentum.add_((fast + partner_fast).div_(2).sub_(slow).sub_(apart, alpha=0.5), alpha=self.beta)
            momentum.add_(apart, alpha=self.gamma / 2)

    def momentum_in_place(
        self, slow: Tensor, momentum: Tensor, fast: Tensor, partner_fast: Tensor, partner_slow: Tensor | None = None
    ) -> float:
        """Equation 2 without further memory: the new momentum overwrites `partner_fast`.

        Returns the root mean square distance of the two peers' fast weights.
        """
        squares = 0.0
        theirs = [partner_fast, *([] if partner_slow is None else [partner_slow])]
        for start, before, mine, *parts in chunks(slow, momentum, fast, *theirs):
            squares += square(parts[0] - mine)
            after = before.clone()
            self.update_momentum(start, after, mine, *parts)
            parts[0].copy_(after)
        return math.sqrt(squares / len(fast))


def slow_minus_fast(slow: Tensor, momentum: Tensor, fast: Tensor) -> None:
    """Overwrite `fast` with what takes it to the new slow weights of equation 3: slow + momentum - fast."""
    for start, move, mine in chunks(slow, momentum, fast):
        torch.sub(start + move, mine, out=mine)
