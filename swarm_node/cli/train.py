"""Commands that train."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from swarm_node.cli.options import CommandSettings, DryRun, Json, note_for, option, refusals_in, starting
from swarm_node.config import NodeConfig, dump_toml
from swarm_node.errors import TemporaryError, UserError
from swarm_node.install import check_extra
from swarm_node.storage.going_on import going_on
from swarm_node.storage.nearby import names_near
from swarm_node.storage.rundir import BOOTSTRAP, RunDir

INTERRUPTED = 130  # exit code after Ctrl-C, as of a shell
MOST_NAMED = 8  # runs that `resume` names, the newest
MOST_COMPARED = 6  # settings whose tables of figures fit side by side


def local(settings: CommandSettings, dry_run: DryRun = False, json_output: Json = False) -> None:
    """Train on this machine alone. Ctrl-C saves and ends.

    `swarm-node resume DIR` goes on with the run later."""
    _train(settings.load_run(member=False, err=json_output or dry_run), False, dry_run, json_output)


def join(settings: CommandSettings, dry_run: DryRun = False, json_output: Json = False) -> None:
    """Train as a member of a swarm, on your own answers and on those of others. Without others, it trains alone.

    `swarm-node resume DIR` goes on with the run later, in its swarm."""
    check_extra("swarm", "a swarm")
    _train(settings.load_run(member=True, err=json_output or dry_run), True, dry_run, json_output)


def resume(
    settings: CommandSettings,
    run: Annotated[Path | None, typer.Argument(metavar="RUN", help="Directory of a run, or of a bootstrap.")] = None,
    dry_run: DryRun = False,
    json_output: Json = False,
) -> None:
    """Go on with a run that has stopped, alone or in its swarm, with its own settings and those that you add.

    A bootstrap starts again at its address, with its key."""
    if run is None:
        raise UserError(f"which run? {_runs_here()}")
    _check_stopped(RunDir(run))
    is_bootstrap = RunDir(run).read_role() == BOOTSTRAP
    config = settings.load_again(run, err=json_output or dry_run or is_bootstrap)
    if is_bootstrap and not dry_run:
        _bootstrap_again(config, json_output)
    _train(config, config.swarm is not None, dry_run, json_output)


def _bootstrap_again(config: NodeConfig, json_output: bool) -> NoReturn:
    """Start a bootstrap again, without a page. Raises UserError."""
    if json_output:
        raise UserError(f"{config.directory} is of a bootstrap, which ends with no document: leave out --json")
    check_extra("swarm", "a bootstrap")
    from swarm_node.runtime.bootstrap import run_bootstrap
    from swarm_node.runtime.limits import be_nice

    be_nice(config.resources)
    with refusals_in(config, err=True):
        raise typer.Exit(run_bootstrap(config))


def _train(config: NodeConfig, member: bool, dry_run: bool, json_output: bool) -> None:
    if dry_run:
        print_config(config, json_output)
        return
    from swarm_node.runtime.shutdown import NOT_BEGUN, leaving_at_once

    run = RunDir(config.directory)
    tell = note_for(config, "stop", json_output)  # made here, since a signal may come in the middle of its import

    def leave() -> None:
        run.abandon()
        tell(NOT_BEGUN)

    with leaving_at_once(leave), refusals_in(config, json_output):
        _start(config, run, member, json_output)


def _start(config: NodeConfig, run: RunDir, member: bool, json_output: bool) -> None:
    from swarm_node.runtime.extras import with_extras

    config = with_extras(config, note_for(config, "settings", json_output))
    from swarm_node.policy.model_path import is_particular
    from swarm_node.runtime.preflight import check_material, check_run_place, with_commits
    from swarm_node.swarm.links import swarm_to_join

    check_run_place(config, member)
    found = swarm_to_join(config, note_for(config, "note", json_output)) if member else None
    is_chosen = "model" in config.policy.model_fields_set and is_particular(config.policy.model)
    own_model = found is None or is_chosen  # a bare name may be that of the swarm's model, which members give
    check_material(config, own_tasks=found is None, own_model=own_model)
    config = with_commits(config)
    starting(note_for(config, "start", json_output))
    from swarm_node.observability.health import Health
    from swarm_node.runtime.callbacks import Manner
    from swarm_node.runtime.console import open_health
    from swarm_node.runtime.limits import be_nice, gentle_by_default, say_preset

    told = note_for(config, "settings", json_output)
    say_preset(config.resources, told)
    config = gentle_by_default(config, told) if member else config
    be_nice(config.resources)
    with run.take(), ExitStack() as stack:  # held from here on: `pause` and a second start see it while torch loads
        health = open_health(config, Health(), run, stack)
        health.identify(config.name or run.path.resolve().name, found.id if found else "")
        from swarm_node.runtime.start import start  # loads torch

        start(config, run, found, Manner(json_output, health=health))


def _runs_here() -> str:
    """The commands that go on with the runs below runs/, the newest first."""
    runs = [RunDir(path.parent) for path in Path("runs").glob("*/config.toml")]
    stopped = [run for run in runs if not run.in_use and run.read_role() != BOOTSTRAP]
    newest = sorted(stopped, key=lambda run: run.config.stat().st_mtime, reverse=True)
    commands = [way.command for run in newest if (way := going_on(run)).command][:MOST_NAMED]
    if not commands:
        return "none that can go on here is below runs/: `swarm-node resume RUN` takes the directory of one"
    return "below runs/ there are: " + ", ".join(f"`swarm-node {command}`" for command in commands)


def _check_stopped(run: RunDir) -> None:
    """Raise UserError unless `run` is one that can go on now."""
    if not run.exists:
        takes = "`swarm-node resume RUN` takes a run directory, such as runs/local"
        raise UserError(f"no run in {run.path}: {takes}{names_near(run.path)}")
    if run.in_use:
        paused = f"; `swarm-node unpause {run.quoted}` ends its pause" if run.paused.exists() else ""
        raise TemporaryError(f"{run.path} is running already, as process {run.holder}{paused}")


def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What to search (TOML); docs/experiments.md shows one.")],
    csv: Annotated[Path | None, option("--csv", "Write the curves as a table to this file.", metavar="FILE")] = None,
    png: Annotated[
        Path | None, option("--png", "Draw the curves into this file: .png, .svg or .pdf.", metavar="FILE")
    ] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", hidden=True, help="Refused: [config] has it.")] = None,
) -> None:
    """Run `local` over a grid of settings or a search with Optuna, several runs at a time. Ctrl-C saves and ends.

    The same command resumes it."""
    from swarm_node.cli.commands.compare import compare_runs, print_table
    from swarm_node.cli.commands.sweep import Sweep, table_of
    from swarm_node.observability.comparison_plot import check_picture

    if rounds is not None:
        raise UserError(f"a sweep takes no --rounds: {file} has them, as `rounds = {rounds}` in [config]")
    if png is not None:
        check_picture(png)
    whole = Sweep(file, typer.echo)
    try:
        settings = whole.run()
    except KeyboardInterrupt:
        typer.echo("stopped; the runs have saved, and the same command resumes them", err=True)
        raise typer.Exit(INTERRUPTED) from None
    settings.sort(
        key=lambda setting: bool(setting.failed)
    )  # numbered as in the comparison, which has the complete ones
    print_table("settings, the best first", *table_of(whole, settings))
    complete = [setting for setting in settings if not setting.failed]
    runs = [whole.directory(setting, seed) for setting in complete for seed in whole.plan.seeds]
    if runs and (len(complete) <= MOST_COMPARED or csv or png):
        compare_runs(runs, png, csv, False)
    if problems := [problem for setting in settings for problem in setting.failed]:
        raise UserError(f"failed runs: {len(problems)}; the same command tries them again. The first: {problems[0]}")


def print_config(config: NodeConfig, json_output: bool) -> None:
    """Print the configuration as TOML or JSON, with the tasks that a node asks here."""
    from swarm_node.runtime.extras import with_extras

    config = with_extras(config)
    as_json = json.dumps(config.model_dump(mode="json"), indent=2)
    typer.echo(f"{as_json}\n" if json_output else dump_toml(config), nl=False)
