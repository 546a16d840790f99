"""The command line. What is slow to import is imported inside the command that needs it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarm_node import __version__
from swarm_node.errors import SwarmNodeError

if TYPE_CHECKING:
    from swarm_node.config import NodeConfig

PREFIX = "SWARM_NODE_"
USER_ERROR = 2
"""Exit code when only the user can mend it; the same that a wrong option gets."""
EPILOG = (
    "Every option is also an environment variable (SWARM_NODE_ROUNDS for --rounds), and so is every key of "
    "the configuration (SWARM_NODE_GRPO__LOSS for grpo.loss). Later wins: defaults, file, environment, "
    "options, --set."
)

app = typer.Typer(
    help="One command makes this machine a peer that improves its own language model at verifiable tasks.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Show, check or document the configuration.", no_args_is_help=True)
app.add_typer(config_app, name="config", rich_help_panel="Look")


def option(name: str, help: str, **settings: Any) -> Any:
    """An option that is no key of the configuration, so that its environment variable is read here."""
    variable = PREFIX + name.removeprefix("--").replace("-", "_").upper()
    return typer.Option(name, envvar=variable, show_envvar=False, help=help, **settings)


TASKS_HELP = "Task, set of tasks (see `swarm-node tasks`) or question file .jsonl. Repeat it, or write a,b."
ConfigFile = Annotated[
    Path | None,
    option("--config", "Configuration file (TOML).", metavar="FILE", rich_help_panel="Configuration"),
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set any key of the configuration, for example grpo.loss=gspo. Repeatable; SWARM_NODE_SET takes "
        "several with spaces between, quoted as in a shell.",
        rich_help_panel="Configuration",
    ),
]
Json = Annotated[
    bool,
    option(
        "--json",
        'One JSON document on standard output, {"error": "…"} if it fails; all else on standard error.',
    ),
]


@contextmanager
def user_errors(json_output: bool = False) -> Iterator[None]:
    """Report what the package raises on purpose as one line, and end with exit code 2."""
    try:
        yield
    except SwarmNodeError as error:
        message = " ".join(str(error).split())
        typer.echo(f"swarm-node: {message}", err=True)
        if json_output:
            typer.echo(json.dumps({"error": message}))
        raise typer.Exit(USER_ERROR) from None


def show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"swarm-node {__version__}")
        raise typer.Exit


def split_names(given: list[str] | None) -> list[str] | None:
    """Values of a repeatable option, each of which may be several names with commas between."""
    return [name for text in given for part in text.split(",") if (name := part.strip())] if given else None


def resolve(file: Path | None, sets: list[str] | None, flags: Mapping[str, object]) -> NodeConfig:
    from swarm_node.config import load_config

    return load_config(file, os.environ, flags, sets or [])


def print_config(config: NodeConfig, json_output: bool) -> None:
    from swarm_node.config import dump_toml

    typer.echo(config.model_dump_json(indent=2) + "\n" if json_output else dump_toml(config), nl=False)


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", callback=show_version, is_eager=True),
    ] = False,
) -> None:
    pass


# --------------------------------------------------------------------- train


@app.command(rich_help_panel="Train")
def local(
    config: ConfigFile = None,
    model: Annotated[
        str | None, typer.Option(metavar="PATH|ID", help="Local path or hub id of a causal language model.")
    ] = None,
    tasks: Annotated[list[str] | None, typer.Option(metavar="NAME|FILE", help=TASKS_HELP)] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds in total, counted over resumptions.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Stop after this many minutes.")] = None,
    run_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where the run lives; running again resumes it.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Root of all randomness.")] = None,
    lora: Annotated[
        bool | None,
        typer.Option(help="Train a LoRA adapter, or all weights; by default an adapter above 100M parameters."),
    ] = None,
    sets: Sets = None,
    dry_run: Annotated[
        bool,
        option("--dry-run", "Print the resolved configuration and exit.", rich_help_panel="Configuration"),
    ] = False,
    json_output: Json = False,
) -> None:
    """Train on this machine alone. Ctrl-C saves and leaves; the same command resumes."""
    with user_errors(json_output):
        flags = {
            "model": model,
            "tasks": split_names(tasks),
            "rounds": rounds,
            "minutes": minutes,
            "run_dir": run_dir,
            "seed": seed,
            "lora": lora,
        }
        resolved = resolve(config, sets, flags)
        if dry_run:
            print_config(resolved, json_output)
            return
        from swarm_node.node import run_local

        raise typer.Exit(run_local(resolved, json_output))


@app.command(rich_help_panel="Train")
def starter(
    out: Annotated[Path, option("--out", "New directory for the model.", metavar="DIR")],
    layers: Annotated[int, option("--layers", "Transformer layers.", min=1)] = 2,
    hidden: Annotated[int, option("--hidden", "Width, a multiple of 32.", min=32)] = 128,
    steps: Annotated[int, option("--steps", "Training steps.", min=1)] = 500,
    seed: Annotated[int, option("--seed", "Root of all randomness.", min=0)] = 0,
) -> None:
    """Rebuild the starter policy, or a bigger one, from nothing."""
    with user_errors():
        from swarm_node.make_starter import make_starter

        typer.echo(make_starter(out, layers=layers, hidden=hidden, steps=steps, seed=seed))


# --------------------------------------------------------------------- use


@app.command("eval", rich_help_panel="Use")
def evaluate(
    target: Annotated[str, typer.Argument(metavar="RUN|MODEL", help="Run directory, model path or hub id.")],
    tasks: Annotated[
        list[str] | None, option("--tasks", TASKS_HELP + " By default those of the run.", metavar="NAME|FILE")
    ] = None,
    samples: Annotated[int, option("--samples", "Samples a question.", min=1)] = 8,
    questions: Annotated[
        int | None, option("--questions", "Held-out questions, over all tasks. By default as many as the run.", min=1)
    ] = None,
    json_output: Json = False,
) -> None:
    """Measure pass@1 and pass@k on held-out questions."""
    with user_errors(json_output):
        from swarm_node.evaluate import main as evaluate_target

        raise typer.Exit(evaluate_target(target, split_names(tasks), samples, questions, json_output))


@app.command(rich_help_panel="Use")
def export(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    out: Annotated[Path, typer.Argument(help="New directory for the model.")],
) -> None:
    """Write the trained model for transformers (or PEFT, if it is an adapter)."""
    with user_errors():
        from swarm_node.export import export_run

        export_run(run, out)


# --------------------------------------------------------------------- look


@app.command("tasks", rich_help_panel="Look")
def list_tasks(json_output: Json = False) -> None:
    """List the tasks that can be trained on, with an example of each."""
    with user_errors(json_output):
        from swarm_node.tasks.catalogue import describe

        entries = describe()
        if json_output:
            typer.echo(json.dumps([entry._asdict() for entry in entries], indent=2))
            return
        width = shutil.get_terminal_size((110, 1)).columns
        for entry in entries:
            head = f"{entry.name:<24} {','.join(entry.sets):<12} "
            typer.echo(head + shorten(entry.question, max(20, width - len(head)), placeholder=" …"))


@config_app.command()
def show(config: ConfigFile = None, sets: Sets = None, json_output: Json = False) -> None:
    """Print the resolved configuration that `local` would use."""
    with user_errors(json_output):
        print_config(resolve(config, sets, {}), json_output)


@config_app.command()
def validate(config: ConfigFile = None, sets: Sets = None, json_output: Json = False) -> None:
    """Check a configuration file, the environment and --set; exit code 2 if something is wrong."""
    with user_errors(json_output):
        resolve(config, sets, {})
        typer.echo(json.dumps({"valid": True}) if json_output else f"{config or 'the configuration'} is valid")


@config_app.command()
def reference() -> None:
    """Print every key with its type, default and meaning (Markdown)."""
    from swarm_node.config import config_reference

    typer.echo(config_reference(), nl=False)


def main() -> None:
    """Entry point of the `swarm-node` script."""
    app(prog_name="swarm-node")
