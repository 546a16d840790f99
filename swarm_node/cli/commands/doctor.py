"""What keeps this machine from being a good member of a swarm, and the command that mends it: `swarm-node doctor`.

this machine     Python, compiler, packages, torch and device, memory and disk for the chosen model, ports
a swarm          dialled into as a visitor: bootstrap peers, members, clock and versions against theirs, and, as some
                 of them connect back, whether this machine can be reached
"""

from __future__ import annotations

import ipaddress
import json
import os
import random
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Literal

import msgspec
import typer

from protocol.codec import SPOKEN
from protocol.errors import LocalProtocolError, PeerUnreachable, RemoteProtocolError, printable
from protocol.limits import CARD_RENEWAL_S, MAX_CLOCK_SKEW_S
from protocol.manifest import LINK_SCHEME
from protocol.messages import PROTOCOL_VERSION, PeerCard
from protocol.peers import is_relayed, parse_cache, peer_of
from protocol.public import is_public
from protocol.transports.ports import read_ports
from protocol.transports.settings import free_port
from swarm_node import __version__
from swarm_node.cli.commands.status import FRESH_S, read_status
from swarm_node.config import NetworkConfig, NodeConfig, load_config
from swarm_node.errors import UserError
from swarm_node.install import PACKAGE, install_command, reinstall_command, torch_command, upgrade_command
from swarm_node.observability.refusals import Row
from swarm_node.runtime.limits import BOOTSTRAP
from swarm_node.storage.rundir import RunDir
from swarm_node.swarm.links import Swarm, find_swarm, join_link, living
from swarm_node.swarm.lookup import dial, look_around
from swarm_node.swarm.network import visitor

TESTED = {"torch": "2", "transformers": "5", "hivemind": "1.1", "libp2p": "0.8", "reasoning-gym": "0.1"}
"""Package -> how the versions begin that this one is tested with."""
ASKED = 5
"""Members asked to connect back, until `WITNESSES` have."""
WITNESSES = 2
ATTACK = 10
"""Refusals of one source that honest nodes hardly ever cause: a faulty peer makes one or two."""
LATELY_S = 3600.0
"""After that, an attack is over; the counts are of the whole run, and the address may be another's by then."""
CREW_BYTES = 6
"""Of a name for a crew, which is its password."""
TIGHT = 0.8
"""Part of the free memory that is full once sampling comes on top."""
GIB = 2**30
MAP_PORTS = "--set network.nat_port_map=true"
INSTALL_COMPILER = (
    "xcode-select --install; brew install gmp"
    if sys.platform == "darwin"
    else "sudo apt-get install build-essential libgmp-dev"
)
SET_CLOCK = "sudo sntp -sS time.apple.com" if sys.platform == "darwin" else "sudo timedatectl set-ntp true"


class Check(msgspec.Struct, frozen=True):
    """One finding."""

    name: str
    verdict: Literal["ok", "warn", "fail"]
    detail: str
    remedy: str = ""
    """The command that mends it, where one can; empty if there is nothing to mend."""


class Seen(msgspec.Struct, frozen=True):
    """What is needed of swarm.json."""

    role: str = ""
    time: float = 0.0
    peer: str = ""
    addresses: list[str] = []
    refused: list[Row] = []


class Way(msgspec.Struct, frozen=True):
    """How this node is started, for the remedies: whatever is known, and a word in capitals in place of what is not."""

    verb: Literal["join", "bootstrap", "local"] = "join"
    swarm: str = ""
    """As it was named: a manifest's path or address, or a link."""
    run_dir: str = ""

    def start(self, options: str = "", elsewhere: bool = False) -> str:
        """With more `options`; `elsewhere` = in another run directory."""
        named = [] if self.verb == "local" else [shlex.quote(self.swarm) if self.swarm else "SWARM"]
        there = ["--run-dir", "DIR" if elsewhere else shlex.quote(self.run_dir)] if elsewhere or self.run_dir else []
        return " ".join(["swarm-node", self.verb, *named, *there, *([options] if options else [])])

    def found(self, members: Mapping[str, PeerCard]) -> str:
        """So that it has somebody to begin with: those of `members` who can be reached, else a bootstrap peer."""
        swarm = next((card.swarm for card in members.values()), "")
        others = [address for address in living(members, []) if not is_relayed(address)]
        if swarm and others:
            return msgspec.structs.replace(self, swarm=join_link(swarm, [], others)).start()
        if self.verb == "bootstrap":
            return self.start()
        if self.swarm.startswith(f"{LINK_SCHEME}:"):
            return self.start("--bootstrap ADDRESS")
        return f"swarm-node bootstrap {shlex.quote(self.swarm) if self.swarm else 'MANIFEST'}"


