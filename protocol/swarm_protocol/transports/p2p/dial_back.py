"""Connecting back: a machine learns whether others can reach it by asking a peer to connect to some of its ports.

    asker --count, ports (2 bytes each)--> peer: connects to where the asker's own connection comes from, nowhere else
          <--a byte for each: 1 = connected--

Nothing is sent over these connections. The asker's connection may come from a translator of addresses or a proxy, so
strangers could probe a few ports near the peer. Hence: no system ports, a few ports a minute, and only public addresses
or addresses in a net in which the peer itself is found. The router is excluded: a container sees all connections come
from there.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from swarm_protocol.errors import PeerUnreachable, RemoteProtocolError
from swarm_protocol.hosts import is_public
from swarm_protocol.transports.settings import endpoint

MAX_PORTS = 4
FIRST_PORT = 1024  # lower ports are the system's: no node listens there by default
MAX_ASKERS = 4  # askers at a time
PORTS_A_MINUTE, PORTS_A_MINUTE_EACH = 64, 8
"""Connected to, of all askers and of those from one address: a doctor asks for two, of up to five peers."""
CONNECT_S = 3.0
DIAL_BACK_ANSWER_S = CONNECT_S + 2.0
NEAR_PREFIX = {4: 24, 6: 64}
"""Length of the prefix of a net that is not on one of this machine's interfaces, by version of IP."""
PRIVATE_BLOCKS = [
    ipaddress.ip_network(block)
    for block in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7")
]
"""Private networks, for interfaces whose address has no net (tunnels)."""
PROC_NET = Path("/proc/net")
Net = ipaddress.IPv4Network | ipaddress.IPv6Network


class DialBack:
    """Connects back to peers that ask for it."""

    def __init__(self, told: Callable[[], Sequence[str]], clock: Callable[[], float] = time.monotonic) -> None:
        """`told` returns the multiaddresses under which others find this node."""
        self._told = told
        self._clock = clock
        self._asked = 0
        self._looked: deque[tuple[float, str, int]] = deque()  # (time, address, number of ports) of the last minute

    async def serve(self, came_from: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the one question on a stream of a peer at the multiaddress `came_from`, and close it; without an
        answer if that leads through a relay or to where strangers have no business, or too much is asked."""
        self._asked += 1
        try:
            target = endpoint(came_from)
            if target is None or self._asked > MAX_ASKERS or not may_look_at(target[0], self._told()):
                return
            with suppress(TimeoutError, EOFError, OSError):
                async with asyncio.timeout(DIAL_BACK_ANSWER_S):
                    count = (await reader.readexactly(1))[0]
                    if not 0 < count <= MAX_PORTS:
                        return
                    data = await reader.readexactly(2 * count)
                    ports = [int.from_bytes(data[i : i + 2], "big") for i in range(0, len(data), 2)]
                    if min(ports) < FIRST_PORT or not self._take(target[0], count):
                        return
                    writer.write(bytes(await asyncio.gather(*(_connects(target[0], port) for port in ports))))
                    await writer.drain()
        finally:
            self._asked -= 1
            writer.close()

    def _take(self, host: str, count: int) -> bool:
        """Whether this many ports of `host` may be tried now. If so, they are counted."""
        now = self._clock()
        while self._looked and self._looked[0][0] <= now - 60.0:
            self._looked.popleft()
        total = sum(looked for _, _, looked in self._looked)
        there = sum(looked for _, at, looked in self._looked if at == host)
        if total + count > PORTS_A_MINUTE or there + count > PORTS_A_MINUTE_EACH:
            return False
        self._looked.append((now, host, count))
        return True


def may_look_at(host: str, told: Sequence[str]) -> bool:
    """Whether this node may connect to the IP address `host`, from which a peer asked. `told` are this node's
    multiaddresses."""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    if is_public(ip):
        return True
    found = [way[0] for way in map(endpoint, told) if way is not None]
    return any(ip in net for net in map(_net_of, found) if net is not None) and str(ip) not in _routers(PROC_NET)


def _net_of(host: str) -> Net | None:
    """The net of `host`, if its address is not public: that of its interface, or a small one if it is on none."""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:  # a name
        return None
    if is_public(ip):
        return None
    for each in (each for interface in psutil.net_if_addrs().values() for each in interface):
        if each.family in (socket.AF_INET, socket.AF_INET6) and each.address.partition("%")[0] == host and each.netmask:
            prefix = int(ipaddress.ip_address(each.netmask)).bit_count()
            if prefix == ip.max_prefixlen:
                return next((block for block in PRIVATE_BLOCKS if ip in block), ipaddress.ip_network(host))
            return ipaddress.ip_network((host, prefix), strict=False)
    return ipaddress.ip_network((host, NEAR_PREFIX[ip.version]), strict=False)


def _routers(proc_net: Path) -> list[str]:
    """Addresses of this machine's ways out; none where the system does not list them so."""
    found = []
    with suppress(OSError, IndexError, ValueError):
        for row in map(str.split, (proc_net / "route").read_text().splitlines()[1:]):
            if row[1] == row[7] == "0" * 8:
                found.append(str(ipaddress.IPv4Address(struct.pack("=I", int(row[2], 16)))))
    with suppress(OSError, IndexError, ValueError):
        for row in map(str.split, (proc_net / "ipv6_route").read_text().splitlines()):
            if row[0] == "0" * 32 and row[1] == "00":
                found.append(str(ipaddress.IPv6Address(bytes.fromhex(row[4]))))
    return found


async def ask_back(ports: Sequence[int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> list[bool]:
    """For each port, whether the peer at the other end connected to it. Raises PeerUnreachable if it does not answer,
    RemoteProtocolError."""
    writer.write(bytes([len(ports)]) + b"".join(port.to_bytes(2, "big") for port in ports))
    try:
        async with asyncio.timeout(DIAL_BACK_ANSWER_S):
            answer = await reader.readexactly(len(ports))
    except (TimeoutError, EOFError, OSError) as error:
        raise PeerUnreachable(
            "does not connect back: of another version, busy, not in this network, or reached through a relay"
        ) from error
    if not set(answer) <= {0, 1}:
        raise RemoteProtocolError("schema", "neither connected nor not")
    return [bool(byte) for byte in answer]


async def _connects(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(host, port)
    except (TimeoutError, OSError):
        return False
    writer.close()
    return True
