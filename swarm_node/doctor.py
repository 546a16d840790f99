"""What keeps this machine from being a good member of a swarm, and what to do: `swarm-node doctor`.

Each check is a sentence about this machine, about a run's directory, or about a swarm as seen by dialling in as a
visitor. Whether *others* can reach this node is best seen from outside: `swarm-node doctor LINK` on another machine
dials the addresses in this node's link.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Literal

import msgspec
import typer

from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.limits import CARD_RENEWAL_S, MAX_CLOCK_SKEW_S
from protocol.messages import PeerCard
from protocol.peers import parse_cache
from protocol.transports.ports import read_ports
from protocol.transports.settings import free_port
from swarm_node.config import NetworkConfig, NodeConfig, load_config
from swarm_node.joining import Swarm, find_swarm, visitor
from swarm_node.rundir import RunDir
from swarm_node.status import FRESH_S, look_around, read_status

TESTED = {"torch": "2", "transformers": "5", "hivemind": "1.1", "libp2p": "0.8", "reasoning-gym": "0.1"}
"""Package -> how the versions begin that this one is tested with."""
DIAL_S = 3.0
MAX_DIALS = 32
"""Addresses tried."""
PORT_FORWARDING = (
    "forward the ports {port} and {gossip_port} (TCP) of the router to this machine and give its public address as "
    "--announce, or try --set network.nat_port_map=true; without, this node only dials, which is enough to take part"
)


class Check(msgspec.Struct, frozen=True):
    """One finding."""

    name: str
    verdict: Literal["ok", "warn", "fail"]
    detail: str
    remedy: str = ""
    """What to do; empty if there is nothing to."""


def examine(target: str | None, config: NodeConfig, json_output: bool) -> int:
    """Print all checks; 1 if one failed, else 0. Raises UserError if `target` is no run and no swarm."""
    run = RunDir(target) if target and Path(target).is_dir() else None
    swarm = _swarm_of(run) if run else find_swarm(target or config.swarm) if target or config.swarm else None
    if run is not None and run.exists:
        config = load_config(run.config)
    checks = list(_checks(config, run, swarm))
    if json_output:
        typer.echo(json.dumps({"checks": msgspec.to_builtins(checks)}, indent=2))
    else:
        for check in checks:
            typer.echo(f"{check.verdict:<4}  {check.name:<10}  {check.detail}")
            if check.remedy:
                typer.echo(f"{'':18}-> {check.remedy}")
    return int(any(check.verdict == "fail" for check in checks))


def _checks(config: NodeConfig, run: RunDir | None, swarm: Swarm | None) -> Iterator[Check]:
    status = read_status(run) if run else None
    mine = status["addresses"] if status else []
    yield python()
    yield packages()
    yield directory(run.path if run else config.directory)
    yield ports(config.network, running=status is not None and time.time() - status["time"] < FRESH_S)
    yield reachable(_as_it_listens(config.network, run), mine or [own_address()])
    if swarm is None:
        return
    answering = dial([address for address in [*swarm.peers, *config.network.bootstrap] if address not in mine])
    yield begin(answering)
    if any(answering.values()) or mine:
        through = msgspec.structs.replace(swarm, peers=[*mine, *swarm.peers])
        with visitor(through, config.network, lambda sentence: None) as transport:
            members = look_around(transport)
        yield people(members)
        yield clock(members, time.time())


# --------------------------------------------------------------------- this machine


def python() -> Check:
    found = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= sys.version_info[:2] < (3, 13):
        return Check("python", "ok", found)
    return Check("python", "warn", f"{found} is not tested", "use Python 3.11 or 3.12")


def packages() -> Check:
    found, missing = {}, []
    for name in TESTED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        return Check("packages", "fail", f"missing: {', '.join(missing)}", "install swarm-node again")
    listed = ", ".join(f"{name} {number}" for name, number in found.items())
    if all(number == TESTED[name] or number.startswith(f"{TESTED[name]}.") for name, number in found.items()):
        return Check("packages", "ok", listed)
    return Check("packages", "warn", f"{listed}: not all are tested", "install the versions in constraints.txt")


def directory(path: Path) -> Check:
    """Whether the run directory, or what it would be made in, can be written."""
    existing = next(place for place in (path, *path.absolute().parents) if place.exists())
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return Check("directory", "ok", f"{path} can be written")
    return Check(
        "directory", "fail", f"{existing} cannot be written", "change its owner or mode, or choose a --run-dir"
    )


def ports(network: NetworkConfig, running: bool = False) -> Check:
    """Whether the ports are free (or in use by the run itself)."""
    wanted = [network.port, network.gossip_port]
    if network.dial_only:
        return Check("ports", "ok", "none needed: this node only dials")
    if running:
        return Check("ports", "ok", "the run is using its ports")
    try:
        first = free_port(network.listen, wanted[0])
        second = free_port(network.listen, wanted[1])
        free = [first, second if second != first else free_port(network.listen, second + 1)]
    except LocalProtocolError as error:
        return Check(
            "ports", "fail", str(error), "choose other ones with --port and --gossip-port, or another --listen"
        )
    if all(port in (0, got) for port, got in zip(wanted, free, strict=True)):
        return Check("ports", "ok", f"{wanted[0]} and {wanted[1]} of {network.listen} are free")
    return Check(
        "ports",
        "warn",
        f"of {wanted[0]} and {wanted[1]} not both are free; a node would take {free[0]} and {free[1]}",
        "stop what uses them, or choose others with --port and --gossip-port: a router forwards fixed ones only",
    )


def _as_it_listens(network: NetworkConfig, run: RunDir | None) -> NetworkConfig:
    """`network` with the ports that the run got in place of those it wanted."""
    if run is None:
        return network
    got = read_ports(run.ports)
    ports = {"port": got.get(network.port, network.port), "gossip_port": got.get(network.gossip_port or -1, 0)}
    return network.model_copy(update={name: port for name, port in ports.items() if port})


def own_address() -> str:
    """This machine's address on its way out, as a multiaddress; loopback if it has none. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address reserved for examples
            return f"/ip4/{probe.getsockname()[0]}/tcp/0"
        except OSError:
            return "/ip4/127.0.0.1/tcp/0"


