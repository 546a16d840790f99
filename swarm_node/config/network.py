"""Configuration of the network: addresses, ports, limits of traffic."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from swarm_node.config.section import Section
from swarm_protocol.limits import MAX_ADDRESS_CHARS, MAX_ADDRESSES
from swarm_protocol.transports.gossip.pipe import MAX_CONNECTIONS, MAX_HOST_CHARS
from swarm_protocol.transports.settings import NetworkSettings, endpoint


def _is_ip(text: str, version: str = "") -> bool:
    """Whether `text` is an IP address, without a zone, of `version` 4 or 6 if given."""
    try:
        return "%" not in text and version in ("", str(ipaddress.ip_address(text).version))
    except ValueError:
        return False


def _is_host(text: str) -> bool:
    """Whether `text` is an IP address or may be a host name."""
    label = "[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
    name = re.fullmatch(rf"({label}\.)*{label}\.?", text) and not re.fullmatch(r"[0-9.]+", text)
    return len(text) <= MAX_HOST_CHARS and (_is_ip(text) or bool(name))


def checked_ip(text: str) -> str:
    """`text` if it is an IP address. Raises PydanticCustomError."""
    if not _is_ip(text):
        raise PydanticCustomError("ip", "must be an IP address")
    return text


def _checked_announcement(text: str) -> str:
    """`text` if it is a host, or a multiaddress of a TCP port. Raises PydanticCustomError."""
    found = endpoint(text) if text.startswith("/") and len(text) <= MAX_ADDRESS_CHARS else None
    if found is None:
        good = _is_host(text)
    else:
        _, kind, host, _, port, *rest = text.split("/")
        fits = _is_ip(host, kind[2:]) if kind in ("ip4", "ip6") else kind in ("dns", "dns4", "dns6") and _is_host(host)
        good = fits and 0 < int(port) < 65536 and (not rest or (len(rest) == 2 and rest[0] == "p2p"))
    if not good:
        raise PydanticCustomError(
            "announce", "must be an IP address, a host name, or a multiaddress such as /ip4/203.0.113.7/tcp/31330"
        )
    return text


def _checked_rate(mbit: float) -> float:
    if 0 < mbit < 1:
        raise PydanticCustomError("rate", "must be 0 (no limit) or 1 and more: below that, peers give up waiting")
    return mbit


Rate = Annotated[float, Field(ge=0), AfterValidator(_checked_rate)]


class NetworkConfig(Section):
    """Where this node listens, and which addresses it announces."""

    identity: str | None = None
    """Key file that makes this node's peer id, such as a mounted secret. It is read and never written. Unset =
    identity.key in the run directory, made at the first start."""
    listen: Annotated[str, AfterValidator(checked_ip)] = NetworkSettings.listen
    """IP address to listen on; 127.0.0.1 = this machine only."""
    port: int = Field(NetworkSettings.port, ge=0, lt=65536)
    """TCP port of the DHT and of streams; the next free one if it is taken; 0 = any."""
    gossip_port: int = Field(NetworkSettings.gossip_port, ge=0, lt=65536)
    """TCP port of the gossip process; the next free one if it is taken; 0 = any."""
    announce: list[Annotated[str, AfterValidator(_checked_announcement)]] = Field([], max_length=MAX_ADDRESSES)
    """Public IP address or host name of this node, where a router forwards its ports; or address of its DHT port."""
    dial_only: bool = NetworkSettings.dial_only
    """Never listen: for machines that others cannot reach anyway."""
    bootstrap: list[str] = []
    """Multiaddress of a peer to connect to first, besides those of the manifest."""
    relay: bool = NetworkSettings.relay
    """Use relays if others cannot reach this node directly."""
    serve_relay: bool = NetworkSettings.serve_relay
    """Relay streams for peers that cannot be reached directly. Their traffic then uses this node's connection."""
    nat_port_map: bool = NetworkSettings.nat_port_map
    """Ask the router for a port by UPnP or NAT-PMP."""
    max_connections: int = Field(NetworkSettings.max_connections, ge=1, le=MAX_CONNECTIONS)
    """Most gossip connections."""
    max_upload_mbit: Rate = NetworkSettings.max_upload_mbit
    """Most that this node sends, in Mbit/s; 0 = no limit. Half of it is for gossip, half for weights and all else."""
    max_download_mbit: Rate = NetworkSettings.max_download_mbit
    """Most that this node receives, in Mbit/s; 0 = no limit. Half is for gossip, half for weights and all else."""
