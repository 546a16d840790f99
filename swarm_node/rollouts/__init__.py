"""Room 2: tasks become scored groups."""

from swarm_node.rollouts.collect import Collected, collect, fit_length, has_signal

__all__ = ["Collected", "collect", "fit_length", "has_signal"]
