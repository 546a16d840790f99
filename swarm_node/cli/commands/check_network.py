"""Checks of the network: ports, whether others reach this node, members, clock, versions and refusals."""

from __future__ import annotations

import random
import shlex
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from statistics import median

from swarm_node import __version__
from swarm_node.cli.commands.check import UNKNOWN_START, Check, StartCommand
from swarm_node.config import NetworkConfig
from swarm_node.install import FIND_WHEELS, PACKAGE, upgrade_command
from swarm_node.observability.refusals import RefusalRow
from swarm_node.observability.restarts import restarts
from swarm_node.swarm.clock import SET_CLOCK
from swarm_node.swarm.links import kind_of
from swarm_protocol.codec import SPOKEN
from swarm_protocol.errors import LocalProtocolError, PeerUnreachable, RemoteProtocolError
from swarm_protocol.hosts import is_public
from swarm_protocol.limits import CARD_RENEWAL_S, MAX_CLOCK_SKEW_S
from swarm_protocol.messages import PROTOCOL_VERSION, PeerCard
from swarm_protocol.peers import is_relayed, peer_of
from swarm_protocol.transports.settings import free_port

ASKED = 5  # most members asked to connect back
WITNESSES = 2  # answers about connecting back that suffice
ATTACK = 10  # refusals of one source that suggest an attack: a faulty peer causes one or two
LATELY_S = 3600.0  # older refusals are not reported: counts are of the whole run, and an address may change hands
MAP_PORTS = "--set network.nat_port_map=true"


def ports(network: NetworkConfig, running: bool = False, start: StartCommand = UNKNOWN_START) -> Check:
    """Whether the ports are free, or used by the run itself."""
    if network.dial_only:
        return Check("ports", "ok", "none needed: this node only dials")
    if running:
        return Check("ports", "ok", "the run is using its ports")
    try:
        port, gossip_port = _free_ports(network)
    except LocalProtocolError as error:
        return Check("ports", "fail", str(error), start.having("--listen 0.0.0.0 --port 0 --gossip-port 0"))
    wanted = f"{network.port} and {network.gossip_port}"
    if network.port in (0, port) and network.gossip_port in (0, gossip_port):
        return Check("ports", "ok", f"{wanted} on {network.listen} are free")
    detail = f"{wanted} are not both free; a node uses {port} and {gossip_port} instead"
    if start.verb != "bootstrap":
        return Check("ports", "ok", detail)
    detail += ", so links handed out before lead nowhere"
    return Check("ports", "warn", detail, start.having(f"--port {port} --gossip-port {gossip_port}"))


def _free_ports(network: NetworkConfig) -> list[int]:
    """The two ports that a node would get now. Raises LocalProtocolError."""
    first = free_port(network.listen, network.port)
    second = free_port(network.listen, network.gossip_port)
    return [first, second if second != first else free_port(network.listen, second + 1)]


