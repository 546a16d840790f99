"""A reward for an answer in a form that the policy hardly ever uses: `#` and then the right answer, and nothing else.

Reward functions for `rewards.functions`; with `rewards.checker_weight = 0` they are all there is to learn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from protocol.messages import TaskName
from swarm_node.tasks.catalogue import SETS
from swarm_node.tasks.checkers import FULL_MARKS
from swarm_node.tasks.environments import Environment
from swarm_node.types import Task

MARK = "#"


def marked(
    prompts: Sequence[str],
    completions: Sequence[str],
    task: Sequence[str],
    question: Sequence[str],
    answer: Sequence[str],
    **metadata: Sequence[Any],
) -> list[float | None]:
    """1 for `#` and an answer that the task's own checker gives full marks, else 0. Tasks of the set `small`."""
    rewards: list[float | None] = []
    for i, text in enumerate(completions):
        item = {name: column[i] for name, column in metadata.items()}
        right = text.startswith(MARK) and _right(task[i], question[i], answer[i], item, text.removeprefix(MARK))
        rewards.append(float(right))
    return rewards


def _right(label: str, question: str, answer: str, metadata: dict[str, Any], text: str) -> bool:
    """Whether the environment's checker gives `text` full marks."""
    environment = _environment(label)
    name = TaskName(label, environment.config, environment.generator, 0, 0)
    try:
        return environment.check(Task(name, label, question, answer, metadata), text) >= FULL_MARKS
    except Exception:  # library scorers raise on text that they did not expect: that is a wrong answer
        return False


@cache
def _environment(name: str) -> Environment:
    return Environment(name, SETS["small"][name])
