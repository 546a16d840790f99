"""Decides which IP addresses belong to hosts of the public internet.

The standard library's `is_global` also accepts addresses that lead elsewhere: an IPv6 address may carry a private IPv4
address for a translator or a tunnel, and some ranges were given up but never listed as private.
"""

from __future__ import annotations

import ipaddress

from protocol.hosts import IpAddress, translated_ipv4

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
