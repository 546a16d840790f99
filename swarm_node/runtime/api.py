"""Training from a program or a notebook: `swarm_node.train`. Loads torch when it is called."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from swarm_node.config import NodeConfig
from swarm_node.config.loading import load_run_config, read_layers
from swarm_node.config.plugins import name_in_program, users_own
from swarm_node.errors import UserError
from swarm_node.runtime.callbacks import Callback, Manner, TrainResult
from swarm_node.runtime.extras import with_extras
from swarm_node.runtime.preflight import with_commits
from swarm_node.runtime.waiting import wait_passively
from swarm_node.storage.run_settings import not_used
from swarm_node.storage.rundir import RunDir
from swarm_node.storage.utf8 import check_utf8

Config = NodeConfig | Mapping[str, Any] | str | Path
"""A configuration, a table of its keys nested as in TOML, or the path of a TOML file."""
RewardFunction = Callable[..., Sequence[float | None]] | str
"""A reward function with TRL's signature, or where one is: `file.py:function` or `package.module:function`."""


def train(
    config: Config,
    callbacks: Callback | Sequence[Callback] = (),
    *,
    reward_funcs: RewardFunction | Sequence[RewardFunction] = (),
    reward_weights: Sequence[float] | None = None,
    quiet: bool = False,
) -> TrainResult:
    """Train until `rounds` or `minutes` are over, a callback ends the run or Ctrl-C comes. Does what `swarm-node local`
    does, or `join` if the configuration names a `swarm`.

    If its directory has a run, that run goes on, with its own settings and those given; a Python warning names changed
    settings for which no round was left. `quiet` shows nothing;
    events.jsonl has all sentences in any case. Environment variables `SWARM_NODE_*` are not read.

    `reward_funcs` take the place of `rewards.functions`; `reward_weights` has a weight for each, by default 1. A run
    records their qualified names, so a start that goes on with it has to be given them again.

    Ctrl-C saves and returns if `train` was called in the main thread; a second one raises KeyboardInterrupt. No other
    signal is handled, and the process is never ended.

    Raises UserError for what only the user can mend; the message says how. An exception of the user's own functions and
    callbacks comes out as it is; that a reward function cannot take its arguments is a UserError.
    """
    wait_passively()
    settings = resolve(config, quiet, _several(reward_funcs), reward_weights)
    called = (callbacks,) if isinstance(callbacks, Callback) else tuple(callbacks)
    try:
        result = _train(settings, Manner(embedded=True, quiet=quiet, callbacks=called))
    except Exception as error:
        if (own := users_own(error)) is None:
            raise
    else:
        if result.not_used:
            warnings.warn(f"{result.run_dir}: {not_used(result.not_used)}", stacklevel=2)
        return result
    # Outside of the handler, so that `error` is not shown as its context.
    try:
        raise own
    finally:
        del own  # or this frame, which its traceback has, would keep it and all that its frames hold


def _train(settings: NodeConfig, manner: Manner) -> TrainResult:
    settings, swarm = with_commits(with_extras(settings)), None
    if settings.swarm is not None:
        from swarm_node.swarm.links import swarm_to_join

        swarm = swarm_to_join(settings)
    with RunDir.open(settings.directory) as run:
        from swarm_node.runtime.start import start  # loads torch

        return start(settings, run, swarm, manner)


def resolve(
    config: Config,
    quiet: bool = False,
    reward_funcs: Sequence[RewardFunction] = (),
    reward_weights: Sequence[float] | None = None,
) -> NodeConfig:
    """The whole configuration of a start, checked, with the settings of the run that its directory has. Raises
    UserError."""
    if isinstance(config, str | Path):
        layers = list(read_layers(Path(config), {}, {}, (), ()))
    else:
        given = config.model_dump(mode="json", exclude_unset=True) if isinstance(config, NodeConfig) else dict(config)
        layers = [("config", given)]
    if reward_funcs or reward_weights is not None:
        layers.append(("reward_funcs", {"rewards": {"functions": _tables(reward_funcs, reward_weights)}}))
    check_utf8([str(config) if isinstance(config, Path) else "", [table for _, table in layers]])
    member = any(table.get("swarm") is not None for _, table in layers)
    settings = load_run_config(layers, member, (lambda sentence: None) if quiet else print)
    tables = settings.rewards.functions if reward_funcs else []
    for function, table in zip(reward_funcs, tables, strict=True):
        if not isinstance(function, str):
            table.give(function)
            if settings.pipeline.stages:
                raise UserError("a crew's other processes cannot take functions of this one: name them as FILE.py:NAME")
    return settings


def _several(functions: RewardFunction | Sequence[RewardFunction]) -> list[RewardFunction]:
    return [functions] if callable(functions) or isinstance(functions, str) else list(functions)


def _tables(functions: Sequence[RewardFunction], weights: Sequence[float] | None) -> list[dict[str, Any]]:
    """`rewards.functions` for these functions. Raises UserError."""
    weights = [1.0] * len(functions) if weights is None else weights
    if len(weights) != len(functions):
        raise UserError(f"reward_weights has {len(weights)} numbers for {len(functions)} reward functions")
    for number, each in enumerate(functions):
        if not callable(each) and not isinstance(each, str):
            raise UserError(f"reward_funcs[{number}] is neither a function nor a text such as rewards.py:brevity")
    paths = [each if isinstance(each, str) else name_in_program(each) for each in functions]
    return [{"path": path, "weight": _weight(number, weights[number])} for number, path in enumerate(paths)]


def _weight(number: int, weight: float) -> float:
    try:
        return float(weight)
    except (TypeError, ValueError) as error:
        raise UserError(f"reward_weights[{number}] is no number: {weight!r}") from error
