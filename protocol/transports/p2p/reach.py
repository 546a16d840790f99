"""Finds out whether relays can connect to this node directly. Then it leaves their places to others.

    p2pd knows a public address of this node -> a relay, connected at a public address, connects back to its port
    it can -> direct        no such address, it cannot, or does not answer -> not

A relay keeps 128 places. Its answer counts only for its own place, so a relay that lies refuses only its own service.
An open port alone would prove nothing: a router may forward it to another machine.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from protocol.errors import ProtocolError
from protocol.hosts import is_public
from protocol.transports.refusals import ip_of
from protocol.transports.settings import endpoint

REACH_CHECK_S = 600.0
"""Longest time between two questions to one relay, drawn from the upper half: routers and firewalls change rarely, and
a relay connects back to 64 ports a minute."""


class Plane(Protocol):
    """The part of `HivemindPlane` that is used here."""

    addresses: list[str]  # addresses at which others reach this node, as far as p2pd knows, most useful first

    async def connections(self) -> Mapping[str, list[str]]:
        """Peer id -> addresses at the other ends of its connections."""

    async def dial_back(self, peer: str, ports: Sequence[int]) -> list[bool]:
        """For each port of this machine, whether `peer` could connect to it."""


class Reach:
    """The latest answer of each relay."""

    def __init__(self, rng: random.Random, changed: Callable[[], None]) -> None:
        """`changed` is called when a relay gave a new answer."""
        self._rng = rng
        self._changed = changed
        self._direct: dict[str, bool] = {}
        self._ask_at: dict[str, float] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}

    def is_direct(self, plane: Plane, relay: str, now: float) -> bool | None:
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

    async def _ask(self, plane: Plane, relay: str) -> None:
        direct = False
        try:
            told = next(
                (way for address in plane.addresses if _is_public([address]) and (way := endpoint(address))), None
            )
            connected = (await plane.connections()).get(relay, [])
            if told and _is_public(connected):  # at another address, it may be in this node's own network
                direct = all(await plane.dial_back(relay, [told[1]]))
        except ProtocolError:
            pass  # no answer: as if it could not
        if direct != self._direct.get(relay):
            self._direct[relay] = direct
            self._changed()


def _is_public(addresses: Sequence[str]) -> bool:
    """Whether the first IP address among these multiaddresses belongs to the public internet."""
    ip = ip_of(addresses)
    return bool(ip) and is_public(ip)
