"""Reward functions of the user's own: loading one, and calling it for the answers to a question."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from swarm_node.config.plugins import is_stop, load_function, place_of, plugin_error
from swarm_node.config.training import RewardFunctionConfig
from swarm_node.errors import PluginError, UserError
from swarm_node.types import Task
from swarm_protocol.errors import printable

RewardFunction = Callable[..., list[float | None]]
"""A function of the user's own, with TRL's signature `f(prompts, completions, **columns)`. It gives None for a
completion that it does not score."""
TEXT_INDEXED = "string indices must be integers"  # how Python's error about text["content"] begins
TEXTS = "; completions are plain texts here, also for a column of messages (docs/tasks.md#rewards)"
MAX_SHOWN = 60  # most characters of a wrong value in a message


def load_reward(named: RewardFunctionConfig) -> RewardFunction:
    """The function that the configuration names, or that came with it. UserError if it cannot be loaded, or is an
    `async def`, which returns no rewards when it is called."""
    function = load_function(named.path, "reward function") if named.given is None else named.given
    called = function if inspect.isroutine(function) else type(function).__call__
    if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
        raise UserError(
            f"reward function {named.name!r}{place_of(called)} is an `async def`, which is not awaited here: write a "
            "plain `def`, with asyncio.run(...) inside for what must be awaited"
        )
    return function


def call_reward(
    name: str, function: RewardFunction, tasks: Sequence[Task], prompts: Sequence[str], completions: Sequence[str]
) -> list[float | None]:
    """One reward for each completion. UserError if the function fails or breaks its contract."""
    arguments = {"prompts": list(prompts), "completions": list(completions), **_columns(tasks)}
    where = f"reward function {name!r}{place_of(function)}"
    try:
        given = function(**arguments)
        given = list(given) if isinstance(given, Iterator) else given  # a generator runs only now
    except BaseException as error:  # the user's code may raise anything
        if is_stop(error):
            raise
        if not isinstance(error, Exception):
            ended = plugin_error(f"reward function {name!r} ended the program", error)
            raise PluginError(f"{ended}; let it return its rewards", ended.trace) from error
        if problem := _does_not_take(function, arguments):
            raise UserError(f"{where} {problem}") from error
        failed = plugin_error(f"reward function {name!r} failed", error)
        hint = TEXTS if isinstance(error, TypeError) and str(error).startswith(TEXT_INDEXED) else ""
        raise PluginError(f"{failed}{hint}", failed.trace) from error
    try:
        rewards = [None if reward is None else float(reward) for reward in given]
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{where} must give a list of numbers, and gave {printable(repr(given)[:MAX_SHOWN])}"
        ) from error
    if len(rewards) != len(completions):
        raise UserError(f"{where} gave {len(rewards)} rewards for {len(prompts)} completions")
    if not all(reward is None or math.isfinite(reward) for reward in rewards):
        raise UserError(f"{where} gave a reward that is not finite; None = not scored")
    return rewards


def _does_not_take(function: RewardFunction, arguments: Mapping[str, Any]) -> str:
    """What is wrong with the parameters of `function` for a call with these arguments; empty if nothing is."""
    try:
        inspect.signature(function, follow_wrapped=False).bind(**arguments)
    except TypeError as error:
        have = ", ".join(arguments)
        return f"cannot be called: {error}. It is called with {have}; let its parameters end with **columns"
    except ValueError:  # a built-in function does not tell its parameters
        return ""
    return ""


def _columns(tasks: Sequence[Task]) -> dict[str, list[Any]]:
    """The other arguments of reward functions, one value for each task: `question`, `answer`, `task` (its label), and
    every metadata column of any task (None where a task lacks it)."""
    names = {name for task in tasks for name in task.metadata} - {"prompts", "completions"}
    return {name: [task.metadata.get(name) for task in tasks] for name in sorted(names)} | {
        "question": [task.question for task in tasks],
        "answer": [task.answer for task in tasks],
        "task": [task.label for task in tasks],
    }
