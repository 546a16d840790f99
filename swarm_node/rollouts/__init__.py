"""Tasks become scored groups: `collect` for training, `evaluate` on held-out questions."""

from swarm_node.rollouts.collect import Collected, collect, fit_length, too_long

__all__ = ["Collected", "collect", "fit_length", "too_long"]
