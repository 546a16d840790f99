"""Commands about a swarm and its members."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarm_node.cli.options import CommandSettings, Json, note, option, refusals_in
from swarm_node.errors import UserError
from swarm_node.install import check_extra
from swarm_node.storage.rundir import RunDir

if TYPE_CHECKING:
    from swarm_protocol.manifest import Manifest

KeyFile = Annotated[Path, typer.Argument(metavar="FILE", help="File of a key, as `identity export` writes it.")]


def new(
    settings: CommandSettings,
    name: Annotated[str, option("--name", "The swarm's name for people.", metavar="NAME")] = "swarm",
    model: Annotated[
        str | None,
        option(
            "--model",
            "Model that members train unless they choose another. They give it to each other where there is no hub. "
            "With --answer, the starter if none is given.",
            metavar="PATH|ID",
        ),
    ] = None,
    licence: Annotated[str, option("--licence", "Licence of the question files (SPDX).", metavar="ID")] = "",
    expected_peers: Annotated[
        int, option("--expected-peers", "Peers expected. Decides how many gossip topics they share.", min=1, max=32_768)
    ] = 32,
    max_age_s: Annotated[
        float, option("--max-age-s", "Answers older than this are refused.", min=10, max=86_400)
    ] = 600.0,
    groups_per_minute: Annotated[
        int, option("--groups-per-minute", "Most groups that one peer may publish per minute.", min=1, max=4096)
    ] = 1200,
    max_answer_tokens: Annotated[
        int, option("--max-answer-tokens", "Longer answers are not shared.", min=1, max=16_384)
    ] = 4096,
    averaging_period_s: Annotated[
        float,
        option("--averaging-period-s", "Seconds of one outer round, for averaging weights.", min=0.1, max=86_400),
    ] = 10.0,
    out: Annotated[
        Path | None, option("--out", "New file for the manifest; by default <name>.toml.", metavar="FILE")
    ] = None,
    json_output: Json = False,
) -> None:
    """Create a swarm: write its manifest and print its join link. Then run `swarm-node bootstrap` on the manifest."""
    config = settings.load()
    from swarm_node.observability.wrapping import for_stream
    from swarm_node.swarm.links import join_link
    from swarm_node.swarm.manifests import make_manifest, put_beside, with_usual_columns, write_manifest
    from swarm_protocol.manifest import ManifestLimits

    path = out or Path(f"{name}.toml")
    limits = ManifestLimits(
        max_age_s=max_age_s, groups_per_minute=groups_per_minute, max_answer_tokens=max_answer_tokens
    )
    rest = {"limits": limits, "averaging_period_s": averaging_period_s, "bootstrap": config.network.bootstrap}
    rest["answer"] = config.rewards.answer
    if model or config.rewards.answer != "any":  # a form needs a model that writes it: the starter does, now and then
        from swarm_node.swarm.base_weights.files import STARTER
        from swarm_node.swarm.base_weights.finding import describe_model

        rest["model"] = describe_model(model or STARTER, note)
    tasks = with_usual_columns(config.tasks, path.parent, note, config.rewards.kind)
    manifest = make_manifest(name, tasks, expected_peers, licence, config.rewards.kind, **rest)
    write_manifest(manifest, path)
    copies = put_beside(manifest, tasks, path.parent)
    link = join_link(manifest.swarm_id, [], manifest.bootstrap)
    if json_output:
        typer.echo(json.dumps({"swarm": manifest.swarm_id, "manifest": str(path), "link": link}))
        return
    typer.echo("".join(f"wrote {each}\n" for each in [path, *copies]) + f"swarm id {manifest.swarm_id}\n{link}")
    for line in _given_by(manifest, path, model):
        typer.echo(for_stream(line, sys.stderr), err=True)
    if not manifest.bootstrap:
        told = (
            f"this link names no peer, so nobody can join by it: run `swarm-node bootstrap {path}`, which prints the "
            f"link for others, or begin a crew with `swarm-node join {path} --stages 2 --crew NAME`"
        )
        typer.echo(for_stream(told, sys.stderr), err=True)


def _given_by(manifest: Manifest, path: Path, model: str | None) -> Iterator[str]:
    """Who gives the swarm's model and its questions to newcomers, as far as that is this machine."""
    files = [f"{task.name}.jsonl" for task in manifest.tasks if task.sha256 and not task.source]
    if files:
        yield f"a bootstrap gives members the questions: keep {', '.join(files)} beside {path}"
    if manifest.model is not None and model is not None and not manifest.model.revision:
        size = f"{manifest.model.bytes / 1e6:,.1f} MB"
        elsewhere = f"on another machine: `swarm-node bootstrap {path} --model DIR`"
        yield f"a bootstrap on this machine gives the model from {model} ({size}) to members; {elsewhere}"


