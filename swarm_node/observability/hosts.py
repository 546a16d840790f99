"""The names by which an HTTP request may call this machine.

The owner of a web page can point the name of the page at 127.0.0.1 (DNS rebinding). The browser then lets the page's
script read the answers of a server here. The request still carries that name in its `Host` header, so a server that
answers only to expected names is safe. No page can have an IP address or `localhost` as its name.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection

ANY = "*"  # in a list of names: any name is expected


def host_of(header: str) -> str:
    """The name in a `Host` header, in lower case, without brackets and without the port, which a tunnel may change."""
    name, _, port = header.strip().rpartition(":")
    return (name if name and port.isdecimal() else header.strip()).strip("[]").lower()


def is_expected(header: str | None, names: Collection[str]) -> bool:
    """Whether a request with this `Host` header may be answered. Its host must be an IP address, `localhost` or one of
    `names`, which are in lower case; a missing header is allowed, since no browser leaves it out."""
    if header is None or ANY in names:
        return True
    host = host_of(header)
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host in names
    return True