ANY = Way()
"""Of which nothing is known."""


def examine(target: str | None, config: NodeConfig, json_output: bool) -> int:
    """Print each check as it is made, or all of them as JSON; 1 if one failed, else 0. Raises UserError if `target` is
    no run and no swarm."""
    run = RunDir(target) if target and Path(target).is_dir() else None
    swarm = _swarm_of(run) if run else find_swarm(target or config.swarm) if target or config.swarm else None
    if run is not None and run.exists:
        config = load_config(run.config)
    checks = []
    for check in _as_far_as_possible(_checks(target, config, run, swarm)):
        checks.append(check)
        if not json_output:
            typer.echo(f"{check.verdict:<4}  {check.name:<10}  {check.detail}")
            if check.remedy:
                typer.echo(f"{'':18}-> {check.remedy}")
    if json_output:
        typer.echo(json.dumps({"checks": msgspec.to_builtins(checks)}, indent=2))
    return int(any(check.verdict == "fail" for check in checks))


def _as_far_as_possible(checks: Iterator[Check]) -> Iterator[Check]:
    """What was found is not lost to what nobody foresaw."""
    try:
        yield from checks
    except UserError as error:
        yield Check("doctor", "fail", f"no further check can be made: {error}")
    except Exception as error:
        why = printable(f"{type(error).__name__}: {error}")
        yield Check("doctor", "fail", f"no further check can be made: {why}", upgrade_command())


def _way(target: str | None, config: NodeConfig, run: RunDir | None, swarm: Swarm | None, seen: Seen) -> Way:
    """With the `config` of the run, if `target` is one."""
    if run is None:
        return Way(swarm=target or config.swarm or "", run_dir=config.run_dir or "")
    alone = config.swarm is None and (swarm is None or config.pipeline.stages > 0)  # a crew of its own is a swarm, too
    if run.exists and alone:
        return Way("local", run_dir=str(run.path))
    if swarm is None:
        return Way(run_dir=str(run.path))
    return Way("bootstrap" if seen.role == BOOTSTRAP else "join", config.swarm or str(run.swarm), str(run.path))


def _checks(target: str | None, config: NodeConfig, run: RunDir | None, swarm: Swarm | None) -> Iterator[Check]:
    seen, damage = _seen(run)
    way = _way(target, config, run, swarm, seen)
    mine = seen.addresses
    running = time.time() - seen.time < FRESH_S or (run is not None and run.in_use)
    place = run.path if run else config.directory
    yield python()
    yield compiler()
    yield packages()
    yield torch_and_device(nvidia_gpus())
    if way.verb != "bootstrap":  # which has no model
        yield from room(config, place, running, way)
    yield directory(place, way)
    if damage:
        yield Check("status", "warn", f"{damage}; a node that runs there writes it anew", way.start())
    if way.verb == "local":
        yield versions({}, {})
        return
    yield ports(config.network, running, way)
    if seen.time:
        yield refusals(seen.refused, seen.time)
    listens = _as_it_listens(config.network, run)
    guess = reachable(listens, mine or [own_address()], way)
    answering: dict[str, bool] = {}
    if swarm is not None:
        answering = dial([address for address in [*swarm.peers, *config.network.bootstrap] if address not in mine])
    if swarm is None or not (any(answering.values()) or mine):
        yield guess
        if swarm is not None:
            yield begin(answering, way=way)
        yield versions({}, {})
        return
    through = msgspec.structs.replace(swarm, peers=[*mine, *swarm.peers])
    with visitor(through, config.network, lambda sentence: None) as transport:
        members = look_around(transport)
        now, me = time.time(), seen.peer
        made = {peer: at for peer, at in transport.made().items() if peer != me}
        others = {peer: card for peer, card in members.items() if peer != me}
        yield seen_from_others(transport.dial_back, others, listens, running, guess, way)
        yield begin(answering, members, way)
        connected = transport.stats().get("connections/dht", 0) > 0
        yield people(members, made, connected, way, any(answering.values()))
        yield clock(others, now, made)
        yield versions(members, transport.stats())


