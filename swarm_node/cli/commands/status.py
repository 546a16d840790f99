"""What a node sees of its swarm, for people: `swarm-node status`.

run directory -> swarm.json (rewritten by the run every two seconds), last line of metrics.jsonl -> table
manifest | address | link -> dial in as a visitor, wait for the cards of members -> table; exit code 1 if nobody answers

With --json, one document for programs: docs/fleet.md describes it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import typer

from protocol.messages import PeerCard
from swarm_node.config import NetworkConfig
from swarm_node.errors import UserError
from swarm_node.observability.jsonl import last_record
from swarm_node.observability.reasons import words
from swarm_node.observability.refusals import Row
from swarm_node.storage.rundir import RunDir
from swarm_node.swarm.links import find_swarm, no_address
from swarm_node.swarm.lookup import dial, look_around
from swarm_node.swarm.network import visitor

SCHEMA = 1
"""Of the JSON document. It rises when a field goes or means something else; new ones may come at any time."""
PATIENT_S = 40.0
"""The same where something answers: on a busy machine, the network takes long to come up."""
SHORT_ID = 8
"""Last characters of a peer id that tables show: the first ones are the same for all."""
LISTED = 8
"""Partners named."""
WORST = 5
"""Sources of refusals named."""
FRESH_S = 30.0
"""A status older than this is of a run that stands still or is over."""
Cells = Callable[[Mapping[str, Any]], list[str]]


def show_status(target: str | None, network: NetworkConfig, json_output: bool) -> None:
    """Print the status of a run or a swarm; of the newest run below runs/ if there is no `target`.

    Raises UserError; typer.Exit with code 1 if nobody of a swarm can be reached.
    """
    found = _of_run(RunDir(target) if target else _newest()) if _is_run(target) else _of_swarm(target or "", network)
    if json_output:
        typer.echo(json.dumps(found, indent=2))
    else:
        for line in _lines(found):
            typer.echo(line)
    if found["swarm"] and not found["swarm"].get("connected", True):
        raise typer.Exit(1)


def read_status(run: RunDir) -> dict[str, Any] | None:
    """What the run last wrote of its swarm; `None` if it was never in one. Raises UserError."""
    try:
        status = json.loads(run.status.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {run.status}: {error}") from error
    return status if isinstance(status, dict) else None


def _is_run(target: str | None) -> bool:
    return target is None or Path(target).is_dir()


def _newest() -> RunDir:
    runs = [RunDir(path) for path in Path("runs").glob("*") if path.is_dir()]
    dated = [(max(mtimes), run) for run in runs if (mtimes := _mtimes(run))]
    if not dated:
        raise UserError("no run below runs/: name a run directory or a swarm")
    return max(dated, key=lambda pair: pair[0])[1]


def _mtimes(run: RunDir) -> list[float]:
    return [path.stat().st_mtime for path in (run.status, run.metrics, run.config) if path.is_file()]


def _of_run(run: RunDir) -> dict[str, Any]:
    status = read_status(run)
    last = last_record(run.metrics) if run.metrics.is_file() else None
    if status is None and last is None:
        raise UserError(f"{run.path} is no run, or one that has just begun: there is nothing to show yet")
    known, in_use = status or {}, run.in_use
    return {
        "schema": SCHEMA,
        "run": str(run.path),
        "in_use": in_use,
        "paused": _paused(run, known) if in_use else None,
        "crew": known.get("crew"),
        "averaging": known.get("averaging"),
        "cost": {name.removeprefix("cost/"): n for name, n in (last or {}).items() if name.startswith("cost/")} or None,
        "swarm": status,
        "metrics": last,
    }


def _paused(run: RunDir, status: Mapping[str, Any]) -> str | None:
    """Why a run in use is paused, as it says itself; one that ended in a pause left that in its `status`."""
    fresh = time.time() - status.get("time", 0.0) < FRESH_S
    return run.read_waits() or (status.get("paused") if fresh else None) or None


def _of_swarm(named: str, network: NetworkConfig) -> dict[str, Any]:
    swarm = find_swarm(named)
    addresses = [*network.bootstrap, *swarm.peers]
    if not addresses:
        raise UserError(no_address(named))
    if sys.stderr.isatty():
        typer.echo("looking for members, a few seconds", err=True)
    members: Mapping[str, PeerCard] = {}
    answered, connected = _answers(addresses), False
    if answered:
        with visitor(swarm, network, lambda sentence: typer.echo(sentence, err=True)) as transport:
            members = look_around(transport, PATIENT_S)
            connected = bool(members) or transport.stats().get("connections/dht", 0) > 0
    status = {
        "swarm": swarm.id,
        "swarm_name": swarm.manifest.name if swarm.manifest else "",
        "time": time.time(),
        "answered": answered,
        "connected": connected,
        "asked": addresses,
        "peers": {peer: _card(card) for peer, card in sorted(members.items())},
    }
    listed = [_member(peer, card) for peer, card in sorted(members.items())]
    return {
        "schema": SCHEMA,
        "run": None,
        "swarm": status,
        "metrics": None,
        "answered": answered,
        "connected": connected,
        "members": listed,
        "totals": _totals(listed) | {"cohorts": _by_cohort(listed)},
    }


def _answers(addresses: Sequence[str]) -> bool:
    """Whether something may answer at one of `addresses`: it need not be a peer, and relayed ones are not tried."""
    answering = dial(addresses)
    return any(answering.values()) or not answering


def _card(card: PeerCard) -> dict[str, Any]:
    every: dict[str, Any] = msgspec.to_builtins(msgspec.structs.asdict(card))  # with fields that have their defaults
    return every | {"present": True, "trains": "trainer" in card.roles}


def _member(peer: str, card: PeerCard) -> dict[str, Any]:
    """A member, for programs: what it says of itself."""
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
    }


def _totals(members: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "members": len(members),
        "trainers": sum("trainer" in member["roles"] for member in members),
        "tokens_per_s": sum(member["tokens_per_s"] for member in members),
    }


def _by_cohort(members: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The totals of each cohort; members in none are in no entry."""
    cohorts: dict[str, list[Mapping[str, Any]]] = {}
    for member in members:
        if member["cohort"]:
            cohorts.setdefault(member["cohort"], []).append(member)
    return {cohort: _totals(them) for cohort, them in sorted(cohorts.items())}


