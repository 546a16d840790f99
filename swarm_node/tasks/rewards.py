"""Reward functions of the user's own, with TRL's signature:

    f(prompts, completions, **columns) -> list[float | None]

None = this function does not score that completion.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from swarm_node.errors import UserError
from swarm_node.types import Task

RewardFunction = Callable[..., list[float | None]]

_FILES = itertools.count()


def load_function(path: str) -> RewardFunction:
    """Import `file.py:function` or `package.module:function`. Raises `UserError`."""
    where, _, attribute = path.rpartition(":")
    if not where or not attribute:
        raise UserError(f"reward function {path!r}: write file.py:function or package.module:function")
    try:
        module = _run_file(Path(where).expanduser()) if where.endswith(".py") else importlib.import_module(where)
    except Exception as error:  # importing runs the user's code, which may raise anything
        raise UserError(f"reward function {path!r}: cannot import {where}: {_describe(error)}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UserError(f"reward function {path!r}: {where} has no function {attribute!r}")
    return function


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
        raise UserError(f"reward function {name!r} failed: {_describe(error)}") from error
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


def _run_file(path: Path) -> ModuleType:
    """A new module from the file, under a name no other module has."""
    name = f"_reward_file_{next(_FILES)}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and others look up the module that a class says it is from
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
