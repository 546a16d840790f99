"""Decides which IP addresses belong to one host, and which to hosts of the public internet.

An IPv6 address may carry an IPv4 address, and packets to it then end at that IPv4 host:

    ::ffff:a.b.c.d (mapped)   64:ff9b::a.b.c.d (NAT64)      the system, or a translator, connects to a.b.c.d
    ::a.b.c.d (compatible)    2002:aabb:ccdd::/48 (6to4)    tunnels that were given up; here and there one still works
"""

from __future__ import annotations

import ipaddress
from functools import lru_cache

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
"""A translator's prefix (RFC 6052): the last 32 bits are the IPv4 address that is reached. In a network that has IPv6
alone, the names of all IPv4 hosts resolve to it."""
COMPATIBLE = ipaddress.IPv6Network("::/96")
"""RFC 4291, 2.5.5.1. The first two addresses in it carry nothing: :: is no address, and ::1 is loopback."""
V6_PREFIX = 64
"""Bits: the smallest network that a home or a rented machine is given, so all addresses in it cost as much as one."""


def translated_ipv4(ip: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that a connection to `ip` is made to, if `ip` is mapped or NAT64."""
    if ip in NAT64:
        return ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF)
    return ip.ipv4_mapped


def host_address(text: str) -> IpAddress | None:
    """The IP address in `text`, without a zone, and as IPv4 where IPv6 carries it; None if `text` is no IP address."""
    try:
        ip = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    if isinstance(ip, ipaddress.IPv4Address):
        return ip
    if ip in COMPATIBLE and int(ip) > 1:
        return ipaddress.IPv4Address(int(ip))
    return translated_ipv4(ip) or ip.sixtofour or ip


@lru_cache(maxsize=8192)
def neighbourhood(host: str) -> str:
    """The unit that counts as one host, because keys are free and addresses cost something: an IPv4 address, also if an
    IPv6 address carries it; an IPv6 network of `V6_PREFIX` bits; any other text as it is."""
    ip = host_address(host)
    if isinstance(ip, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((ip, V6_PREFIX), strict=False))
    return host if ip is None else str(ip)


def neighbourhood_of_stream(multiaddr: str) -> str:
    """The neighbourhood of the machine at a stream's other end, or of the relay in between; "" if there is no
    address."""
    parts = multiaddr.split("/")
    return neighbourhood(parts[2]) if len(parts) > 2 and parts[1] in ("ip4", "ip6") else ""


UNICAST = ipaddress.IPv6Network("2000::/3")
"""All IPv6 addresses that were ever given to hosts of the internet. Outside it lie, among others, ::/96 (carries IPv4),
::ffff:0:0:0/96 and 64:ff9b:1::/48 (translators of one network), fec0::/10 (one site)."""

NOT_PUBLIC = tuple(
    ipaddress.ip_network(block)
    for block in (
        "192.88.99.0/24",  # relays of 6to4, given up (RFC 7526)
        "2001::/32",  # Teredo: carries IPv4
        "2002::/16",  # 6to4: carries IPv4
        "3fff::/20",  # documentation (RFC 9637)
    )
)
"""Ranges that `is_global` accepts in some versions of Python though no host of the internet is there."""


def is_public(address: str | IpAddress) -> bool:
    """Whether a connection to `address` leads to one host of the public internet. Raises ValueError if `address` is no
    IP address."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        reached = translated_ipv4(ip)
        if reached is not None:
            return is_public(reached)
        if ip not in UNICAST:
            return False
    return ip.is_global and not ip.is_multicast and not any(ip in block for block in NOT_PUBLIC)