# --------------------------------------------------------------------- for people


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    status, metrics = found["swarm"], found["metrics"]
    reward = (metrics or {}).get("reward")
    if found["run"]:
        yield f"run        {found['run']}{_when(RunDir(found['run']), status)}"
    if found.get("paused"):
        yield f"paused     {found['paused']}"
    if metrics:
        yield f"round      {metrics['round']}" + ("" if reward is None else f", reward {reward:.3f}")
    if status is None:
        yield "swarm      none: this run trains alone"
        return
    named = [status.get("swarm_name"), status["swarm"][:16]]
    yield f"swarm      {' '.join(filter(None, named))}"
    if "peer" in status:
        yield f"node       {status.get('name') or 'node'}, peer {status['peer']}"
        yield f"reached at {', '.join(status['addresses']) or 'no address: this node only dials'}"
    if status.get("link"):
        yield f"join link  {status['link']}"
    if "traffic" in status:
        yield f"traffic    {_traffic(status['traffic'])}"
    if "sent" in status:
        unsent = _reasons(status["sent"], "swarm/unsent/").replace(";", "; not sent:", 1)
        yield f"sent       {_count(status['sent'], 'swarm/groups_sent')} groups{unsent}"
    if "received" in status:
        received, used = status["received"], (metrics or {}).get("swarm/groups_used")
        yield (
            f"received   {_count(received, 'swarm/groups_received')} groups, "
            f"admitted {_count(received, 'swarm/groups_admitted')}"
            + ("" if used is None else f", used {used:.0f} in the last round")
        )
    if refused := _reasons(status.get("received", {}), "swarm/rejected/"):
        yield f"refused    {refused.removeprefix('; ')}"
    yield from _sources(status, "" if refused else "refused")
    if status.get("crew"):
        yield from _crew(status["crew"], status["time"])
    absent = (status.get("crew") or {}).get("absent", [])
    peers = {peer: figures | {"absent": peer in absent} for peer, figures in status.get("peers", {}).items()}
    if status.get("averaging"):
        yield from _averaging(status["averaging"], status["time"])
    if not status.get("connected", True):
        where = ", ".join(status["asked"][:3])
        tried = "something answers at {}, but not as a peer: `swarm-node doctor` may say why"
        yield f"members    unknown: {(tried if status['answered'] else 'nobody answered at {}').format(where)}"
        return
    here = [peer for peer in peers.values() if peer.get("present") and not peer["absent"]]
    training = sum(peer.get("trains", True) for peer in here)
    others = f" other{'' if len(here) == 1 else 's'}" if found["run"] else ""
    of_them = "" if training == len(here) else f", {training or 'none'} of them training"
    yield f"members    {len(here)}{others}{of_them}"
    if peers and found["run"]:
        titles = ["here", "updates", "received", "admitted", "used", "refused, by reason"]
        yield from _table(peers, titles, _what_became)
    elif peers:
        averaged = ["cohort"] if any(peer["cohort"] for peer in peers.values()) else []
        titles = ["roles", "model", "updates", "tokens/s", *averaged, "address"]
        yield from _table(peers, titles, _who_averages if averaged else _who)


def _sources(status: Mapping[str, Any], label: str) -> Iterator[str]:
    """The worst sources of what was refused, a line for each, the first after `label`."""
    found = msgspec.convert(status.get("refused", []), list[Row])
    for i, row in enumerate(found[:WORST]):
        yield f"{'' if i else label:10} {row.says}, from {row.place()}, last {_ago(status['time'] - row.last)}"
    if len(found) > WORST:
        others = sum(row.count for row in found[WORST:])
        yield f"{'':10} {others:,} from {len(found) - WORST} others"


def _ago(seconds: float) -> str:
    seconds = max(0.0, seconds)
    return f"{seconds:.0f} s ago" if seconds < 120 else f"{seconds / 60:.0f} min ago"