def _seen(run: RunDir | None) -> tuple[Seen, str]:
    """What the run last wrote of its swarm, and what is wrong with that, if something is."""
    try:
        found = None if run is None else read_status(run)
        return Seen() if found is None else msgspec.convert(found, Seen), ""
    except UserError as error:
        return Seen(), str(error)
    except msgspec.ValidationError as error:
        return Seen(), f"{run.status if run else ''} is damaged: {error}"


# --------------------------------------------------------------------- this machine


def python() -> Check:
    found = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= sys.version_info[:2] < (3, 13):
        return Check("python", "ok", found)
    return Check("python", "warn", f"{found} is not tested: 3.11 and 3.12 are", install_command())


def compiler() -> Check:
    """Whether what has no wheel everywhere (fastecdsa, of libp2p) can be built: a C compiler that finds GMP."""
    names = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    path = next((found for name in names if name and (found := shutil.which(name))), None)
    if path is None:
        return Check("compiler", "warn", "none: to run needs none, but to install or upgrade does", INSTALL_COMPILER)
    command = [path, "-fsyntax-only", "-I/opt/homebrew/include", "-I/usr/local/include", "-xc", "-"]
    try:
        built = subprocess.run(command, input=b"#include <gmp.h>\n", capture_output=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("compiler", "warn", f"{path} does not work: {error}", INSTALL_COMPILER)
    if built.returncode:
        return Check(
            "compiler", "warn", f"{path} finds no GMP headers: to install or upgrade needs them", INSTALL_COMPILER
        )
    return Check("compiler", "ok", f"{path}, with GMP")


def packages() -> Check:
    found, missing = {}, []
    for name in TESTED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        return Check("packages", "fail", f"missing: {', '.join(missing)}", reinstall_command())
    listed = ", ".join(f"{name} {number}" for name, number in found.items())
    if all(number == TESTED[name] or number.startswith(f"{TESTED[name]}.") for name, number in found.items()):
        return Check("packages", "ok", listed)
    return Check("packages", "warn", f"{listed}: not all are tested", reinstall_command())


def nvidia_gpus(root: Path = Path("/")) -> list[str]:
    """Devices of NVIDIA GPUs that this machine, or the container that this is, may use."""
    return sorted(map(str, [*root.glob("dev/nvidia[0-9]*"), *root.glob("usr/lib/wsl/lib/libcuda.so.1")]))


def torch_and_device(gpus: Sequence[str]) -> Check:
    """Whether torch uses the GPU that there is."""
    try:
        import torch
    except ImportError as error:
        return Check("torch", "fail", f"cannot be loaded: {error}", reinstall_command())
    number = torch.__version__
    if torch.cuda.is_available():
        return Check("torch", "ok", f"{number} on {torch.cuda.get_device_name()}")
    if gpus and torch.version.cuda is None and torch.version.hip is None:
        detail = f"{number} is built for the CPU alone, but there is an NVIDIA GPU ({gpus[0]})"
        return Check("torch", "fail", detail, torch_command(number.partition("+")[0]))
    if gpus and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
        detail = f"{number} cannot use the NVIDIA GPU ({gpus[0]}): is its driver older than CUDA {torch.version.cuda}?"
        return Check("torch", "fail", detail, "sudo ubuntu-drivers install")
    device = "mps" if torch.backends.mps.is_available() else f"cpu, {torch.get_num_threads()} threads"
    return Check("torch", "ok", f"{number} on {device}")


def room(config: NodeConfig, place: Path, running: bool, way: Way = ANY) -> Iterator[Check]:
    """Memory and disk for the chosen model. Fetches its config, if need be, but no weights."""
    from swarm_node.pipeline.compute.footprint import footprint
    from swarm_node.pipeline.compute.memory import Memory, free_memory
    from swarm_node.policy.loading import prepare

    model = config.policy.model
    try:
        plan = prepare(config.policy)
    except UserError as error:
        yield Check("memory", "fail", f"not known: {error}", f"hf download {shlex.quote(model)}")
        return
    itemsize = plan.dtype.itemsize
    try:
        (needed,) = Memory(config, plan).costs(((0, plan.config.num_hidden_layers),))
    except UserError:  # of a family that only whole machines hold
        needed = footprint(
            plan.size if plan.lora else 0, 0 if plan.lora else plan.size, itemsize, bool(config.grpo.beta)
        )
    free = free_memory()
    detail = f"{model} takes {_gib(needed)} before it samples, {_gib(free) if free else 'an unknown part'} is free"
    if plan.lora:
        crew = config.pipeline.crew or secrets.token_hex(CREW_BYTES)  # a password
        stages = f"--stages {2 * config.pipeline.stages or 2} --crew {crew}"
        remedy = (msgspec.structs.replace(way, verb="join") if way.verb == "local" else way).start(stages)
    else:
        remedy = way.start("--lora")
    if running:
        yield Check("memory", "ok", f"{model} takes {_gib(needed)} before it samples: the run has it")
    elif free and needed > TIGHT * free:
        yield Check("memory", "fail" if needed > free else "warn", detail, remedy)
    else:
        yield Check("memory", "ok", detail)
    trained = needed - itemsize * plan.size * plan.lora
    yield disk(config, place, (config.checkpoints.keep + 1) * trained, _to_fetch(plan.base, itemsize * plan.size), way)


def disk(config: NodeConfig, place: Path, kept: int, fetched: int, way: Way = ANY) -> Check:
    """Whether there is room for `kept` bytes of checkpoints at `place` and `fetched` bytes of weights in the hub's
    cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    wanted = [(place, kept, way.start(elsewhere=True)), (Path(HF_HUB_CACHE), fetched, "export HF_HOME=DIR")]
    needs: dict[int, int] = {}
    for path, size, remedy in wanted:
        there = _existing(path)
        device = there.stat().st_dev
        needs[device] = needs.get(device, 0) + size
        free = shutil.disk_usage(there).free
        if size and needs[device] > free:
            detail = f"{_gib(needs[device])} are needed at {path}, {_gib(free)} are free"
            return Check("disk", "fail", detail, f"{remedy}  # on another disk")
    weights = f" and {_gib(fetched)} of weights to fetch" if fetched else ""
    return Check("disk", "ok", f"room for {_gib(kept)} of checkpoints{weights}")


def _to_fetch(base: str, size: int) -> int:
    """Bytes of weights that are not on this machine yet."""
    from huggingface_hub import try_to_load_from_cache

    names = ("model.safetensors", "model.safetensors.index.json")
    here = Path(base).exists() or any(isinstance(try_to_load_from_cache(base, name), str) for name in names)
    return 0 if here else size


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.0f} MiB"


def _existing(path: Path) -> Path:
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def directory(path: Path, way: Way = ANY) -> Check:
    """Whether the run directory, or what it would be made in, can be written."""
    existing = _existing(path)
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return Check("directory", "ok", f"{path} can be written")
    if existing.is_dir():
        remedy = f"sudo chown -R $(id -u) {shlex.quote(str(existing))}"
    else:
        remedy = way.start(elsewhere=True)
    return Check("directory", "fail", f"{existing} cannot be written", remedy)


def ports(network: NetworkConfig, running: bool = False, way: Way = ANY) -> Check:
    """Whether the ports are free (or in use by the run itself)."""
    wanted = [network.port, network.gossip_port]
    if network.dial_only:
        return Check("ports", "ok", "none needed: this node only dials")
    if running:
        return Check("ports", "ok", "the run is using its ports")
    try:
        free = _free_ports(network)
    except LocalProtocolError as error:
        return Check("ports", "fail", str(error), way.start("--listen 0.0.0.0 --port 0 --gossip-port 0"))
    if all(port in (0, got) for port, got in zip(wanted, free, strict=True)):
        return Check("ports", "ok", f"{wanted[0]} and {wanted[1]} of {network.listen} are free")
    return Check(
        "ports",
        "warn",
        f"of {wanted[0]} and {wanted[1]} not both are free; a node would take {free[0]} and {free[1]}",
        way.start(f"--port {free[0]} --gossip-port {free[1]}"),
    )


def _free_ports(network: NetworkConfig) -> list[int]:
    """Those that a node would take now. Raises LocalProtocolError."""
    first = free_port(network.listen, network.port)
    second = free_port(network.listen, network.gossip_port)
    return [first, second if second != first else free_port(network.listen, second + 1)]


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


def reachable(network: NetworkConfig, addresses: Sequence[str], way: Way = ANY) -> Check:
    """Whether others are likely to reach a node at `addresses`, as far as can be told from here."""
    name, remedy = "reachable", way.start(MAP_PORTS)
    if network.dial_only:
        return Check(name, "ok", "nobody can reach this node, as it was told: it only dials")
    if network.announce:
        return Check(name, "ok", f"announced as {', '.join(network.announce)}: check it from another machine")
    direct = [address for address in addresses if "/p2p-circuit" not in address]
    if any(_reach(address) == "public" for address in direct):
        asking = f"`swarm-node doctor {shlex.quote(way.swarm) if way.swarm else 'LINK'}` has members connect to it"
        return Check(name, "ok", f"listens on a public address: {asking}")
    if len(direct) < len(addresses):
        return Check(name, "warn", "reached only through a relay", remedy)
    if any(_reach(address) == "private" for address in direct):
        return Check(name, "warn", "listens on private addresses only: nobody outside this network reaches it", remedy)
    if network.listen.startswith("127."):
        return Check(name, "warn", "listens for this machine only", way.start("--listen 0.0.0.0"))
    return Check(name, "warn", "has no address but this machine's own", "ping -c 1 1.1.1.1")


def _reach(address: str) -> Literal["public", "private", "own", "unknown"]:
    _, kind, host, *_ = [*address.split("/"), "", ""]
    if kind.startswith("dns"):
        return "public"
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:  # members say what they like of themselves
        return "unknown"
    return "own" if ip.is_loopback else "public" if is_public(ip) else "private"


# --------------------------------------------------------------------- the swarm


def seen_from_others(
    dial_back: Callable[[str, Sequence[int]], list[bool]],
    members: Mapping[str, PeerCard],
    network: NetworkConfig,
    running: bool,
    guess: Check,
    way: Way = ANY,
) -> Check:
    """Whether members that are asked for it connect to the ports that the run listens on or, unless it is `running`,
    that are listened on for as long as this takes. The `guess` if nobody can tell."""
    if network.dial_only:
        return guess
    tried: dict[str, list[bool]] = {}
    with ExitStack() as stack:
        try:
            ports = [network.port, network.gossip_port] if running else _free_ports(network)
            family = socket.AF_INET6 if ":" in network.listen else socket.AF_INET
            for port in () if running else ports:
                stack.enter_context(socket.create_server((network.listen, port), family=family))
        except (LocalProtocolError, OSError):  # the check of the ports says so
            return guess
        direct = [peer for peer, card in members.items() if not all(map(is_relayed, card.addresses))]
        for peer in random.sample(direct, min(ASKED, len(direct))):
            try:
                tried[peer] = dial_back(peer, ports)
            except (PeerUnreachable, RemoteProtocolError):  # it is of a version that does not
                continue
            if len(tried) == WITNESSES:
                break
    if not tried:
        return guess
    named = " and ".join(f"{members[peer].name} …{peer[-8:]}" for peer in tried)
    connected = [all(answers[i] for answers in tried.values()) for i in range(len(ports))]
    if not all(connected):
        closed = " and ".join(str(port) for port, reached in zip(ports, connected, strict=True) if not reached)
        detail = f"not at port {closed}, as {named} found: forward it (TCP) in the router, or let this node ask it to"
        return Check("reachable", "warn", detail, way.start(MAP_PORTS))
    near = all(_reach(address) != "public" for peer in tried for address in members[peer].addresses if "/ip" in address)
    where = ", which only tells of this network" if near else ""
    return Check("reachable", "ok", f"{named} connected to ports {ports[0]} and {ports[1]}{where}")


def begin(answering: Mapping[str, bool], members: Mapping[str, PeerCard] | None = None, way: Way = ANY) -> Check:
    """Whether there is somebody to begin with: an address that answers and, if `members` are known, for one of them."""
    name, dead = "bootstrap", [address for address, answers in answering.items() if not answers]
    remedy = way.found(members or {})
    if not answering:
        return Check(name, "warn", "no address to begin with", remedy)
    if len(dead) == len(answering):
        return Check(name, "fail", f"no address answers: {_listed(dead)}; a node keeps trying", remedy)
    strange = [] if members is None else [a for a in answering if a not in dead and peer_of(a) not in members]
    said = f"{len(answering) - len(dead)} of {len(answering)} addresses answer"
    said += f", not {_listed(dead)}" if dead else ""
    said += f", but not for members: {_listed(strange)}" if strange else ""
    return Check(name, "warn", said, remedy) if dead or strange else Check(name, "ok", said)


def _listed(addresses: Sequence[str]) -> str:
    return ", ".join(addresses[:3]) + (", …" if len(addresses) > 3 else "")


def people(
    members: Mapping[str, PeerCard],
    made: Mapping[str, float] | None = None,
    connected: bool = False,
    way: Way = ANY,
    answers: bool = True,
) -> Check:
    """Whether there are members. `made`: when the cards of all were made that were seen, `connected`: whether peers
    answer at all, `answers`: whether anything does."""
    name = "members"
    if members:
        return Check(name, "ok", f"{len(members)} are there")
    if made:
        detail = f"none by this machine's clock, but cards of {len(made)} that are too old, or of times to come, by it"
        return Check(name, "warn", detail, SET_CLOCK)
    if connected:
        said = "peers answer, but none is a member of this swarm"
    else:
        said = "something answers, but not as a peer" if answers else "nobody answers"
    return Check(name, "warn", said, way.found({}))


def clock(members: Mapping[str, PeerCard], now: float, made: Mapping[str, float] | None = None) -> Check:
    """This machine's clock against the cards of others, which are up to a renewal old: of `members`, and only where
    this machine's clock leaves none, of all that `made` tells of, since anybody can sign cards of any time."""
    dated = {peer: card.created for peer, card in members.items()} or dict(made or {})
    if not dated:
        return Check("clock", "warn", "nobody to compare with", SET_CLOCK)
    ahead = median(now - created for created in dated.values()) - CARD_RENEWAL_S / 2
    detail = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the other members'"
    if abs(ahead) <= CARD_RENEWAL_S:
        return Check("clock", "ok", f"agrees with the other members' within {CARD_RENEWAL_S:g} s")
    return Check("clock", "fail" if abs(ahead) > MAX_CLOCK_SKEW_S else "warn", detail, SET_CLOCK)


def versions(members: Mapping[str, PeerCard], totals: Mapping[str, float]) -> Check:
    """This node's version against those of `members` and, by a transport's `totals`, of those it refuses."""
    mine = f"swarm-node {__version__}, protocol {' and '.join(map(str, sorted(SPOKEN)))}"
    if totals.get("rejected/newer"):
        detail = f"{mine}; there are peers with a newer one, who are not heard"
        return Check("versions", "warn" if members else "fail", detail, upgrade_command())
    older = sum(max(card.protocol, card.speaks) < PROTOCOL_VERSION for card in members.values())
    if totals.get("rejected/version"):
        detail = f"{mine}; there are peers with an older one, who are not heard"
        return Check("versions", "warn", detail, f"pip install --upgrade {PACKAGE}  # on their machines")
    return Check("versions", "ok", f"{mine}" + (f"; {older} of the members speak the one before" if older else ""))


def refusals(refused: Sequence[Row], written: float) -> Check:
    """Whether somebody sends what honest nodes do not, by what the run wrote last, at Unix time `written`. It refuses
    that by itself: the remedy keeps the machine from hearing it. A private address gets no remedy, because it may be
    the router or the container network through which everybody comes."""
    name = "refusals"
    worst = [row for row in refused if row.hostile >= ATTACK and row.last > written - LATELY_S]
    if not worst:
        return Check(name, "ok", "nobody keeps sending what honest nodes do not")
    row = worst[0]
    others = f", and from {len(worst) - 1} more" if worst[1:] else ""
    detail = f"the run refused {row.says}, from {row.place()}{others}: it goes on, and nothing has to be done"
    known = next((row.ip for row in worst if row.ip and is_public(row.ip.partition("/")[0])), "")
    return Check(name, "warn", detail, f"sudo ufw insert 1 deny from {known}" if known else "")


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
