"""The command line. What is slow to import is imported inside the command that needs it."""

from __future__ import annotations

import atexit
import gc
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from protocol.errors import printable
from swarm_node import __version__
from swarm_node.errors import NobodyReached, SwarmNodeError

if TYPE_CHECKING:
    from swarm_node.config import NodeConfig
    from swarm_node.storage.rundir import RunDir

PREFIX = "SWARM_NODE_"
NOBODY_REACHED = 1
"""Exit code of `status` and `join` when nobody of the swarm was reached in time: it may work later."""
USER_ERROR = 2
"""Exit code when only the user can mend it; the same that a wrong option gets."""
EPILOG = (
    "Every option is also an environment variable (SWARM_NODE_ROUNDS for --rounds), and so is every key of "
    "the configuration (SWARM_NODE_GRPO__LOSS for grpo.loss). Later wins: defaults, the settings that the run "
    "in this directory has, file, environment, options, --set."
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
bench_app = typer.Typer(help="Experiments in the simulator.", no_args_is_help=True)
app.add_typer(bench_app, name="bench", rich_help_panel="Look")
identity_app = typer.Typer(help="The key that a node is known by.", no_args_is_help=True)
app.add_typer(identity_app, name="identity", rich_help_panel="Swarm")


def option(name: str, help: str, variable: str = "", **settings: Any) -> Any:
    """An option that is no key of the configuration, so that its environment variable is read here: `variable`, by
    default named after it."""
    variable = PREFIX + (variable or name).removeprefix("--").replace("-", "_").upper()
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
    """Report what the package raises on purpose as one line, and end with exit code 2; 1 if nobody was reached."""
    try:
        yield
    except SwarmNodeError as error:
        message = printable(str(error))
        typer.echo(f"swarm-node: {message}", err=True)
        if json_output:
            typer.echo(json.dumps({"error": message}))
        raise typer.Exit(NOBODY_REACHED if isinstance(error, NobodyReached) else USER_ERROR) from None


def typed(context: typer.Context, parameter: str) -> bool:
    """Whether it was given on the command line, not by an environment variable."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


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


def resolve_run(file: Path | None, sets: list[str] | None, flags: Mapping[str, object], member: bool) -> NodeConfig:
    """As `resolve`, for a start in a directory that may have a run, whose own settings come first."""
    from swarm_node.config import load_run_config

    return load_run_config(file, os.environ, flags, sets or [], member, lambda text: typer.echo(text, err=True))


def print_config(config: NodeConfig, json_output: bool) -> None:
    from swarm_node.config import dump_toml

    typer.echo(config.model_dump_json(indent=2) + "\n" if json_output else dump_toml(config), nl=False)


def joined_run(run_dir: str | None) -> RunDir:
    """The directory that `join` would use."""
    from swarm_node.storage.rundir import RunDir

    return RunDir(resolve(None, None, {"run_dir": run_dir, "swarm": "any"}).directory)


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", callback=show_version, is_eager=True),
    ] = False,
) -> None:
    pass


# Parameters that are keys of the configuration: their environment variables are read with it.
Name = Annotated[str | None, typer.Option(metavar="NAME", help="This node's name for people.")]
Model = Annotated[str | None, typer.Option(metavar="PATH|ID", help="Local path or hub id of a causal language model.")]
Tasks = Annotated[list[str] | None, typer.Option(metavar="NAME|FILE", help=TASKS_HELP)]
Rounds = Annotated[int | None, typer.Option(help="Rounds in total, counted over resumptions.")]
Minutes = Annotated[float | None, typer.Option(help="Stop after this many minutes.")]
RunDirectory = Annotated[
    str | None, typer.Option("--run-dir", metavar="DIR", help="Where the run lives; running again resumes it.")
]
Seed = Annotated[int | None, typer.Option(help="Root of all randomness.")]
Stages = Annotated[int | None, typer.Option(help="Stages that the policy is cut into, one for each machine.", min=1)]
Lora = Annotated[
    bool | None,
    typer.Option(help="Train a LoRA adapter, or all weights; by default an adapter above 100M parameters."),
]
SWARM_HELP = "Manifest file, its https address, or a swarm:// link; by default that of the run, or $SWARM_NODE_SWARM."
SwarmName = Annotated[str | None, typer.Argument(metavar="SWARM", help=SWARM_HELP)]
NETWORK = "Network"
OF_A_SWARM = "Merging a swarm"
Listen = Annotated[
    str | None,
    typer.Option(metavar="IP", help="Address to listen on; 127.0.0.1 = this machine only.", rich_help_panel=NETWORK),
]
Announce = Annotated[
    list[str] | None,
    typer.Option(
        metavar="IP|HOST",
        help="Public address of this machine, where its router forwards the ports. Repeatable.",
        rich_help_panel=NETWORK,
    ),
]
Port = Annotated[
    int | None, typer.Option(help="TCP port; the next free one if it is taken; 0 = any.", rich_help_panel=NETWORK)
]
GossipPort = Annotated[int | None, typer.Option(help="TCP port of gossip, likewise.", rich_help_panel=NETWORK)]
Bootstrap = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ADDR",
        help="Address of a peer to begin with, besides the swarm's own. Repeatable.",
        rich_help_panel=NETWORK,
    ),
]
Relay = Annotated[
    bool | None,
    typer.Option("--relay", help="Pass on others' traffic to peers that nobody can reach.", rich_help_panel=NETWORK),
]
CLOUD = "Cloud"
Spot = Annotated[
    str | None,
    typer.Option(
        metavar="auto|aws|gcp|azure|off",
        help="Whose notices, that it takes this machine back, to listen for; by default those of the cloud it is in.",
        rich_help_panel=CLOUD,
    ),
]
CheckpointTo = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Copy checkpoints there (file://, s3://, gs://, az://), and begin from there.",
        rich_help_panel=CLOUD,
    ),
]
HealthPort = Annotated[
    int | None,
    typer.Option(help="TCP port of /healthz and, for Prometheus, /metrics; 0 = none.", rich_help_panel=CLOUD),
]
Log = Annotated[
    list[str] | None,
    typer.Option(
        metavar="tensorboard|wandb|trackio",
        help="Send each round's numbers there too, besides metrics.jsonl. Repeatable.",
    ),
]
PricePerHour = Annotated[
    float | None,
    typer.Option(
        metavar="PRICE",
        help="What this machine costs an hour, in any currency: metrics then say what training costs.",
        rich_help_panel=CLOUD,
    ),
]
GUEST = "Good guest"
MaxCpu = Annotated[
    float | None,
    typer.Option(
        metavar="PERCENT",
        help="Most CPU, in percent of the cores that the node may use (a container's quota counts).",
        rich_help_panel=GUEST,
    ),
]
MaxMemory = Annotated[
    float | None,
    typer.Option(
        metavar="GIB", help="Most memory; a node that would take more says so and ends.", rich_help_panel=GUEST
    ),
]
MaxUpload = Annotated[
    float | None, typer.Option(metavar="MBIT/S", help="Most that it sends; 0 = no limit.", rich_help_panel=GUEST)
]
MaxDownload = Annotated[
    float | None, typer.Option(metavar="MBIT/S", help="Most that it receives; 0 = no limit.", rich_help_panel=GUEST)
]
Nice = Annotated[
    int | None, typer.Option(help="Priority of its processes; 19 = after everything else.", rich_help_panel=GUEST)
]
QuietHours = Annotated[
    str | None,
    typer.Option(metavar="FROM-TO", help="Paused then, local time: 22:00-07:00.", rich_help_panel=GUEST),
]
PauseOn = Annotated[
    list[str] | None,
    typer.Option(
        metavar="battery|hot|owner",
        help="Paused while the machine runs on its battery, is hot or is in use. Repeatable.",
        rich_help_panel=GUEST,
    ),
]
DryRun = Annotated[
    bool,
    option("--dry-run", "Print the resolved configuration and exit.", rich_help_panel="Configuration"),
]


# --------------------------------------------------------------------- train


@app.command(rich_help_panel="Train")
def local(
    config: ConfigFile = None,
    model: Model = None,
    tasks: Tasks = None,
    rounds: Rounds = None,
    minutes: Minutes = None,
    run_dir: RunDirectory = None,
    seed: Seed = None,
    lora: Lora = None,
    stages: Annotated[
        int | None, typer.Option(help="Stages that the policy is cut into, each in a process of its own.", min=1)
    ] = None,
    spot: Spot = None,
    checkpoint_to: CheckpointTo = None,
    health_port: HealthPort = None,
    price_per_hour: PricePerHour = None,
    log: Log = None,
    max_cpu: MaxCpu = None,
    max_memory: MaxMemory = None,
    nice: Nice = None,
    quiet_hours: QuietHours = None,
    pause_on: PauseOn = None,
    sets: Sets = None,
    dry_run: DryRun = False,
    json_output: Json = False,
) -> None:
    """Train on this machine alone. Ctrl-C saves and leaves; `swarm-node local --run-dir DIR` goes on, with the
    settings that the run has, and with those that you give besides."""
    with user_errors(json_output):
        flags = {
            "model": model,
            "tasks": split_names(tasks),
            "rounds": rounds,
            "minutes": minutes,
            "run_dir": run_dir,
            "seed": seed,
            "lora": lora,
            "stages": stages,
            "spot": spot,
            "checkpoint_to": checkpoint_to,
            "health_port": health_port,
            "price_per_hour": price_per_hour,
            "log": split_names(log),
            "max_cpu": max_cpu,
            "max_memory": max_memory,
            "nice": nice,
            "quiet_hours": quiet_hours,
            "pause_on": split_names(pause_on),
        }
        resolved = resolve_run(config, sets, flags, member=False)
        if dry_run:
            print_config(resolved, json_output)
            return
        from swarm_node.runtime.limits import be_nice

        be_nice(resolved.guest)
        from swarm_node.runtime.loop import run_local

        raise typer.Exit(run_local(resolved, json_output))


@app.command(rich_help_panel="Train")
def join(
    swarm: SwarmName = None,
    config: ConfigFile = None,
    name: Name = None,
    model: Model = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME|FILE", help="Play only these of the swarm's tasks; a question file you have of it."),
    ] = None,
    own: Annotated[int | None, typer.Option(help="Own groups in each round (I).")] = None,
    foreign: Annotated[int | None, typer.Option(help="Other peers' groups in each round (J).")] = None,
    record: Annotated[
        bool | None, typer.Option("--record", help="Write what was offered and chosen to offers.jsonl.")
    ] = None,
    rounds: Rounds = None,
    minutes: Minutes = None,
    run_dir: RunDirectory = None,
    seed: Seed = None,
    lora: Lora = None,
    stages: Stages = None,
    crew: Annotated[str | None, typer.Option(metavar="NAME", help="Of the machines that hold one policy.")] = None,
    stage: Annotated[
        str | None, typer.Option(metavar="auto|K", help="Which stage this machine holds; 0 drives the others.")
    ] = None,
    listen: Listen = None,
    announce: Announce = None,
    port: Port = None,
    gossip_port: GossipPort = None,
    bootstrap: Bootstrap = None,
    dial_only: Annotated[
        bool | None,
        typer.Option("--dial-only", help="Never listen: for machines that nobody can reach.", rich_help_panel=NETWORK),
    ] = None,
    relay: Relay = None,
    spot: Spot = None,
    checkpoint_to: CheckpointTo = None,
    health_port: HealthPort = None,
    price_per_hour: PricePerHour = None,
    log: Log = None,
    max_cpu: MaxCpu = None,
    max_memory: MaxMemory = None,
    max_upload: MaxUpload = None,
    max_download: MaxDownload = None,
    nice: Nice = None,
    quiet_hours: QuietHours = None,
    pause_on: PauseOn = None,
    sets: Sets = None,
    dry_run: DryRun = False,
    json_output: Json = False,
) -> None:
    """Train as a member of a swarm, on your own answers and on others'. Needs nobody: alone, it goes on alone.

    `swarm-node join --run-dir DIR` goes on with a run, in its swarm and with its settings."""
    with user_errors(json_output):
        flags = {
            "swarm": swarm,
            "name": name,
            "model": model,
            "tasks": split_names(tasks),
            "own": own,
            "foreign": foreign,
            "record": record,
            "rounds": rounds,
            "minutes": minutes,
            "run_dir": run_dir,
            "seed": seed,
            "lora": lora,
            "stages": stages,
            "crew": crew,
            "stage": int(stage) if stage is not None and stage.isdecimal() else stage,
            "listen": listen,
            "announce": split_names(announce),
            "port": port,
            "gossip_port": gossip_port,
            "bootstrap": split_names(bootstrap),
            "dial_only": dial_only or None,
            "relay": relay,
            "spot": spot,
            "checkpoint_to": checkpoint_to,
            "health_port": health_port,
            "price_per_hour": price_per_hour,
            "log": split_names(log),
            "max_cpu": max_cpu,
            "max_memory": max_memory,
            "max_upload": max_upload,
            "max_download": max_download,
            "nice": nice,
            "quiet_hours": quiet_hours,
            "pause_on": split_names(pause_on),
        }
        resolved = resolve_run(config, sets, flags, member=True)
        if dry_run:
            print_config(resolved, json_output)
            return
        from swarm_node.swarm.links import swarm_to_join

        found = swarm_to_join(resolved)  # before torch is loaded: a mistyped name is answered at once
        from swarm_node.runtime.limits import be_nice

        be_nice(resolved.guest)
        from swarm_node.runtime.loop import run_join

        raise typer.Exit(run_join(resolved, found, json_output))


@app.command(rich_help_panel="Train")
def pause(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
    for_: Annotated[
        str | None, option("--for", "For so long, as 2h, 90m or 1d12h; by default until `resume`.", metavar="TIME")
    ] = None,
) -> None:
    """Pause a run: its node finishes what it computes just now, then waits. In a swarm it stays a member."""
    with user_errors():
        import time

        from swarm_node.runtime.limits import pause, seconds_of
        from swarm_node.storage.rundir import RunDir

        typer.echo(pause(RunDir(run), None if for_ is None else seconds_of(for_), time.time()))


@app.command(rich_help_panel="Train")
def resume(run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")]) -> None:
    """Have a paused run go on."""
    with user_errors():
        from swarm_node.runtime.limits import resume
        from swarm_node.storage.rundir import RunDir

        typer.echo(resume(RunDir(run)))


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
        from swarm_node.cli.commands.starter import make_starter

        typer.echo(make_starter(out, layers=layers, hidden=hidden, steps=steps, seed=seed))


# --------------------------------------------------------------------- swarm


@app.command(rich_help_panel="Swarm")
def new(
    name: Annotated[str, option("--name", "The swarm's name for people.", metavar="NAME")] = "swarm",
    config: ConfigFile = None,
    tasks: Annotated[
        list[str] | None, typer.Option(metavar="NAME|FILE|URL", help=TASKS_HELP + " Or the https address of one.")
    ] = None,
    model: Annotated[
        str | None,
        option(
            "--model",
            "Model that members train unless they choose another, and give to each other where there is no hub: a "
            "local path or hub id.",
            metavar="PATH|ID",
        ),
    ] = None,
    licence: Annotated[str, option("--licence", "Licence of the question files (SPDX).", metavar="ID")] = "",
    expected_peers: Annotated[
        int, option("--expected-peers", "Peers expected: decides how many gossip topics they share.", min=1, max=32_768)
    ] = 32,
    bootstrap: Bootstrap = None,
    max_age_s: Annotated[
        float, option("--max-age-s", "Answers older than this are refused.", min=10, max=86_400)
    ] = 600.0,
    groups_per_minute: Annotated[
        int, option("--groups-per-minute", "What one peer may publish.", min=1, max=4096)
    ] = 1200,
    max_answer_tokens: Annotated[
        int, option("--max-answer-tokens", "Longer answers are not shared.", min=1, max=16_384)
    ] = 4096,
    averaging_period_s: Annotated[
        float,
        option("--averaging-period-s", "Rounds of those that average weights last this long.", min=0.1, max=86_400),
    ] = 60.0,
    out: Annotated[
        Path | None, option("--out", "New file for the manifest; by default <name>.toml.", metavar="FILE")
    ] = None,
    sets: Sets = None,
    json_output: Json = False,
) -> None:
    """Make a swarm: write its manifest, print the link to join it. Then run `swarm-node bootstrap` on the manifest."""
    with user_errors(json_output):
        resolved = resolve(config, sets, {"tasks": split_names(tasks), "bootstrap": split_names(bootstrap)})
        from protocol.manifest import ManifestLimits
        from swarm_node.swarm.links import join_link
        from swarm_node.swarm.manifests import make_manifest, write_manifest

        described = None
        if model:
            from swarm_node.swarm.base_weights.describing import describe_model

            described = describe_model(model)
        path = out or Path(f"{name}.toml")
        limits = ManifestLimits(
            max_age_s=max_age_s, groups_per_minute=groups_per_minute, max_answer_tokens=max_answer_tokens
        )
        manifest = make_manifest(
            name,
            resolved.tasks,
            expected_peers,
            resolved.network.bootstrap,
            licence,
            limits,
            averaging_period_s,
            described,
        )
        write_manifest(manifest, path)
        link = join_link(manifest.swarm_id, [], manifest.bootstrap)
        if json_output:
            typer.echo(json.dumps({"swarm": manifest.swarm_id, "manifest": str(path), "link": link}))
            return
        typer.echo(f"wrote {path}\nswarm id {manifest.swarm_id}\n{link}")
        if not manifest.bootstrap:
            typer.echo(f"nobody is there yet: `swarm-node bootstrap {path}` prints the link with an address", err=True)


@app.command(rich_help_panel="Swarm")
def bootstrap(
    swarm: SwarmName = None,
    config: ConfigFile = None,
    name: Name = None,
    tasks: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="Question file of the swarm, to hand it to members.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="PATH", help="The swarm's model, to hand it to members who lack it.")
    ] = None,
    run_dir: RunDirectory = None,
    listen: Listen = None,
    announce: Announce = None,
    port: Port = None,
    gossip_port: GossipPort = None,
    bootstrap: Bootstrap = None,
    relay: Relay = None,
    max_memory: MaxMemory = None,
    max_upload: MaxUpload = None,
    max_download: MaxDownload = None,
    nice: Nice = None,
    health_port: HealthPort = None,
    sets: Sets = None,
) -> None:
    """Be where others join: a member without a model, that prints the link. Ctrl-C leaves."""
    with user_errors():
        flags = {
            "swarm": swarm,
            "name": name,
            "tasks": split_names(tasks),
            "model": model,
            "run_dir": run_dir,
            "listen": listen,
            "announce": split_names(announce),
            "port": port,
            "gossip_port": gossip_port,
            "bootstrap": split_names(bootstrap),
            "relay": relay,
            "max_memory": max_memory,
            "max_upload": max_upload,
            "max_download": max_download,
            "nice": nice,
            "health_port": health_port,
        }
        resolved = resolve(config, sets, flags)
        from swarm_node.runtime.limits import be_nice

        be_nice(resolved.guest)
        from swarm_node.runtime.bootstrap import run_bootstrap

        raise typer.Exit(run_bootstrap(resolved))


@app.command(rich_help_panel="Swarm")
def status(
    target: Annotated[
        str | None, typer.Argument(metavar="RUN|SWARM", help="Run directory or swarm; by default the newest run.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Show who is there, what was admitted of them, and why the rest was not."""
    with user_errors(json_output):
        from swarm_node.cli.commands.status import show_status

        show_status(target, resolve(None, None, {}).network, json_output)


@app.command(rich_help_panel="Swarm")
def doctor(
    context: typer.Context,
    target: Annotated[
        str | None, typer.Argument(metavar="RUN|SWARM", help="Run directory or swarm; by default this machine.")
    ] = None,
    config: ConfigFile = None,
    sets: Sets = None,
    json_output: Json = False,
) -> None:
    """Find out what keeps this machine from being a good member, and what to do. Exit code 1 if something does."""
    with user_errors(json_output):
        from swarm_node.cli.commands.doctor import examine
        from swarm_node.errors import UserError
        from swarm_node.storage.rundir import RunDir

        if target and RunDir(target).exists and (sets or typed(context, "config")):
            raise UserError(f"--config and --set are not for a run: {target} is examined with its own config.toml")
        raise typer.Exit(examine(target, resolve(config, sets, {}), json_output))


@identity_app.command("show")
def show_identity(run_dir: RunDirectory = None) -> None:
    """Print the peer id of a run."""
    with user_errors():
        from swarm_node.cli.commands.identity import show_identity as show

        typer.echo(show(joined_run(run_dir)))


@identity_app.command("new")
def new_identity(run_dir: RunDirectory = None) -> None:
    """Make a key for a run that has none, and print its peer id. Never replaces one."""
    with user_errors():
        from swarm_node.cli.commands.identity import new_identity as make

        typer.echo(make(joined_run(run_dir)))


# --------------------------------------------------------------------- use


@app.command("eval", rich_help_panel="Use")
def evaluate(
    target: Annotated[str, typer.Argument(metavar="RUN|MODEL", help="Run directory, model path or hub id.")],
    tasks: Annotated[
        list[str] | None, option("--tasks", TASKS_HELP + " By default those of the run.", metavar="NAME|FILE")
    ] = None,
    samples: Annotated[
        int | None, option("--samples", "Samples a question. By default as many as the run; else 8.", min=1)
    ] = None,
    questions: Annotated[
        int | None, option("--questions", "Held-out questions, over all tasks. By default as many as the run.", min=1)
    ] = None,
    json_output: Json = False,
) -> None:
    """Measure pass@1 and pass@k on held-out questions."""
    with user_errors(json_output):
        from swarm_node.cli.commands.evaluate import main as evaluate_target

        raise typer.Exit(evaluate_target(target, split_names(tasks), samples, questions, json_output))


@app.command(rich_help_panel="Use")
def export(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN…", help="Run directory; of a crew, as many as have all stages.")
    ],
    out: Annotated[Path, typer.Argument(help="New directory for the model.")],
) -> None:
    """Write the trained model for transformers (or PEFT, if it is an adapter)."""
    with user_errors():
        from swarm_node.cli.commands.export import export_run

        export_run(runs, out)


