"""Commands that look at runs, tasks and the configuration, or pause or stop a run."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from textwrap import shorten
from typing import Annotated

import typer

from swarm_node.cli.options import CommandSettings, Json, is_swarm, note, note_for, option, tasks_in
from swarm_node.cli.train import print_config
from swarm_node.config.writing import config_reference
from swarm_node.install import check_extra, extra_command, has_extra
from swarm_node.storage.rundir import RunDir

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")]


def pause(
    run: RunArgument,
    for_: Annotated[
        str | None, option("--for", "How long, as 2h, 90m or 1d12h; by default until `unpause`.", metavar="TIME")
    ] = None,
) -> None:
    """Pause a run: its node finishes its current computation, then waits. In a swarm it stays a member."""
    from swarm_node.runtime.pause import pause_run, seconds_of

    typer.echo(pause_run(RunDir(run), None if for_ is None else seconds_of(for_), time.time()))


def unpause(run: RunArgument) -> None:
    """End a pause: the node of the run goes on."""
    from swarm_node.runtime.pause import unpause_run

    typer.echo(unpause_run(RunDir(run)))


def stop(run: RunArgument) -> None:
    """Stop the node of a run as Ctrl-C does, and wait until it has saved and left."""
    from swarm_node.runtime.stop_request import stop_run

    typer.echo(stop_run(RunDir(run), note))


def list_tasks(
    settings: CommandSettings,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME|FILE", help="Task, set of tasks or question file (.jsonl, .csv, …), or hf:OWNER/NAME."
        ),
    ] = None,
    json_output: Json = False,
) -> None:
    """List the tasks to train on, with an example of each; or show ten questions of one, with a right answer."""
    config = settings.load()
    if name is not None:
        from swarm_node.cli.commands.samples import show_questions

        for line in show_questions(tasks_in([name]) or [], config, json_output):
            typer.echo(line)
        return
    from swarm_node.tasks.reasoning_gym import list_environments
    from swarm_node.tasks.sources import list_own

    all_there = has_extra("puzzles")
    entries = [*list_own(), *(list_environments() if all_there else [])]
    if json_output:
        typer.echo(json.dumps([entry._asdict() for entry in entries], indent=2))
        return
    width = shutil.get_terminal_size((110, 1)).columns
    for entry in entries:
        head = f"{entry.name:<24} {','.join(entry.sets):<12} "
        typer.echo(head + shorten(entry.question, max(20, width - len(head)), placeholder=" …"))
    if not all_there:
        lacking = "the tasks of reasoning-gym need the extra 'puzzles', which is not installed"
        typer.echo(f"{lacking}: {extra_command('puzzles')}")


def samples(
    run: RunArgument,
    worst: Annotated[
        bool, option("--worst/--newest", "Those with the least reward, or the newest (the default).", "WORST")
    ] = False,
    task: Annotated[str | None, option("--task", "Only of this task.", metavar="LABEL")] = None,
    peer: Annotated[
        str | None,
        option(
            "--peer",
            "Only of this member: its name or the last 4 or more characters of its peer id; `own` = of this node.",
            metavar="ID",
        ),
    ] = None,
    count: Annotated[int, option("--count", "Groups to show.", min=1)] = 5,
    prompt: Annotated[
        bool, option("--prompt/--question", "The prompt as the model gets it, or the question (the default).", "PROMPT")
    ] = False,
    json_output: Json = False,
) -> None:
    """Show questions with what was answered, and the reward of each answer."""
    from swarm_node.cli.commands.samples import find_samples, show_samples

    found = find_samples(RunDir(run), worst, task, peer, count)
    if json_output:
        typer.echo(json.dumps({"samples": found}))
        return
    for line in show_samples(found, prompt):
        typer.echo(line)


def dashboard(
    settings: CommandSettings,
    shown: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN|SWARM…",
            help="Run directories, one that holds runs, or a swarm by its link or manifest; by default the runs below "
            "runs/.",
        ),
    ] = None,
    port: Annotated[
        int | None,
        option(
            "--port",
            "TCP port; by default the first free one from 31380; 0 = any. Its variable is SWARM_NODE_DASHBOARD_PORT.",
            "DASHBOARD_PORT",
            min=0,
            max=65535,
        ),
    ] = None,
    host: Annotated[
        str, option("--host", "Address to listen on; any but 127.0.0.1 requires a token.", metavar="IP")
    ] = "127.0.0.1",
    public: Annotated[
        bool, option("--public", "Let everybody read it without a token: for pages of a swarm only, never for runs.")
    ] = False,
) -> None:
    """Show runs, or a swarm, on a web page, live and side by side. Ctrl-C ends the page, not the runs."""
    if any(map(is_swarm, shown or [])):
        check_extra("swarm", "a page of a swarm")
    from swarm_node.cli.commands.page import show_pages

    config = settings.load()
    say = note_for(config, "page") if config.log_format == "json" else typer.echo
    show_pages(shown or [], config.network, host, port, public, say)


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Run directories.")],
    png: Annotated[
        Path | None, option("--png", "Draw the curves into this file: .png, .svg or .pdf.", metavar="FILE")
    ] = None,
    csv: Annotated[Path | None, option("--csv", "Write the curves as a table to this file.", metavar="FILE")] = None,
    apart: Annotated[
        bool, option("--apart/--together", "Show runs that differ only by seed side by side.", "APART")
    ] = False,
    json_output: Json = False,
) -> None:
    """Compare runs: settings that differ, final figures, curves. Runs that differ only by seed are averaged, unless
    told otherwise."""
    from swarm_node.cli.commands.compare import compare_runs

    compare_runs(runs, png, csv, json_output, apart)


def show_config(settings: CommandSettings, json_output: Json = False) -> None:
    """Print the resolved configuration that `local` would use for a new run."""
    print_config(settings.load(), json_output)


def validate(settings: CommandSettings, json_output: Json = False) -> None:
    """Check a configuration file, the environment and --set; exit code 2 if something is wrong."""
    settings.load()
    typer.echo(json.dumps({"valid": True}) if json_output else f"{settings.file or 'the configuration'} is valid")


def reference() -> None:
    """Print every key with its type, default and meaning (Markdown)."""
    typer.echo(config_reference(), nl=False)
