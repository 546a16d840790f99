"""Places at relays (libp2p circuit relay v2), through which peers reach a node that they cannot dial.

    p2pd knows a public address of this node -> a relay, connected at a public address, connects back to its port
    it can -> direct: no place needed        no such address, it cannot, or does not answer -> not

    reserve -> status      two messages of protobuf, each after its length, on a stream of their own

A relay keeps 128 places, so a node leaves them to others if it can. A relay's answer counts only for its own place, so
one that lies refuses only its own service. An open port alone would prove nothing: a router may forward it to another
machine. p2pd also asks for places by itself: but with fewer than four relays only three minutes after its start, and
for a place that was lost, because the relay restarted, not before an hour has passed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from swarm_protocol.errors import PeerUnreachable, ProtocolError
from swarm_protocol.hosts import is_public
from swarm_protocol.transports.refusals import ip_of
from swarm_protocol.transports.settings import endpoint

RELAY_PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"
PLACE_S = 60.0
"""A place is asked for again after this long. Relays keep it for an hour, but not if the connection ends meanwhile."""
REACH_CHECK_S = 600.0
"""Longest time between two questions to one relay, drawn from the upper half: routers and firewalls change rarely, and
a relay connects back to 64 ports a minute."""
MAX_RELAY_ANSWER_BYTES = 4096
_RESERVE = b"\x08\x00"
_GRANTED = b"\x28\x64"  # status 100. go-libp2p writes the fields of a message in order, and this one is the last.


class _Plane(Protocol):
    """Which node asks, as `plane.HivemindPlane`."""

    addresses: list[str]  # at which others reach it

    @property
    def connections(self) -> _Connections: ...

    @property
    def streams(self) -> _Streams: ...


class _Connections(Protocol):
    async def connected(self) -> Mapping[str, list[str]]:
        """Peer id -> addresses at the other ends of its connections. Raises PeerUnreachable."""


class _Streams(Protocol):
    async def dial_back(self, peer: str, ports: Sequence[int]) -> list[bool]:
        """Which ports of this node the peer could connect to. Raises PeerUnreachable, RemoteProtocolError."""


class Reach:
    """Whether relays can connect to this node directly: the latest answer of each."""

    def __init__(self, rng: random.Random, changed: Callable[[], None]) -> None:
        """`changed` is called when a relay gave a new answer."""
        self._rng = rng
        self._changed = changed
        self._direct: dict[str, bool] = {}
        self._ask_at: dict[str, float] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}

    def is_direct(self, plane: _Plane, relay: str, now: float) -> bool | None:
        """Whether `relay` could connect to this node; None before its first answer. It is asked in the background when
        that is due at `now` (seconds of any clock)."""
        if relay not in self._asking and now >= self._ask_at.get(relay, now):
            self._ask_at[relay] = now + REACH_CHECK_S * self._rng.uniform(0.5, 1.0)
            self._asking[relay] = task = asyncio.create_task(self._ask(plane, relay))
            task.add_done_callback(lambda _: self._asking.pop(relay, None))
        return self._direct.get(relay)

    def forget(self) -> None:
        """p2pd is a new one, perhaps on another port."""
        for task in self._asking.values():
            task.cancel()
        self._direct.clear()
        self._ask_at.clear()

    async def _ask(self, plane: _Plane, relay: str) -> None:
        direct = False
        public = [way for address in plane.addresses if _is_public([address]) and (way := endpoint(address))]
        try:
            connected = (await plane.connections.connected()).get(relay, [])
            if public and _is_public(connected):  # at another address, it may be in this node's own network
                direct = all(await plane.streams.dial_back(relay, [public[0][1]]))
        except ProtocolError:
            pass  # no answer: as if it could not
        if direct != self._direct.get(relay):
            self._direct[relay] = direct
            self._changed()


def _is_public(addresses: Sequence[str]) -> bool:
    """Whether the first IP address among these multiaddresses belongs to the public internet."""
    ip = ip_of(addresses)
    return bool(ip) and is_public(ip)


async def reserve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Take a place at the relay at the other end. Raises PeerUnreachable if it has none, EOFError."""
    writer.write(bytes([len(_RESERVE)]) + _RESERVE)
    low, high = (await reader.readexactly(1))[0], 0
    if low >= 128:  # its length continues, seven bits a byte
        low, high = low - 128, (await reader.readexactly(1))[0]
    if high >= MAX_RELAY_ANSWER_BYTES // 128:
        raise PeerUnreachable("that is no answer of a relay")
    if not (await reader.readexactly(128 * high + low)).endswith(_GRANTED):
        raise PeerUnreachable("the relay has no place")