@app.command(rich_help_panel="Use")
def merge(
    context: typer.Context,
    sources: Annotated[
        list[str],
        typer.Argument(metavar="RUN…|SWARM", help="Run directories, two or more; or a swarm, as `join` takes it."),
    ],
    out: Annotated[Path, option("--out", "New directory for the model.", metavar="DIR")],
    method: Annotated[
        Literal["uniform", "task-arithmetic"],
        option(
            "--method",
            "The mean of the weights; or the start plus SCALE times the sum of what each run changed, clipped to the "
            "median length.",
        ),
    ] = "uniform",
    scale: Annotated[
        float | None,
        option("--scale", "Of task arithmetic; by default the best of a few, on half of the held-out questions."),
    ] = None,
    questions: Annotated[
        int | None,
        option("--questions", "Held-out questions, over all tasks; 0 = none. By default as many as the run.", min=0),
    ] = None,
    cohort: Annotated[
        str | None,
        option(
            "--cohort",
            "Of a swarm: whose weights; by default the largest of this model.",
            rich_help_panel=OF_A_SWARM,
        ),
    ] = None,
    without: Annotated[
        list[str] | None,
        option(
            "--without",
            "Of a swarm: member to leave out, by its name or the last 8 characters (or more) of its peer id. "
            "Repeatable.",
            metavar="PEER",
            rich_help_panel=OF_A_SWARM,
        ),
    ] = None,
    timeout: Annotated[
        float,
        option(
            "--timeout",
            "Of a swarm: seconds to find members, and as many for all weights to arrive.",
            min=1,
            rich_help_panel=OF_A_SWARM,
        ),
    ] = 1800.0,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="PATH|ID",
            help="Of a swarm: the model that its members began with.",
            rich_help_panel=OF_A_SWARM,
        ),
    ] = None,
    config: ConfigFile = None,
    sets: Sets = None,
    json_output: Json = False,
) -> None:
    """Make one model out of runs that began with the same one, or out of what the members of a swarm have now, and
    measure it against them on held-out questions.

    Members go on training. --model, --config and --set say how they load their model, as for `join`; the config.toml of
    any member's run will do.
    """
    with user_errors(json_output):
        from swarm_node.cli.commands.merge_sources import check_sources, is_swarm
        from swarm_node.errors import UserError

        of_a_swarm = cohort or without or model or sets or typed(context, "config")
        if of_a_swarm and not any(map(is_swarm, sources)):
            raise UserError(
                "--cohort, --without, --model and --set are for merging a swarm, and so is --config: a run has its own "
                "settings"
            )
        check_sources(sources, out)
        if is_swarm(sources[0]):
            from swarm_node.cli.commands.merge_swarm import main as merge_members

            resolved, left_out = resolve(config, sets, {"model": model}), split_names(without) or []
            options = method, scale, questions, json_output, cohort, left_out
            raise typer.Exit(merge_members(sources[0], resolved, out, timeout, *options))
        from swarm_node.cli.commands.merge import main as merge_sources

        raise typer.Exit(merge_sources(sources, out, method, scale, questions, json_output))


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


