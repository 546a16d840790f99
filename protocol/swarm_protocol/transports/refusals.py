"""Counts what this node refused: totals by reason, and the latest sources with their reasons.

The source is the peer at the other end of the connection that delivered the refused data; it need not be the author.
Where no peer has proved its key yet, the source is an IPv4 address or the /64 of an IPv6 address.
"""

from __future__ import annotations

import ipaddress
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import msgspec

MAX_REFUSED_SOURCES = 256  # sources remembered: more than p2pd keeps connections to for long, and some 100 KB


class Refused(msgspec.Struct, frozen=True):
    """Refusals of one source."""

    reasons: dict[str, int]  # reason -> count
    last: float  # Unix time of the latest
    address: str = ""  # IP address that the source was connected from; empty if that is not known


class Refusals:
    """Counts refusals. `totals` (reason -> count) is shared with its owner. Beyond `MAX_REFUSED_SOURCES`, the source
    refused longest ago is forgotten. Reasons are this node's own words, so there are few."""

    def __init__(self, totals: Counter[str], now: Callable[[], float] = time.time) -> None:
        self.totals = totals
        self._now = now
        self._sources: dict[str, Refused] = {}  # source refused last comes last
        self.unlocated: Callable[[], None] = lambda: None
        """Called for each refusal of a peer of which it is not known where it is connected from."""

    def note(self, source: str, reason: str, count: int = 1, address: str = "") -> None:
        """`source`, connected from `address`, was refused `count` times for `reason`."""
        self.totals[reason] += count
        before = self._sources.pop(source, Refused({}, 0.0))
        reasons = before.reasons | {reason: before.reasons.get(reason, 0) + count}
        self._sources[source] = Refused(reasons, self._now(), address or before.address)
        if len(self._sources) > MAX_REFUSED_SOURCES:
            del self._sources[next(iter(self._sources))]
        if not (address or before.address):
            self.unlocated()

    def locate(self, ways: Mapping[str, str]) -> None:
        """Remember where sources are connected from; `ways` = peer id -> IP address of those connected now."""
        for source in self._sources.keys() & ways.keys():
            self._sources[source] = msgspec.structs.replace(self._sources[source], address=ways[source])

    def by_source(self) -> dict[str, Refused]:
        """Source -> its refusals; a copy, which any thread may ask for."""
        return dict(self._sources)


def ip_of(addresses: Iterable[str]) -> str:
    """The IP address in the first multiaddress that has one and is not relayed; else empty."""
    for address in addresses:
        _, kind, host, *_ = [*address.split("/"), "", ""]
        if kind in ("ip4", "ip6") and "/p2p-circuit" not in address:
            try:
                return str(ipaddress.ip_address(host))
            except ValueError:
                continue
    return ""
