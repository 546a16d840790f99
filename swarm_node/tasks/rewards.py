"""Rewards: functions of the user's own, scores written into rollouts, and whether there is anything to learn from them.

A function has TRL's signature, `f(prompts, completions, **columns) -> list[float | None]`; None = it does not score
that completion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from swarm_node.config.plugins import error_text
from swarm_node.errors import UserError
from swarm_node.types import Rollout, Score, Task

RewardFunction = Callable[..., list[float | None]]
ScoreCompletions = Callable[[Sequence[Task], Sequence[str], Sequence[str]], list[Score]]
"""(tasks, prompts, completions) -> a score of each completion; see `TaskSet.score`."""


def judge(task: Task, prompt: str, rollouts: Sequence[Rollout], score: ScoreCompletions) -> None:
    """Score the rollouts of one task in place."""
    n = len(rollouts)
    scores = score([task] * n, [prompt] * n, [r.text for r in rollouts])
    for rollout, verdict in zip(rollouts, scores, strict=True):
        rollout.extracted, rollout.rewards = verdict.extracted, verdict.rewards
        rollout.reward, rollout.correct = verdict.reward, verdict.correct


def has_signal(rollouts: Sequence[Rollout]) -> bool:
    """Whether any reward differs: without that every advantage is zero."""
    return len({(r.reward, *r.rewards.items()) for r in rollouts}) > 1


def is_judged(rollout: Rollout) -> bool:
    """Whether any reward scored it: None from all of them is no reward."""
    return not rollout.rewards or any(reward is not None for reward in rollout.rewards.values())


def call_function(
    name: str,
    function: RewardFunction,
    tasks: Sequence[Task],
    prompts: Sequence[str],
    completions: Sequence[str],
) -> list[float | None]:
    """One reward for each completion. UserError if the function fails or breaks its contract."""
    try:
        rewards = list(function(prompts=list(prompts), completions=list(completions), **columns(tasks)))
        rewards = [None if reward is None else float(reward) for reward in rewards]
    except Exception as error:  # the user's code may raise anything
        raise UserError(f"reward function {name!r} failed: {error_text(error)}") from error
    if len(rewards) != len(completions):
        raise UserError(f"reward function {name!r} gave {len(rewards)} rewards for {len(prompts)} completions")
    if not all(reward is None or math.isfinite(reward) for reward in rewards):
        raise UserError(f"reward function {name!r} gave a reward that is not finite; None = not scored")
    return rewards


def columns(tasks: Sequence[Task]) -> dict[str, list[Any]]:
    """The other arguments of reward functions, one value for each task.

    They are `question`, `answer`, `task` (its label), and every metadata column of any task (None where a task lacks
    it).
    """
    names = {name for task in tasks for name in task.metadata} - {"prompts", "completions"}
    return {name: [task.metadata.get(name) for task in tasks] for name in sorted(names)} | {
        "question": [task.question for task in tasks],
        "answer": [task.answer for task in tasks],
        "task": [task.label for task in tasks],
    }