def own_address() -> str:
    """This machine's address towards the internet, as a multiaddress; loopback if it has none. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address reserved for examples
            return f"/ip4/{probe.getsockname()[0]}/tcp/0"
        except OSError:
            return "/ip4/127.0.0.1/tcp/0"


def reachable(network: NetworkConfig, addresses: Sequence[str], start: StartCommand = UNKNOWN_START) -> Check:
    """Whether others can probably reach a node at `addresses`: a guess from the kind of address."""
    name, remedy = "reachable", start.having(MAP_PORTS)
    if network.dial_only:
        return Check(name, "ok", "not reachable, as configured: this node only dials")
    if network.announce:
        return Check(name, "ok", f"announced as {', '.join(network.announce)}; test it from another machine")
    direct = [address for address in addresses if "/p2p-circuit" not in address]
    kinds = {kind_of(address) for address in direct}
    if "public" in kinds:
        tested = f"`swarm-node doctor {shlex.quote(start.swarm) if start.swarm else 'LINK'}` tests it through members"
        return Check(name, "ok", f"listens on a public address; {tested}")
    if len(direct) < len(addresses):
        return Check(name, "warn", "reachable only through a relay", remedy)
    if "private" in kinds:
        return Check(name, "warn", "listens on private addresses only: reachable only inside this network", remedy)
    if network.listen.startswith("127."):
        return Check(name, "warn", "listens for this machine only", start.having("--listen 0.0.0.0"))
    return Check(name, "warn", "has no address but loopback", "ping -c 1 1.1.1.1")


def refusals(refused: Sequence[RefusalRow], written: float) -> Check:
    """Whether a source keeps sending what honest nodes do not, as the run noted at Unix time `written`. The run refuses
    such messages by itself. The remedy also blocks the source's address. A private address gets no remedy: it may be
    the router or the container network that all peers come through."""
    name = "refusals"
    worst = [row for row in refused if row.hostile >= ATTACK and row.last > written - LATELY_S]
    if not worst:
        return Check(name, "ok", "no source keeps sending what honest nodes do not")
    row = worst[0]
    others = f", and from {len(worst) - 1} more" if worst[1:] else ""
    detail = f"the run refused {row.says}, from {row.place()}{others}; it continues, nothing needs to be done"
    known = next((row.ip for row in worst if row.ip and is_public(row.ip.partition("/")[0])), "")
    return Check(name, "warn", detail, f"sudo ufw insert 1 deny from {known}" if known else "")


def restarted(traffic: Mapping[str, float], why: Mapping[str, str]) -> Check:
    """Whether processes of the network ended and were started again since the run began, and why the last time."""
    name = "network"
    if not (clauses := list(restarts(traffic, why))):
        return Check(name, "ok", "no process of the network had to be started again")
    return Check(name, "warn", f"{'; '.join(clauses)}; the run continues, and trains by itself meanwhile")


def seen_from_others(
    dial_back: Callable[[str, Sequence[int]], list[bool]],
    members: Mapping[str, PeerCard],
    network: NetworkConfig,
    running: bool,
    guess: Check,
    start: StartCommand = UNKNOWN_START,
) -> Check:
    """Whether members connect to this machine's ports when asked to; `guess` if none can tell. Unless a run is
    `running`, which listens on them, they are opened here until the members have answered."""
    if network.dial_only:
        return guess
    tried: dict[str, list[bool]] = {}
    with ExitStack() as stack:
        try:
            ports = [network.port, network.gossip_port] if running else _free_ports(network)
            family = socket.AF_INET6 if ":" in network.listen else socket.AF_INET
            for port in () if running else ports:
                stack.enter_context(socket.create_server((network.listen, port), family=family))
        except (LocalProtocolError, OSError):  # the check of the ports reports it
            return guess
        direct = [peer for peer, card in members.items() if not all(map(is_relayed, card.addresses))]
        for peer in random.sample(direct, min(ASKED, len(direct))):
            try:
                tried[peer] = dial_back(peer, ports)
            except (PeerUnreachable, RemoteProtocolError):  # its version cannot
                continue
            if len(tried) == WITNESSES:
                break
    if not tried:
        return guess
    named = " and ".join(f"{members[peer].name} …{peer[-8:]}" for peer in tried)
    connected = [all(answers[i] for answers in tried.values()) for i in range(len(ports))]
    if not all(connected):
        closed = " and ".join(str(port) for port, reached in zip(ports, connected, strict=True) if not reached)
        detail = f"not at port {closed}, says {named}: forward it (TCP) in the router, or let this node ask the router"
        return Check("reachable", "warn", detail, start.having(MAP_PORTS))
    addresses = [address for peer in tried for address in members[peer].addresses if "/ip" in address]
    near = all(kind_of(address) != "public" for address in addresses)
    where = ", but from this network only" if near else ""
    return Check("reachable", "ok", f"{named} connected to ports {ports[0]} and {ports[1]}{where}")


def begin(
    answering: Mapping[str, bool], members: Mapping[str, PeerCard] | None = None, start: StartCommand = UNKNOWN_START
) -> Check:
    """Whether an address to begin with answers, and belongs to one of `members`, if these are known."""
    name, dead = "bootstrap", [address for address, answers in answering.items() if not answers]
    remedy = start.reaching(members or {})
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
    start: StartCommand = UNKNOWN_START,
    answers: bool = True,
) -> Check:
    """Whether there are members. `made` has the creation time of every card seen, valid or not. `connected`: peers
    answer. `answers`: anything does."""
    name = "members"
    if members:
        return Check(name, "ok", f"{len(members)} present")
    if made:
        detail = f"none by this machine's clock: by it, the cards of {len(made)} are too old or from the future"
        return Check(name, "warn", detail, SET_CLOCK)
    said = "something answers, but not as a peer" if answers else "nobody answers"
    if connected:
        said = "peers answer, but none is a member of this swarm"
    return Check(name, "warn", said, start.reaching({}))


def clock(members: Mapping[str, PeerCard], now: float, made: Mapping[str, float] | None = None) -> Check:
    """Compare this machine's clock with the creation times of other nodes' cards. A card is up to one renewal old.
    Cards of `members` count. All cards in `made` count only if there are no members, because anybody can sign cards of
    any time."""
    dated = {peer: card.created for peer, card in members.items()} or dict(made or {})
    if not dated:
        return Check("clock", "ok", "not compared: no other node has been seen")
    ahead = median(now - created for created in dated.values()) - CARD_RENEWAL_S / 2
    detail = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the other members'"
    if abs(ahead) <= CARD_RENEWAL_S:
        return Check("clock", "ok", f"within {CARD_RENEWAL_S:g} s of the other members'")
    return Check("clock", "fail" if abs(ahead) > MAX_CLOCK_SKEW_S else "warn", detail, SET_CLOCK)


def versions(members: Mapping[str, PeerCard], totals: Mapping[str, float]) -> Check:
    """Compare this node's version with those of `members` and, from a transport's `totals`, of refused peers."""
    mine = f"swarm-node {__version__}, protocol {' and '.join(map(str, sorted(SPOKEN)))}"
    if totals.get("rejected/newer"):
        detail = f"{mine}; peers with a newer version are ignored"
        return Check("versions", "warn" if members else "fail", detail, upgrade_command())
    older = sum(max(card.protocol, card.speaks) < PROTOCOL_VERSION for card in members.values())
    if totals.get("rejected/version"):
        detail = f"{mine}; peers with an older version are ignored"
        upgrade = f"pip install --upgrade '{PACKAGE}[swarm]' {FIND_WHEELS}"
        return Check("versions", "warn", detail, f"{upgrade}  # on their machines")
    return Check("versions", "ok", f"{mine}" + (f"; {older} of the members use the previous one" if older else ""))
