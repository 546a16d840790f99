"""Prompts and safe checkers: any machine regenerates a task from its name; no answer is ever executed."""

from swarm_node.tasks.one_turn import is_held_out
from swarm_node.tasks.taskset import TaskSet, load_tasks

__all__ = ["TaskSet", "is_held_out", "load_tasks"]
