"""What an exchange does to the slow weights phi, of which the fast weights theta are what local training made.

    NoLoCo (arXiv 2506.10911, its outer step between pairs)         Delta_i = theta_i - phi_i
        m_i   = alpha m_i + beta mean_j(Delta_j) + gamma (mean_j(phi_j) - phi_i)
        phi_i = phi_i + m_i
        gamma = beta:   m_i = alpha m_i + beta (mean_j(theta_j) - phi_i)        phi_j need not be sent
        nobody there:   m_i = alpha m_i + beta Delta_i

    DiLoCo (arXiv 2311.08105, algorithm 1; SGD with Nesterov momentum as torch.optim.SGD has it)
        v   = mu v + mean_j(Delta_j)
        phi = phi + eta (mean_j(Delta_j) + mu v)

    MEAN    eta = 1, mu = 0: phi = phi + mean_j(Delta_j), plain averaging

Deltas point where training went (theta - phi), everywhere; the papers' own signs differ. All tensors are flat float32
of one size; slow weights and momenta are changed in place. Whoever calls sets theta to phi.

Left to themselves, NoLoCo's slow weights draw together for 0 < gamma < 2 (1 - alpha^2), in any number of peers.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
        """Update `slow` and `momentum`. `partner_fast` None = nobody there; `partner_slow` is needed, and looked at,
        only if gamma differs from beta."""
        self.turn(slow, momentum, fast, partner_fast, partner_slow)
        slow.add_(momentum)

    def turn(
        self,
        slow: Tensor,
        momentum: Tensor,
        fast: Tensor,
        partner_fast: Tensor | None,
        partner_slow: Tensor | None = None,
    ) -> None:
        """The first half of `step`: only `momentum` changes."""
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


@dataclass(frozen=True)
class DiLoCo:
    learning_rate: float
    """eta."""
    momentum: float
    """mu."""

    def step(self, slow: Tensor, velocity: Tensor, mean_delta: Tensor) -> None:
        """Update `slow` and `velocity`."""
        velocity.mul_(self.momentum).add_(mean_delta)
        slow.add_(mean_delta, alpha=self.learning_rate).add_(velocity, alpha=self.learning_rate * self.momentum)


MEAN = DiLoCo(learning_rate=1.0, momentum=0.0)
