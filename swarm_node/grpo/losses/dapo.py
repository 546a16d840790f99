"""DAPO, arXiv 2503.14476: PPO's clipped surrogate with a higher upper clip range, every token counts the same."""

from __future__ import annotations

from swarm_node.grpo.objective import Loss


class Dapo(Loss):
    """l_t = -min(ratio A, clip(ratio, 1 - low, 1 + high) A), w_t = 1 / sum |y|: the parts of the port."""