def bootstrap(
    settings: CommandSettings,
    dashboard: Annotated[
        str | None,
        option(
            "--dashboard",
            "Show a page of the swarm at this port of this machine, with `auto` at the first free one from 31380; at "
            "IP:PORT, to everybody who reaches that.",
            metavar="PORT|auto",
        ),
    ] = None,
) -> None:
    """Run a rendezvous node for others to join through; prints the join link. It trains nothing. Ctrl-C ends it.

    `swarm-node resume DIR` starts it again later, with its settings."""
    config = settings.load_run(member=True, usual_name="bootstrap")
    check_extra("swarm", "a bootstrap")
    from swarm_node.runtime.limits import be_nice

    be_nice(config.resources)
    from swarm_node.runtime.bootstrap import run_bootstrap

    with refusals_in(config, err=True):
        if dashboard is None:
            raise typer.Exit(run_bootstrap(config))
        from swarm_node.cli.commands.page import listens_at, page_process

        listens_at(dashboard)
        raise typer.Exit(run_bootstrap(config, lambda folder: page_process(folder, dashboard, config)))


def status(
    settings: CommandSettings,
    target: Annotated[
        str | None, typer.Argument(metavar="RUN|SWARM", help="Run directory or swarm; by default the newest run.")
    ] = None,
    json_output: Json = False,
) -> None:
    """List members, how many of their answers were used, and why others were refused."""
    if target and not Path(target).is_dir():
        check_extra("swarm", "a swarm")
    from swarm_node.cli.commands.status import show_status

    show_status(target, settings.load().network, json_output)


def doctor(
    settings: CommandSettings,
    target: Annotated[
        str | None, typer.Argument(metavar="RUN|SWARM", help="Run directory or swarm; by default this machine.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Check this machine and its connection, and suggest fixes. Exit code 1 if a check fails."""
    if target and not Path(target).is_dir():
        check_extra("swarm", "a swarm")
    from swarm_node.cli.commands.doctor import examine

    if target and RunDir(target).exists and settings.any_typed:
        raise UserError(
            f"--config, --set and other settings are not for a run: {target} is examined with its own config.toml"
        )
    raise typer.Exit(examine(target, settings.load(), json_output))


def show_identity(settings: CommandSettings) -> None:
    """Print the peer id of a run, and its key file."""
    from swarm_node.cli.commands import identity

    typer.echo(identity.shown(settings.load(swarm="any")))


def new_identity(settings: CommandSettings) -> None:
    """Create a key for a run that has none, and print its peer id. Never replaces a key."""
    check_extra("swarm", "a key")
    from swarm_node.cli.commands import identity

    typer.echo(identity.create(settings.load(swarm="any")))


def export_identity(settings: CommandSettings, file: KeyFile) -> None:
    """Copy the key of a run to a new file that only you can read, for a backup or another machine."""
    from swarm_node.cli.commands import identity

    typer.echo(identity.export_key(settings.load(swarm="any"), file))


def import_identity(settings: CommandSettings, file: KeyFile) -> None:
    """Give a run that has no key the one in a file. Never replaces a key."""
    from swarm_node.cli.commands import identity

    typer.echo(identity.import_key(settings.load(swarm="any"), file))
