"""Reward functions of the user's own, with TRL's signature:

    f(prompts, completions, **columns) -> list[float | None]

None = this function does not score that completion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from swarm_node.config.plugins import describe
from swarm_node.errors import UserError
from swarm_node.types import Task

RewardFunction = Callable[..., list[float | None]]


def call_function(
    name: str,
    function: RewardFunction,
    tasks: Sequence[Task],
    prompts: Sequence[str],
    completions: Sequence[str],
) -> list[float | None]:
    """One reward for each completion. Raises `UserError`: the function is the user's, so is its mistake."""
    try:
        rewards = list(function(prompts=list(prompts), completions=list(completions), **columns(tasks)))
        rewards = [None if reward is None else float(reward) for reward in rewards]
    except Exception as error:  # the user's code may raise anything
        raise UserError(f"reward function {name!r} failed: {describe(error)}") from error
    if len(rewards) != len(completions):
        raise UserError(f"reward function {name!r} gave {len(rewards)} rewards for {len(prompts)} completions")
    if not all(reward is None or math.isfinite(reward) for reward in rewards):
        raise UserError(f"reward function {name!r} gave a reward that is not finite; None = not scored")
    return rewards


def columns(tasks: Sequence[Task]) -> dict[str, list[Any]]:
    """What functions get besides prompts and completions, one value for each task.

    `question`, `answer`, `task` (its label), and every metadata column of any task; `None` where a task
    lacks it.
    """
    names = {name for task in tasks for name in task.metadata} - {"prompts", "completions"}
    return {name: [task.metadata.get(name) for task in tasks] for name in sorted(names)} | {
        "question": [task.question for task in tasks],
        "answer": [task.answer for task in tasks],
        "task": [task.label for task in tasks],
    }
