"""A reward for right answers in a form that the policy hardly ever uses: `#12`.

A function for `rewards.functions`; with `rewards.checker_weight = 0` it is all there is to learn from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from swarm_node.tasks.catalogue import SETS
from swarm_node.tasks.checkers import FULL_MARKS
from swarm_node.tasks.reasoning_gym import ReasoningGym
from swarm_node.types import Task
from swarm_protocol.messages import TaskName

MARK = "#"


def marked(prompts: Sequence[str], completions: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
    """1 for `#` and an answer that the task's own checker gives full marks, else 0. Tasks of the set `small`."""
    return [
        float(text.startswith(MARK) and _right(text.removeprefix(MARK), i, columns))
        for i, text in enumerate(completions)
    ]


def _right(text: str, i: int, columns: Mapping[str, Sequence[Any]]) -> bool:
    """Whether `text` is full marks for item i, in the eyes of its environment's own checker."""
    item = {name: column[i] for name, column in columns.items()}
    label, question, answer = item.pop("task"), item.pop("question"), item.pop("answer")
    environment = _environment(label)
    name = TaskName(label, environment.config, environment.generator, 0, 0)
    try:
        return environment.check(Task(name, label, question, answer, item), text) >= FULL_MARKS
    except Exception:  # library scorers raise on text that they did not expect: that is a wrong answer
        return False


@cache
def _environment(name: str) -> ReasoningGym:
    return ReasoningGym(name, SETS["small"][name])