def reachable(network: NetworkConfig, addresses: Sequence[str]) -> Check:
    """Whether others are likely to reach a node at `addresses`."""
    name, remedy = "reachable", PORT_FORWARDING.format(port=network.port, gossip_port=network.gossip_port)
    if network.dial_only:
        return Check(name, "ok", "nobody can reach this node, as it was told: it only dials")
    if network.announce:
        return Check(name, "ok", f"announced as {', '.join(network.announce)}: check it from another machine")
    direct = [address for address in addresses if "/p2p-circuit" not in address]
    if any(_reach(address) == "public" for address in direct):
        return Check(name, "ok", "listens on a public address: check it from another machine with `doctor LINK`")
    if len(direct) < len(addresses):
        return Check(name, "warn", "reached only through a relay", remedy)
    if any(_reach(address) == "private" for address in direct):
        return Check(name, "warn", "listens on private addresses only: nobody outside this network reaches it", remedy)
    if network.listen.startswith("127."):
        return Check(name, "warn", "listens for this machine only", "leave out --listen, to be reached from others")
    return Check(name, "warn", "has no address but this machine's own", "connect it to a network")


def _reach(address: str) -> Literal["public", "private", "own"]:
    _, kind, host, *_ = address.split("/")
    if not kind.startswith("ip"):
        return "public"
    ip = ipaddress.ip_address(host)
    return "own" if ip.is_loopback else "public" if ip.is_global else "private"


# --------------------------------------------------------------------- the swarm


def dial(addresses: Sequence[str]) -> dict[str, bool]:
    """Address -> whether something answers there (TCP); those through a relay are left out."""
    direct = [address for address in dict.fromkeys(addresses) if "/p2p-circuit" not in address][:MAX_DIALS]
    with ThreadPoolExecutor(MAX_DIALS) as pool:
        return dict(zip(direct, pool.map(_answers, direct), strict=True))


def _answers(address: str) -> bool:
    _, _, host, _, port, *_ = [*address.split("/"), "", "", ""]
    try:
        with socket.create_connection((host, int(port)), DIAL_S):
            return True
    except (OSError, ValueError):
        return False


def begin(answering: Mapping[str, bool]) -> Check:
    """Whether there is somebody to begin with."""
    name, dead = "bootstrap", [address for address, answers in answering.items() if not answers]
    if not answering:
        remedy = "give one with --bootstrap, or use a join link that a running node printed"
        return Check(name, "warn", "no address to begin with", remedy)
    if not dead:
        return Check(name, "ok", f"{len(answering)} of {len(answering)} addresses answer")
    listed = ", ".join(dead[:3]) + (", …" if len(dead) > 3 else "")
    if len(dead) < len(answering):
        return Check(name, "warn", f"{len(answering) - len(dead)} of {len(answering)} addresses answer, not {listed}")
    remedy = "check this machine's connection and firewall, or ask for a newer link; a node keeps trying"
    return Check(name, "fail", f"no address answers: {listed}", remedy)


def people(members: Mapping[str, PeerCard]) -> Check:
    """Whether there are members."""
    if members:
        return Check("members", "ok", f"{len(members)} are there")
    return Check("members", "warn", "something answers, but no member is seen", "is it this swarm? is the clock right?")


def clock(members: Mapping[str, PeerCard], now: float) -> Check:
    """This machine's clock against the cards of others, which are up to a renewal old."""
    if not members:
        return Check("clock", "warn", "nobody to compare with")
    ahead = median(now - card.created for card in members.values()) - CARD_RENEWAL_S / 2
    detail = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the other members'"
    if abs(ahead) <= CARD_RENEWAL_S:
        return Check("clock", "ok", f"agrees with the other members' within {CARD_RENEWAL_S:g} s")
    return Check(
        "clock", "fail" if abs(ahead) > MAX_CLOCK_SKEW_S else "warn", detail, "switch on time synchronisation (NTP)"
    )


# --------------------------------------------------------------------- the run


def _swarm_of(run: RunDir) -> Swarm | None:
    """The swarm that the run is in, with all addresses that the run knows."""
    if not run.swarm.is_file():
        return None
    swarm = find_swarm(str(run.swarm))
    try:
        cached = [address for peer in parse_cache(run.peers.read_bytes()) for address in peer.addresses]
    except (OSError, RemoteProtocolError):  # none yet, or damaged: a run starts without it, too
        cached = []
    return msgspec.structs.replace(swarm, peers=[*swarm.peers, *cached])
