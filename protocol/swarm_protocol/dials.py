"""Decides which addresses may be dialled now. Pure: `now` (Unix seconds) comes in.

    address -> (id that must prove its key there, endpoint) -> free / once in ten minutes / not within the budgets

Cards are written by strangers and may name the address of a bystander. So an endpoint (host and port) at which the id
has never proved its key is dialled rarely, however many cards name it. One host's endpoints, and all together, have a
budget. A proof gives its try back, so a swarm of honest peers on one host uses up nothing.
"""

from __future__ import annotations

import math
import re
from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from functools import lru_cache
from itertools import islice
from typing import TypeVar

from swarm_protocol.budgets import MINUTE_S
from swarm_protocol.hosts import host_address, neighbourhood

UNPROVEN_WAIT_S = 600.0
"""Time between two tries of an endpoint at which nobody has proved a key. A swarm of 1,000 nodes then dials a bystander
that cards name less than twice a second, and a peer that was away for a while is found again."""
INHABITED_WAIT_S = 60.0
"""Time between two tries of an endpoint at which other ids have proved their keys. A process that was restarted has a
new gossip id, and is no bystander."""
HOST_TRIES = 16
"""Endpoints of one host that are tried in `UNPROVEN_WAIT_S` without a proof: as many peers behind one router as join at
the same moment."""
MINUTE_TRIES = 128
"""Endpoints of all hosts that are tried in a minute without a proof: a newcomer dials 64 peers, at two addresses each
of which one answers."""
MAX_PROVEN = 4096  # proofs that are remembered, about 150 bytes each; those renewed longest ago are forgotten first
PROOF_S = 24 * 3600.0
"""Life of a proof. Addresses of homes and clouds pass to other people within days; these would be dialled for ever in
place of a peer that is gone. A connected peer proves its key anew each round."""
MAX_HINTS = 256  # ids that were found in place of others and are still to be dialled
NAMES = "names"
"""The host of all DNS names together. Only resolving shows whether two names are one host, and a zone may hold
millions."""

