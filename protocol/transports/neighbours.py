"""Which remote addresses count as one: keys are free, addresses less so."""

from __future__ import annotations

import ipaddress
from functools import lru_cache

V6_PREFIX = 64
"""Bits: the smallest network that a home or a rented machine is given, so all addresses in it cost as much as one."""


@lru_cache(maxsize=4096)
def neighbourhood(host: str) -> str:
    """The IPv4 address, also of one that is mapped into IPv6; the /64 of an IPv6 address; any other text as it is."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return str(ipaddress.ip_network((address, V6_PREFIX), strict=False))
        address = address.ipv4_mapped
    return str(address)


def neighbourhood_of_stream(multiaddr: str) -> str:
    """That of the machine at a stream's other end, or of the relay that passes it on; "" if there is no address."""
    parts = multiaddr.split("/")
    return neighbourhood(parts[2]) if len(parts) > 2 and parts[1] in ("ip4", "ip6") else ""