def _crew(crew: Mapping[str, Any], now: float) -> Iterator[str]:
    state = "whole" if crew["whole"] else "not whole"
    lead = "nobody leads yet" if crew["lead"] is None else f"led by {_named(crew['lead'])}"
    yield f"crew       {crew['name']}: {crew['count']} stages, {state}, {lead}, {crew['updates']} updates"
    for stage, seat in enumerate(crew["stages"]):
        missing = seat.get("missing")
        here = "this node" if stage in crew["held"] else _named(seat)
        if missing:
            taker = missing["taker"]
            by = "held by nobody" if taker is None else f"being rebuilt by {_named(taker)}"
            here = f"lost {max(0.0, now - missing['since']):.0f} s ago, {by}"
        yield f"           stage {stage} (layers {seat['layers'][0]}-{seat['layers'][1]}): {here}"
    kept = ", ".join(f"stage {stage} after update {updates}" for stage, updates in crew["replicas"].items())
    yield f"           spares {crew['spares']}; replicas kept here: {kept or 'none'}"
    if recovered := ", ".join(f"{n} by {way}" for way, n in crew["recovered"].items()):
        yield f"           stages built so far: {recovered}"


def _named(peer: Mapping[str, str]) -> str:
    return f"{peer['name'] or 'a peer'} (…{peer['peer'][-SHORT_ID:]})"


def _averaging(figures: Mapping[str, Any], now: float) -> Iterator[str]:
    partners, last = sorted(figures["partners"].values()), figures["last"]
    listed = ", ".join(partners[:LISTED]) + (", …" if len(partners) > LISTED else "")
    done = f"averaged {figures['exchanges']} times, {figures['bytes'] / 1e6:.2f} MB sent"
    if last:
        done += f", last with {last['with']} {max(0.0, now - last['time']):.0f} s ago"
    yield f"averaging  {figures['method']}, {figures['when']}, {figures['codec']}; cohort {figures['cohort']}"
    yield f"           partners here: {f'{len(partners)}, {listed}' if partners else 'none'}"
    yield f"           {done}"
    for kind, text in (("skipped", "skipped"), ("refused", "refused to others")):
        if reasons := _reasons(figures[kind], ""):
            yield f"           {text}: {reasons.removeprefix('; ')}"


def _when(run: RunDir, status: Mapping[str, Any] | None) -> str:
    age = f"as of {max(0.0, time.time() - status['time']):.0f} s ago" if status else "as it was"
    if not run.in_use:
        return f", ended; {age}"
    return f", {age}: it stands still" if status and time.time() - status["time"] > FRESH_S else ""


def _traffic(traffic: Mapping[str, float]) -> str:
    parts = [
        f"{traffic.get('bytes_in', 0) / 1e6:.2f} MB in, {traffic.get('bytes_out', 0) / 1e6:.2f} MB out",
        f"{_count(traffic, 'messages_in')} messages in, {_count(traffic, 'messages_out')} out",
        f"gossip connections: {_count(traffic, 'connections/gossip')}",
    ]
    for name, text in (("restarts/gossip", "restarts of gossip"), ("restarts/dht", "restarts of p2pd")):
        if traffic.get(name):
            parts.append(f"{_count(traffic, name)} {text}")
    return "; ".join(parts)


def _count(figures: Mapping[str, float], name: str) -> str:
    return f"{figures.get(name, 0):.0f}"


def _reasons(figures: Mapping[str, float], prefix: str) -> str:
    """`; 3 × too old, 1 × over the sender's quota`, the most frequent first."""
    counts = {name.removeprefix(prefix): n for name, n in figures.items() if name.startswith(prefix) and n}
    frequent = sorted(counts.items(), key=lambda item: -item[1])
    listed = ", ".join(f"{n:,.0f} × {words(reason)}" for reason, n in frequent)
    return f"; {listed}" if listed else ""


def _table(peers: Mapping[str, Mapping[str, Any]], titles: Sequence[str], cells: Cells) -> Iterator[str]:
    rows = [["peer", "name", *titles]]
    for peer, figures in sorted(peers.items(), key=lambda item: (-item[1].get("received", 0), item[0])):
        rows.append(["…" + peer[-SHORT_ID:], figures.get("name") or "-", *cells(figures)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _what_became(figures: Mapping[str, Any]) -> list[str]:
    refused = _reasons({f"/{name}": n for name, n in figures.get("rejected", {}).items()}, "/").removeprefix("; ")
    return [
        "gone" if not figures.get("present") else "silent" if figures["absent"] else "yes",
        *(_cell(figures.get(name)) for name in ("policy_version", "received", "admitted", "used")),
        f"{'muted; ' if figures.get('muted') else ''}{refused}",
    ]


def _who(figures: Mapping[str, Any]) -> list[str]:
    roles, family = ", ".join(figures["roles"]), figures["family"] or "-"
    return [
        roles,
        family,
        _cell(figures["policy_version"]),
        _cell(figures["speed"]),
        (figures["addresses"] or ["-"])[0],
    ]


def _who_averages(figures: Mapping[str, Any]) -> list[str]:
    *rest, address = _who(figures)
    return [*rest, figures["cohort"] or "-", address]


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
