"""Training from a program or a notebook: `swarm_node.train`. Loads torch when it is called."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swarm_node.config import NodeConfig
from swarm_node.config.loading import load_run_config, read_layers
from swarm_node.runtime.callbacks import Callback, Manner, TrainResult
from swarm_node.runtime.waiting import wait_passively
from swarm_node.storage.run_settings import not_used
from swarm_node.storage.rundir import RunDir

Config = NodeConfig | Mapping[str, Any] | str | Path
"""A configuration, a table of its keys nested as in TOML, or the path of a TOML file."""


def train(config: Config, callbacks: Sequence[Callback] = (), *, quiet: bool = False) -> TrainResult:
    """Train until `rounds` or `minutes` are over, a callback ends the run or Ctrl-C comes. Does what `swarm-node local`
    does, or `join` if the configuration names a `swarm`.

    If its directory has a run, that run goes on, with its own settings and those given; a Python warning names changed
    settings for which no round was left. `quiet` shows nothing;
    events.jsonl has all sentences in any case. Environment variables `SWARM_NODE_*` are not read.

    Ctrl-C saves and returns if `train` was called in the main thread; a second one raises KeyboardInterrupt. No other
    signal is handled, and the process is never ended.

    Raises UserError for what only the user can mend; the message says how.
    """
    wait_passively()
    settings = resolve(config, quiet)
    swarm = None
    if settings.swarm is not None:
        from swarm_node.swarm.links import swarm_to_join

        swarm = swarm_to_join(settings)
    with RunDir.open(settings.directory) as run:
        from swarm_node.runtime.start import start  # loads torch

        result = start(settings, run, swarm, Manner(embedded=True, quiet=quiet, callbacks=tuple(callbacks)))
    if result.not_used:
        warnings.warn(f"{result.run_dir}: {not_used(result.not_used)}", stacklevel=2)
    return result


def resolve(config: Config, quiet: bool = False) -> NodeConfig:
    """The whole configuration of a start, checked, with the settings of the run that its directory has. Raises
    UserError."""
    if isinstance(config, str | Path):
        layers = list(read_layers(Path(config), {}, {}, (), ()))
    else:
        given = config.model_dump(mode="json", exclude_unset=True) if isinstance(config, NodeConfig) else dict(config)
        layers = [("config", given)]
    member = any(table.get("swarm") is not None for _, table in layers)
    return load_run_config(layers, member, (lambda sentence: None) if quiet else print)
