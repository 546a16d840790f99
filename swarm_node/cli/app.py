"""The command line: every command, and how errors end it.

app -> train swarm model look    one function a command; what is slow to import is imported inside
            -> options           from a function's settings to typer's parameters
            -> commands/         what the longer commands do
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from swarm_node import __version__
from swarm_node.cli import look, model, swarm, train
from swarm_node.cli.began import where_it_began
from swarm_node.cli.options import SettingsCommand, early_log, to_show, with_settings, with_verbosity
from swarm_node.config.keys import VARIABLE_PREFIX
from swarm_node.errors import TEMPORARY, USER_ERROR, NobodyReached, PluginError, SwarmNodeError, TemporaryError
from swarm_node.install import REPOSITORY
from swarm_node.runtime.waiting import wait_passively
from swarm_node.storage.utf8 import check_utf8
from swarm_protocol.errors import printable, visible

NOBODY_REACHED = 1  # exit code of `status` and `join` if no member was reached in time: a later try may succeed
COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    "Train": {
        "local": train.local,
        "join": train.join,
        "resume": train.resume,
        "pause": look.pause,
        "unpause": look.unpause,
        "stop": look.stop,
        "sweep": train.sweep,
        "starter": model.starter,
        "fetch": model.get_model,
    },
    "Swarm": {
        "new": swarm.new,
        "bootstrap": swarm.bootstrap,
        "status": swarm.status,
        "doctor": swarm.doctor,
        "identity show": swarm.show_identity,
        "identity new": swarm.new_identity,
        "identity export": swarm.export_identity,
        "identity import": swarm.import_identity,
    },
    "Use": {"eval": model.evaluate_model, "export": model.export, "merge": model.merge_models, "bench": model.bench},
    "Look": {
        "tasks": look.list_tasks,
        "samples": look.samples,
        "dashboard": look.dashboard,
        "compare": look.compare,
        "config show": look.show_config,
        "config validate": look.validate,
        "config reference": look.reference,
    },
}
"""Panel of the help -> words of a command -> its function."""
GROUPS = {
    "config": "Show, check or document the configuration.",
    "identity": "The key that identifies a node.",
}
"""First word of several commands -> explanation."""
EPILOG = (
    "Every option is also an environment variable (SWARM_NODE_ROUNDS for --rounds), and so is every key of "
    "the configuration (SWARM_NODE_GRPO__LOSS for grpo.loss). With _FILE at its end, it names a file with the value. "
    "Later sources win: defaults, settings of the run in this directory, file, environment, options, --set. "
    f"Pages that messages name as docs/… are at {REPOSITORY}."
)


def _reporting(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with errors of the package as one line, and an exit code."""

    @functools.wraps(command)
    def run(**values: Any) -> None:
        try:
            check_utf8(values)
            check_utf8({name: value for name, value in os.environ.items() if name.startswith(VARIABLE_PREFIX)})
            command(**values)
        except BaseException as error:  # a plugin may raise SystemExit
            if (told := to_show(error)) is None:
                raise
            _tell(told, command.__name__, values)
            raise typer.Exit(_exit_code(told)) from None

    return run


def _exit_code(error: SwarmNodeError) -> int:
    if isinstance(error, TemporaryError):
        return TEMPORARY
    return NOBODY_REACHED if isinstance(error, NobodyReached) else USER_ERROR


def _tell(error: SwarmNodeError, command: str, values: Mapping[str, Any]) -> None:
    """Show an error: one line, and the traceback of the user's own code if that failed. In a log of JSON lines, that is
    one of them."""
    message = printable(f"{error}{where_it_began(str(error), values)}")
    for line in error.trace if isinstance(error, PluginError) else []:
        typer.echo(visible(line), err=True)
    show = early_log(command, values)
    if show is None:
        typer.echo(f"swarm-node: {message}", err=True)
    elif not error.logged:
        show(message, "error", "error")
    if values.get("json_output"):
        typer.echo(json.dumps({**(error.document or {}), "error": message}))


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"swarm-node {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    pass


def _application() -> typer.Typer:
    whole = typer.Typer(
        help="Train a language model on this machine by reinforcement learning, alone or in a peer-to-peer swarm.",
        epilog=EPILOG,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    whole.callback()(_root)
    groups = {name: typer.Typer(help=text, no_args_is_help=True) for name, text in GROUPS.items()}
    for panel, commands in COMMANDS.items():
        for words, function in commands.items():
            first, _, second = words.partition(" ")
            command = _reporting(with_verbosity(with_settings(function, first)))
            if second:
                groups[first].command(second, cls=SettingsCommand)(command)
            else:
                whole.command(first, cls=SettingsCommand, rich_help_panel=panel)(command)
    for name, group in groups.items():
        panel = next(panel for panel, commands in COMMANDS.items() if any(w.startswith(f"{name} ") for w in commands))
        whole.add_typer(group, name=name, rich_help_panel=panel)
    return whole


app = _application()


def main() -> None:
    """Entry point of the `swarm-node` script."""
    wait_passively()
    atexit.register(gc.freeze)  # or Python, as it ends, looks for cycles in all that torch has loaded: 1.5 CPU seconds
    app(prog_name="swarm-node")
