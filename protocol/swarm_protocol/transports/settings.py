"""Settings of the network, and the addresses and ports that follow from them. Nothing here uses the network."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from swarm_protocol.errors import LocalProtocolError
from swarm_protocol.hosts import is_public
from swarm_protocol.limits import CARD_RENEWAL_S, CARD_TTL_S

PORTS_TRIED = 100  # a port that is taken is looked for among this many above it


@dataclass(frozen=True)
class NetworkSettings:
    """Where a node listens, which addresses it announces, how much it sends, and how often it does its rounds.

    Fields with the name of a key of `[network]` are explained there (swarm_node/config/network.py).
    """

    listen: str = "0.0.0.0"
    port: int = 31330
    gossip_port: int = 31331
    named_ports: tuple[str, ...] = ("port", "gossip_port")
    """Those of these two ports that the user chose. The others are defaults: the port of the last run comes before
    them."""
    announce: tuple[str, ...] = ()
    dial_only: bool = False
    bootstrap: tuple[str, ...] = ()
    relay: bool = True
    serve_relay: bool = False
    nat_port_map: bool = False
    max_connections: int = 64
    max_upload_mbit: float = 0.0
    max_download_mbit: float = 0.0
    card_ttl_s: float = CARD_TTL_S  # life of a card; one value for the whole swarm (shorter in tests)
    card_renewal_s: float = CARD_RENEWAL_S  # time between two renewals of the own card
    lookup_s: float = 5.0  # mean time between two rounds: members are looked up, dialled and dropped


def free_port(ip: str, port: int) -> int:
    """`port`, or the next one that nobody listens on; any for 0. Raises LocalProtocolError if there is none.

    Asked beforehand because two p2pd start on one port without complaint and then share its connections.
    """
    for candidate in range(port, min(port + PORTS_TRIED, 65536)):
        if found := socket_at(ip, candidate):
            with found:
                return int(found.getsockname()[1])
    raise LocalProtocolError(f"ports {port} to {candidate} of {ip} are all taken: name another one")


def is_free(ip: str, port: int) -> bool:
    """Whether nobody listens on `port`. Raises LocalProtocolError if this process may not listen there."""
    found = socket_at(ip, port)
    if found is not None:
        found.close()
    return found is not None


def socket_at(ip: str, port: int, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket | None:
    """A socket at `port`, or at any for 0; None if the port is taken. Raises LocalProtocolError if it is forbidden."""
    made = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, kind)
    if kind == socket.SOCK_STREAM:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that are dying do not count
    try:
        made.bind((ip, port))
    except OSError as error:
        made.close()
        if error.errno != errno.EADDRINUSE:
            raise LocalProtocolError(f"cannot listen on {ip} port {port}: {error.strerror}") from error
        return None
    return made


def listen_address(ip: str, port: int) -> str:
    return f"/{'ip6' if ':' in ip else 'ip4'}/{ip}/tcp/{port}"


def announced(announce: Iterable[str], port: int) -> list[str]:
    """Multiaddresses for `port`, without peer id, that the user wants announced."""
    addresses = []
    for item in announce:
        if item.startswith("/"):
            addresses.append(item.split("/p2p/")[0])
            continue
        try:
            kind = f"ip{ipaddress.ip_address(item).version}"
        except ValueError:
            kind = "dns4"
        addresses.append(f"/{kind}/{item}/tcp/{port}")
    return addresses


def endpoint(address: str) -> tuple[str, int] | None:
    """(host, port) to connect to for a multiaddress; None if it leads through a relay or is not TCP."""
    parts = address.split("/")
    if "p2p-circuit" in parts or len(parts) < 5 or parts[3] != "tcp" or not re.fullmatch("[0-9]{1,5}", parts[4]):
        return None
    return parts[2], min(int(parts[4]), 65535)


def best_first(addresses: list[str]) -> list[str]:
    """TCP addresses only, public before private before relayed; loopback only if there is nothing else."""
    reachable = [address for address in addresses if "/tcp/" in address and not address.startswith("/ip6zone/")]
    abroad = [address for address in reachable if _rank(address) < 3]
    return sorted(abroad or reachable, key=_rank)


def _rank(address: str) -> int:
    if "/p2p-circuit" in address:
        return 2
    _, kind, host, *_ = address.split("/")
    if not kind.startswith("ip"):
        return 0
    ip = ipaddress.ip_address(host)
    return 3 if ip.is_loopback else 0 if is_public(ip) else 1