@app.command(rich_help_panel="Look")
def dashboard(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUN…", help="Run directories, or one that holds runs; by default those below runs/."),
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
        str, option("--host", "Address to listen on; any but 127.0.0.1 gets a token.", metavar="IP")
    ] = "127.0.0.1",
) -> None:
    """Show runs on a web page, live, several side by side. Ctrl-C ends it, not the runs."""
    with user_errors():
        from swarm_node.observability.dashboard.serve import serve

        serve(runs or [], host, port, typer.echo)


@config_app.command()
def show(config: ConfigFile = None, sets: Sets = None, json_output: Json = False) -> None:
    """Print the resolved configuration that `local` would use for a new run."""
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


@bench_app.command("sweep")
def bench_sweep(
    grid: Annotated[Path, typer.Argument(metavar="GRID", help="Grid file (TOML); docs/sharing.md shows one.")],
    out: Annotated[
        Path | None,
        option("--out", "Table to write, or to go on with; by default the grid's name with .csv.", metavar="FILE"),
    ] = None,
) -> None:
    """Run every combination of settings in the simulator; one tidy CSV, taken up where it was."""
    with user_errors():
        from swarm_node.cli.commands.sweep import sweep

        sweep(grid, out or grid.with_suffix(".csv"), typer.echo)


def main() -> None:
    """Entry point of the `swarm-node` script."""
    atexit.register(gc.freeze)  # or Python, as it ends, looks for cycles in all that torch has loaded: 1.5 CPU seconds
    app(prog_name="swarm-node")