Endpoint = tuple[str, int]  # canonical host and port
_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class Dials:
    """The dials of one node, and where peers proved their keys."""

    def __init__(self) -> None:
        self.refused: Counter[str] = Counter()  # `dials` -> addresses that were held back
        self.longest_wait_s = math.inf
        """Longest time between two tries of one endpoint: shorter than `UNPROVEN_WAIT_S` while this node is connected
        with so few peers that it may soon be with none. A swarm of many such nodes is small, or has just lost much."""
        self._given: set[tuple[str, str | Endpoint]] = set()
        """(id, endpoint) and (id, host) of addresses that the user named."""
        self._proven: OrderedDict[tuple[str, str | Endpoint], float] = OrderedDict()
        """(id, endpoint) and (id, host) -> when that was proved last, latest last."""
        self._inhabited: OrderedDict[Endpoint, float] = OrderedDict()
        """Endpoint -> when some id proved its key there last, latest last."""
        self._hints: OrderedDict[Endpoint, str] = OrderedDict()
        """Endpoint -> the id that answered there when another one was dialled."""
        self._tried: OrderedDict[Endpoint, float] = OrderedDict()
        """Endpoint -> when it was tried without a proof since, in the last `UNPROVEN_WAIT_S`; earliest first."""
        self._hosts: Counter[str] = Counter()  # host -> how many of `_tried`

    def give(self, address: str) -> None:
        """The user names this address: it is always dialled."""
        id, endpoint = claim(address)
        if endpoint is not None:
            self._given |= {(id, endpoint), (id, endpoint[0])}

    def prove(self, id: str, addresses: Sequence[str], now: float) -> None:
        """`id` has proved its key over a connection to or from these addresses, with or without an id at their end."""
        for address in addresses:
            endpoint = endpoint_of(address)
            if endpoint is None or "/p2p-circuit" in address:
                continue  # a proof to the relay says nothing of the address behind it
            _remember(self._proven, (id, endpoint), now, MAX_PROVEN)
            _remember(self._proven, (id, endpoint[0]), now, MAX_PROVEN)
            _remember(self._inhabited, endpoint, now, MAX_PROVEN)
            self._untry(endpoint)

    def hint(self, address: str, id: str, now: float) -> None:
        """`id` answered at `address` when another one was dialled: it may be tried there once at once."""
        endpoint = endpoint_of(address)
        if endpoint is not None:
            _remember(self._inhabited, endpoint, now, MAX_PROVEN)
            _remember(self._hints, endpoint, id, MAX_HINTS)

    @property
    def hinted(self) -> set[str]:
        """Ids that were found in place of others."""
        return set(self._hints.values())

    def may(self, address: str, now: float, owner: str = "") -> bool:
        """Whether `address` may be dialled now. `owner` is the peer whose card names it, if that is not the id at its
        end. If the owner proved its key at a host, each other port of that host uses the budget only once, however
        often it is dialled: it may be the owner's gossip process after a restart."""
        id, endpoint = claim(address)
        if endpoint is None:
            return False
        self._forget(now)
        if self._is_free(id, endpoint, owner) or self._hints.get(endpoint) == id:
            return True
        tried_at = self._tried.get(endpoint)
        if tried_at is not None:
            wait = min(self.longest_wait_s, INHABITED_WAIT_S if endpoint in self._inhabited else UNPROVEN_WAIT_S)
            return (owner or id, endpoint[0]) in self._proven or now >= tried_at + wait
        return self._hosts.get(_group(endpoint[0]), 0) < HOST_TRIES and not self._is_minute_used_up(now)

    def take(self, address: str, now: float, owner: str = "") -> bool:
        """Whether `address` may be dialled now. If so, the dial is remembered; if not, the refusal is counted."""
        if not self.may(address, now, owner):
            self.refused["dials"] += 1
            return False
        id, endpoint = claim(address)
        assert endpoint is not None
        if not self._is_free(id, endpoint, owner):
            if self._hints.get(endpoint) == id:
                del self._hints[endpoint]
            self._untry(endpoint)
            self._tried[endpoint] = now
            self._hosts[_group(endpoint[0])] += 1
        return True

    def _is_free(self, id: str, endpoint: Endpoint, owner: str) -> bool:
        pair, host = (id, endpoint), (owner or id, endpoint[0])
        return pair in self._given or pair in self._proven or host in self._given

    def _is_minute_used_up(self, now: float) -> bool:
        first = next(islice(reversed(self._tried.values()), MINUTE_TRIES - 1, None), None)
        return first is not None and first > now - MINUTE_S

    def _forget(self, now: float) -> None:
        """Drop proofs and tries of long ago, and tries of a time that is yet to come: then the clock was set back."""
        _drop_old(self._proven, now - PROOF_S)
        _drop_old(self._inhabited, now - PROOF_S)
        while self._tried:
            endpoint, tried_at = next(iter(self._tried.items()))
            if now - UNPROVEN_WAIT_S < tried_at <= now:
                break
            self._untry(endpoint)

    def _untry(self, endpoint: Endpoint) -> None:
        if self._tried.pop(endpoint, None) is not None:
            group = _group(endpoint[0])
            self._hosts[group] -= 1
            if not self._hosts[group]:
                del self._hosts[group]


def _remember(memory: OrderedDict[_K, _V], key: _K, value: _V, most: int) -> None:
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > most:
        memory.popitem(last=False)


def _drop_old(memory: OrderedDict[_K, float], before: float) -> None:
    """Forget entries of this time and before."""
    while memory and next(iter(memory.values())) <= before:
        memory.popitem(last=False)


def claim(address: str) -> tuple[str, Endpoint | None]:
    """(the id that must prove its key, the endpoint to connect to); those of the relay if `address` leads through one.
    Without an endpoint, nobody dials it."""
    way = address.partition("/p2p-circuit")[0]
    return way.rpartition("/p2p/")[2] if "/p2p/" in way else "", endpoint_of(address)


@lru_cache(32_768)
def endpoint_of(address: str) -> Endpoint | None:
    """Canonical (host, port) that a multiaddress is dialled at, a relay's if it leads through one; None if it is not
    over TCP, or leads through several. One host has one spelling: IPv4 for all ways to write it as IPv6, and names in
    lower case."""
    parts = address.split("/")
    if len(parts) < 5 or parts[0] or parts[3] != "tcp" or parts.count("p2p-circuit") > 1:
        return None
    kind, text, port = parts[1], parts[2], parts[4]
    is_name = kind in ("dns", "dns4", "dns6")
    ip = host_address(text) if is_name or kind in ("ip4", "ip6") else None
    if (ip is None and not is_name) or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        return None
    return text.lower().rstrip(".") if ip is None else str(ip), int(port)


def _group(host: str) -> str:
    """The neighbourhood of a canonical host; `NAMES` for all names."""
    return NAMES if host_address(host) is None else neighbourhood(host)
