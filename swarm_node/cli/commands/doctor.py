"""Checks of this machine and its connection, each with the command that fixes it: `swarm-node doctor`.

A swarm is joined as a visitor, to compare with its members and to have them connect to this machine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec
import typer

from swarm_node.cli.commands import check_machine as machine
from swarm_node.cli.commands import check_network as network
from swarm_node.cli.commands.check import Check, StartCommand
from swarm_node.cli.commands.status import read_status, say_that_it_takes_time
from swarm_node.cli.options import note
from swarm_node.config import NetworkConfig, NodeConfig
from swarm_node.config.own import read_own
from swarm_node.errors import UserError
from swarm_node.install import upgrade_command
from swarm_node.observability.refusals import RefusalRow
from swarm_node.storage.rundir import BOOTSTRAP, RunDir
from swarm_node.swarm.links import Swarm, cached_addresses, find_swarm
from swarm_node.swarm.lookup import dial, fetch_manifest, look_around
from swarm_node.swarm.network import visitor
from swarm_node.tasks.one_turn import has_own_prompt
from swarm_protocol.answer_form import AnswerForm
from swarm_protocol.errors import PeerUnreachable, printable, visible
from swarm_protocol.transports.ports import read_ports

MANIFEST_S = 5.0  # longest wait for a member that gives the manifest, in seconds


class StatusFile(msgspec.Struct, frozen=True):
    """The part of swarm.json that is used here."""

    role: str = ""
    time: float = 0.0
    peer: str = ""
    addresses: list[str] = []
    refused: list[RefusalRow] = []
    traffic: dict[str, float] = {}
    restarted: dict[str, str] = {}


def examine(target: str | None, config: NodeConfig, json_output: bool) -> int:
    """Print each check as soon as it is made, or all of them as JSON. The exit code is 1 if one failed, else 0. Raises
    UserError if `target` is neither a run nor a swarm."""
    run = RunDir(target) if target and Path(target).is_dir() else None
    swarm = _swarm_of(run) if run else find_swarm(target or config.swarm) if target or config.swarm else None
    if run is not None and run.exists:
        config = read_own(run.config, note)
    checks = []
    for check in _as_far_as_possible(_checks(target, config, run, swarm)):
        checks.append(check)
        if not json_output:
            typer.echo(visible(f"{check.verdict:<4}  {check.name:<10}  {check.detail}"))
            if check.remedy:
                typer.echo(visible(f"{'':18}-> {check.remedy}"))
    if json_output:
        typer.echo(json.dumps({"checks": msgspec.to_builtins(checks)}, indent=2))
    failed = any(check.verdict == "fail" for check in checks)
    if swarm is not None and run is None and not failed and not json_output:
        typer.echo(f"next  {StartCommand(swarm=target or config.swarm or '').having()}")
    return int(failed)


def _as_far_as_possible(checks: Iterator[Check]) -> Iterator[Check]:
    """The checks; an unexpected error is one more failed check, so that earlier findings are kept."""
    try:
        yield from checks
    except UserError as error:
        yield Check("doctor", "fail", f"no further check is possible: {error}")
    except Exception as error:
        why = printable(f"{type(error).__name__}: {error}")
        yield Check("doctor", "fail", f"no further check is possible: {why}", upgrade_command())


def _checks(target: str | None, config: NodeConfig, run: RunDir | None, swarm: Swarm | None) -> Iterator[Check]:
    seen, damage = _seen(run)
    start = _start_command(target, config, run, swarm, seen)
    mine = seen.addresses
    running = run is not None and run.in_use
    place = run.path if run else config.model_copy(update={"swarm": start.swarm or None}).directory
    yield machine.python()
    yield machine.packages()
    yield machine.torch_and_device(machine.nvidia_gpus())
    if start.verb != "bootstrap":  # which has no model
        yield from machine.room(config, place, running, start)
        if swarm is None:
            yield from _answers(config, config.rewards.answer)
        elif swarm.manifest is not None:
            yield from _answers(config, swarm.manifest.answer)
    yield machine.directory(place, start)
    if damage:
        yield Check("status", "warn", f"{damage}; a node that runs there writes it again", start.having())
    if start.verb == "local":
        yield network.versions({}, {})
        return
    yield network.ports(config.network, running, start)
    if seen.time:
        yield network.refusals(seen.refused, seen.time)
        yield network.restarted(seen.traffic, seen.restarted)
    listens = _as_it_listens(config.network, run)
    guess = network.reachable(listens, mine or [network.own_address()], start)
    answering: dict[str, bool] = {}
    if swarm is not None:
        say_that_it_takes_time()
        answering = dial([address for address in [*swarm.peers, *config.network.bootstrap] if address not in mine])
    if swarm is None or not (any(answering.values()) or mine):
        yield guess
        if swarm is not None:
            yield network.begin(answering, start=start)
        yield network.versions({}, {})
        return
    through = msgspec.structs.replace(swarm, peers=[*mine, *swarm.peers])
    with visitor(through, config.network, lambda sentence: None) as transport:
        members = look_around(transport)
        now = time.time()
        made = {peer: at for peer, at in transport.made().items() if peer != seen.peer}
        others = {peer: card for peer, card in members.items() if peer != seen.peer}
        if swarm.manifest is None and start.verb != "bootstrap":
            with suppress(PeerUnreachable, UserError):  # the next checks report it
                yield from _answers(config, fetch_manifest(transport, swarm, lambda sentence: None, MANIFEST_S).answer)
        yield network.seen_from_others(transport.dial_back, others, listens, running, guess, start)
        begun = network.begin(answering, members, start)
        yield begun
        connected = transport.stats().get("connections/dht", 0) > 0
        people = network.people(members, made, connected, start, any(answering.values()))
        yield msgspec.structs.replace(people, remedy="") if people.remedy == begun.remedy else people
        yield network.clock(others, now, made)
        yield network.versions(members, transport.stats())


def _answers(config: NodeConfig, form: AnswerForm) -> Iterator[Check]:
    if form != "any":
        yield machine.answers(form, has_own_prompt(config, form))


def _start_command(
    target: str | None, config: NodeConfig, run: RunDir | None, swarm: Swarm | None, seen: StatusFile
) -> StartCommand:
    """The command that starts this node. `config` is that of the run, if `target` is one."""
    if run is None and swarm is None and "model" in config.policy.model_fields_set:  # asked about a model alone
        return StartCommand("local", run_dir=config.run_dir or "")
    if run is None:
        return StartCommand(swarm=target or config.swarm or "", run_dir=config.run_dir or "")
    alone = config.swarm is None and (swarm is None or config.pipeline.stages > 0)  # a crew of its own is a swarm, too
    if run.exists and alone:
        return StartCommand("local", run_dir=str(run.path))
    if swarm is None:
        return StartCommand(run_dir=str(run.path))
    verb: Literal["bootstrap", "join"] = "bootstrap" if seen.role == BOOTSTRAP else "join"
    return StartCommand(verb, config.swarm or str(run.swarm), str(run.path))


def _seen(run: RunDir | None) -> tuple[StatusFile, str]:
    """The run's last swarm.json, and what is wrong with that file, if anything."""
    try:
        found = None if run is None else read_status(run)
        return StatusFile() if found is None else msgspec.convert(found, StatusFile), ""
    except UserError as error:
        return StatusFile(), str(error)
    except msgspec.ValidationError as error:
        return StatusFile(), f"{run.status if run else ''} is damaged: {error}"


def _as_it_listens(wanted: NetworkConfig, run: RunDir | None) -> NetworkConfig:
    """`wanted` with the ports that the run got instead of those it wanted."""
    if run is None:
        return wanted
    got = read_ports(run.ports)
    ports = {"port": got.get(wanted.port, wanted.port), "gossip_port": got.get(wanted.gossip_port or -1, 0)}
    return wanted.model_copy(update={name: port for name, port in ports.items() if port})


def _swarm_of(run: RunDir) -> Swarm | None:
    """The swarm of the run, with all addresses that the run knows."""
    if not run.swarm.is_file():
        return None
    swarm = find_swarm(str(run.swarm))
    return msgspec.structs.replace(swarm, peers=[*swarm.peers, *cached_addresses(run)])
