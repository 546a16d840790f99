"""Room 2: tasks become scored groups."""

from swarm_node.rollouts.collect import Collected, collect

__all__ = ["Collected", "collect"]
