"""Show the members of a swarm, and what a run exchanged with them: `swarm-node status`.

run directory -> swarm.json (rewritten by the run every two seconds), last line of metrics.jsonl -> document
manifest | address | link -> visit the swarm, wait for the cards of members -> document; exit code 1 if nobody answers

The document is printed as text (`status_text`) or, with --json, as it is (docs/fleet.md describes it).
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import typer

from swarm_node.cli.commands.status_text import STATUS_FRESH_S, status_lines
from swarm_node.cli.options import note
from swarm_node.config import NetworkConfig
from swarm_node.errors import UserError
from swarm_node.observability.ending import ENDS, TAIL_BYTES, last_words
from swarm_node.observability.evaluations import newest_checkpoint, shown_held_out
from swarm_node.observability.jsonl import last_lines, last_record, record_in
from swarm_node.observability.tally import Tally
from swarm_node.observability.wrapping import for_stream
from swarm_node.say import is_shown
from swarm_node.storage.best import read_best
from swarm_node.storage.going_on import going_on
from swarm_node.storage.pausing import pause_asked
from swarm_node.storage.plain_files import as_a_node_writes, read_plain
from swarm_node.storage.rundir import MAX_STATUS_BYTES, RunDir
from swarm_node.swarm.declared import declared_table, kinds_of, success_by_kind
from swarm_node.swarm.links import Swarm, find_swarm
from swarm_node.swarm.lookup import dial, fetch_manifest, look_around
from swarm_node.swarm.network import visitor
from swarm_protocol.errors import PeerUnreachable
from swarm_protocol.messages import PeerCard
from swarm_protocol.transports.base import Transport

SCHEMA = 1  # version of the JSON document. It rises if a field is removed or changes its meaning, not if one is added.
LABEL = 11  # columns before the text of a line
MANIFEST_S = 5.0  # how long to ask members for the manifest, by which their kinds of task are known
PATIENT_S = 40.0
"""Seconds to look for members if an address answers. On a busy machine the network needs long to start."""


def show_status(target: str | None, network: NetworkConfig, json_output: bool) -> None:
    """Print the status of a run or a swarm; of the newest run below runs/ if there is no `target`. Raises UserError,
    and typer.Exit with code 1 if no member of a swarm is reached."""
    if target is None or Path(target).is_dir():
        run = RunDir(target) if target else _newest()
        with as_a_node_writes(run.path):
            found = _of_run(run)
            lines = _lines(found, json_output)
    else:
        found = _of_swarm(target, network)
        lines = _lines(found, json_output)
    for line in lines:
        typer.echo(line)
    if found["swarm"] and not found["swarm"].get("connected", True):
        raise typer.Exit(1)


def _lines(found: Mapping[str, Any], json_output: bool) -> list[str]:
    """What is printed of what was found."""
    if json_output:
        return [json.dumps(found, indent=2)]
    return [for_stream(line, sys.stdout, LABEL) for line in status_lines(found, time.time(), is_shown(logging.DEBUG))]


def read_status(run: RunDir) -> dict[str, Any] | None:
    """The run's swarm.json; None if it was never in a swarm. Raises UserError."""
    try:
        status = json.loads(read_plain(run.status, MAX_STATUS_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {run.status}: {error}") from error
    return status if isinstance(status, dict) else None


def say_that_it_takes_time() -> None:
    """Tell a person at a terminal why nothing is printed for a while."""
    if sys.stderr.isatty():
        typer.echo("looking for members: some seconds, on a busy machine half a minute", err=True)


def _newest() -> RunDir:
    runs = map(RunDir, Path("runs").glob("*"))
    files = [path for run in runs for path in (run.status, run.metrics, run.config) if path.is_file()]
    if not files:
        raise UserError("no run below runs/: name a run directory or a swarm")
    return RunDir(max(files, key=lambda path: path.stat().st_mtime).parent)


def _of_run(run: RunDir) -> dict[str, Any]:
    status = read_status(run)
    last = last_record(run.metrics) if run.metrics.is_file() else None
    if status is None and last is None and not run.events.is_file():
        raise UserError(f"{run.path} is no run, or has just started: there is nothing to show yet")
    known, in_use, said = status or {}, run.in_use, last_words(run)
    saved, state = newest_checkpoint(run)
    return {
        "schema": SCHEMA,
        "run": str(run.path),
        "in_use": in_use,
        "starting": in_use and not run.has_begun,
        "paused": _paused(run, known) if in_use else None,
        "crew": known.get("crew"),
        "averaging": known.get("averaging"),
        "end": None if in_use else said.end(time.time()),
        "heard": said.heard or None,
        "goes_on": None if in_use else msgspec.to_builtins(going_on(run, lacked_gib=said.lacked_gib)),
        "saved_round": saved or None,
        "reward": _reward(state),
        "held_out": _held_out(state, last),
        "best": _best(run),
        "cost": {name.removeprefix("cost/"): n for name, n in (last or {}).items() if name.startswith("cost/")} or None,
        "swarm": status,
        "metrics": last,
        "said": _last_said(run, over=not in_use and said.said) if last is None else None,
    }


def _last_said(run: RunDir, over: bool) -> str | None:
    """The last sentence of a run that has done no round; if it is `over`, the last on its end. None if its log has
    none."""
    try:
        records = [record_in(line) for line in last_lines(run.events, TAIL_BYTES)]
    except UserError:  # it is not there, or cannot be read
        return None
    said = [record for record in records if record and "text" in record and (not over or record.get("kind") in ENDS)]
    return str(said[-1]["text"]) if said else None


def _reward(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """The mean reward of the first and of the last tenth of the rounds up to the checkpoint with this state."""
    try:
        rewards = msgspec.convert(state["tally"], Tally).rewards
    except (KeyError, msgspec.ValidationError):  # of another version, or there is no checkpoint
        return None
    tenths = rewards.tenths()
    return None if tenths is None else {"first": tenths[0], "last": tenths[1], "rounds": rewards.count}


def _held_out(state: Mapping[str, Any], last: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The held-out figure before training and at the latest evaluation, as the checkpoint with this state has it."""
    shown = shown_held_out(state, with_reward=True)
    points = {} if shown is None else {point["round"]: point.get(shown["figure"]) for point in shown["points"]}
    latest = max((round for round in points if 0 < round <= (last or {}).get("round", 0)), default=0)
    before, now = points.get(0), points.get(latest) if latest else None
    if shown is None or (before is None and now is None):
        return None
    worse = shown["worse"] if latest else []
    return {"figure": shown["figure"], "before": before, "now": now, "round": latest, "worse": worse}


def _best(run: RunDir) -> dict[str, Any] | None:
    """The checkpoint with the best held-out figure, if the run keeps one."""
    best = read_best(run.path)
    return None if best is None else {"round": best.round, "figure": best.figure, "value": best.value}


def _paused(run: RunDir, status: Mapping[str, Any]) -> str | None:
    """Why an active run is paused. An old `status` does not count: it may be of a run that ended while paused."""
    fresh = time.time() - status.get("time", 0.0) < STATUS_FRESH_S
    asked = pause_asked(run.paused, time.time())  # a run that loads has not looked at it yet
    return run.read_waits() or (status.get("paused") if fresh else None) or asked or None


def _of_swarm(named: str, network: NetworkConfig) -> dict[str, Any]:
    swarm = find_swarm(named)
    addresses = [*network.bootstrap, *swarm.peers]
    if not addresses:
        raise UserError(
            f"{named} has no address to ask: use a link that `swarm-node bootstrap` or a member prints, or copy an "
            "address from such a link into `bootstrap` of the manifest"
        )
    say_that_it_takes_time()
    members: Mapping[str, PeerCard] = {}
    answering = dial(addresses)
    reached = {"answered": any(answering.values()) or not answering, "connected": False}  # none is tried if all relay
    if reached["answered"]:
        with visitor(swarm, network, note) as transport:
            members = look_around(transport, PATIENT_S)
            reached["connected"] = bool(members) or transport.stats().get("connections/dht", 0) > 0
            swarm = _with_manifest(swarm, transport) if members else swarm
    kinds = kinds_of(swarm.manifest) if swarm.manifest else None
    status = {
        "swarm": swarm.id,
        "swarm_name": swarm.manifest.name if swarm.manifest else "",
        "time": time.time(),
        **reached,
        "asked": addresses,
        "peers": {
            peer: msgspec.to_builtins(msgspec.structs.asdict(card))  # also fields with default values
            | {"present": True, "trains": "trainer" in card.roles, "declared": declared_table(card.declared, kinds)}
            for peer, card in sorted(members.items())
        },
    }
    listed = [_member(peer, card, kinds) for peer, card in sorted(members.items())]
    averaging = sorted({card.cohort for card in members.values()} - {""})
    cohorts = {name: _totals([member for member in listed if member["cohort"] == name]) for name in averaging}
    return {
        "schema": SCHEMA,
        "run": None,
        "swarm": status,
        "metrics": None,
        **reached,
        "members": listed,
        "kinds": success_by_kind(members, kinds),
        "totals": _totals(listed) | {"cohorts": cohorts},
    }


def _with_manifest(swarm: Swarm, transport: Transport) -> Swarm:
    """`swarm` with its manifest, if a member gives it soon."""
    try:
        return msgspec.structs.replace(swarm, manifest=fetch_manifest(transport, swarm, lambda line: None, MANIFEST_S))
    except PeerUnreachable:
        return swarm


def _member(peer: str, card: PeerCard, kinds: Collection[str] | None) -> dict[str, Any]:
    """A member in the JSON document, by its card."""
    return {
        "peer": peer,
        "name": card.name,
        "present": True,
        "roles": list(card.roles),
        "family": card.family or None,
        "cohort": card.cohort or None,
        "policy_version": card.policy_version,
        "tokens_per_s": card.speed,
        "layers": None if card.stages is None else list(card.stages),
        "crew": None if card.crew is None else card.crew.id,
        "stages": [] if card.crew is None else list(card.crew.held),
        "addresses": list(card.addresses),
        "declared": declared_table(card.declared, kinds),
    }


def _totals(members: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "members": len(members),
        "trainers": sum("trainer" in member["roles"] for member in members),
        "tokens_per_s": sum(member["tokens_per_s"] for member in members),
    }
