"""Commands that train."""

from __future__ import annotations

import typer

from swarm_node.cli.options import CommandSettings, DryRun, Json
from swarm_node.config import NodeConfig, dump_toml


def local(settings: CommandSettings, dry_run: DryRun = False, json_output: Json = False) -> None:
    """Train on this machine alone. Ctrl-C saves and ends.

    `swarm-node local --run-dir DIR` resumes the run, with its own settings and those that you add."""
    config = settings.load_run(member=False)
    if dry_run:
        print_config(config, json_output)
        return
    from swarm_node.runtime.limits import be_nice

    be_nice(config.resources)
    from swarm_node.runtime.start import run_local

    raise typer.Exit(run_local(config, json_output))


def join(settings: CommandSettings, dry_run: DryRun = False, json_output: Json = False) -> None:
    """Train as a member of a swarm, on your own answers and on those of others. Without others, it trains alone.

    `swarm-node join --run-dir DIR` resumes the run, in its swarm and with its settings."""
    config = settings.load_run(member=True)
    if dry_run:
        print_config(config, json_output)
        return
    from swarm_node.swarm.links import swarm_to_join

    found = swarm_to_join(config)  # before torch is loaded: a mistyped name is answered at once
    from swarm_node.runtime.limits import be_nice

    be_nice(config.resources)
    from swarm_node.runtime.start import run_join

    raise typer.Exit(run_join(config, found, json_output))


def print_config(config: NodeConfig, json_output: bool) -> None:
    """Print the configuration as TOML or JSON."""
    typer.echo(config.model_dump_json(indent=2) + "\n" if json_output else dump_toml(config), nl=False)
