"""A search for the peers nearest to some keys, by asking ever nearer ones (Kademlia), and some peers besides.

    ask `also` for all keys -> for each key, ask the `BEAM` nearest peers known that answer -> learn nearer ones -> ...

Peers that do not answer are passed over. The search ends when the nearest have all answered, or after `SEARCH_S` or
`MAX_SEARCH_CALLS`, with its results by then. Names of peers that do not exist cannot make it fail.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

BEAM = 8  # peers asked for each key at least, if there are so many. Five of them keep what is stored there.
WORKERS = 8  # calls under way at a time
SEARCH_S = 6.0
"""Twice the time limit of a call: with a store after it, still below the time limit of calls to the plane."""
MAX_SEARCH_CALLS = 256  # calls of one search: sixteen keys, eight peers for each, and as many on the way to them

SMALL_SWARM = 64
"""In a swarm of up to this many members, connected peers are asked for all keys; in a larger one, for fewer."""
ASKED_BOOTSTRAP, ASKED_OLDEST, ASKED_RANDOM = 3, 3, 2
"""Connected peers that a node asks, and gives its card to, wherever their ids lie. An attacker can choose keys whose
ids surround a bucket; it cannot choose a node's bootstrap peers, or the peers that were connected first."""
LARGE_BOOTSTRAP, LARGE_OLDEST = 1, 1  # the same numbers in a larger swarm, so that bootstrap peers are not overloaded
BLIND = 64  # the same number while nobody is known: all connected peers, up to a number that takes seconds at most

Peer = TypeVar("Peer", bound=Hashable)
AskPeer = Callable[[Peer, Sequence[bytes]], Awaitable[Collection[Peer] | None]]
"""Asks a peer for keys; the peers that it names, or None if it does not answer."""


class Search(Generic[Peer]):
    """One search. It begins with `known`; `also` are asked first, each for some keys."""

    def __init__(
        self,
        keys: Iterable[bytes],
        known: Iterable[Peer],
        also: Mapping[Peer, Sequence[bytes]],
        ask: AskPeer[Peer],
        id_of: Callable[[Peer], int],
    ) -> None:
        self._keys = {key: int.from_bytes(key, "big") for key in keys}
        self._ask, self._id_of = ask, id_of
        self._known = {peer: id_of(peer) for peer in (*known, *also)}  # peers that did not fail, with their ids
        self._failed: set[Peer] = set()
        self._asked: dict[Peer, set[bytes]] = {}
        self._also = dict(also)
        self._calls: dict[asyncio.Task[Collection[Peer] | None], Peer] = {}
        self._answered: set[Peer] = set()

    async def run(self, seconds: float = SEARCH_S) -> dict[bytes, list[Peer]]:
        """Key -> the peers nearest to it that answered, nearest first."""
        try:
            async with asyncio.timeout(seconds):
                await self._ask_all()
        except TimeoutError:
            pass  # what was found by then counts
        finally:
            for call in self._calls:
                call.cancel()
        return {key: self._nearest(key, self._answered) for key in self._keys}

    async def _ask_all(self) -> None:
        begun = 0
        while True:
            for peer, keys in self._wanted():
                if begun < MAX_SEARCH_CALLS and len(self._calls) < WORKERS:
                    begun += 1
                    self._asked.setdefault(peer, set()).update(keys)
                    self._also.pop(peer, None)
                    self._calls[asyncio.ensure_future(self._ask(peer, keys))] = peer
            if not self._calls:
                return
            done, _ = await asyncio.wait(self._calls, return_when=asyncio.FIRST_COMPLETED)
            for call in done:
                self._learn(self._calls.pop(call), call.result())

    def _nearest(self, key: bytes, among: Collection[Peer]) -> list[Peer]:
        known, id = self._known, self._keys[key]
        return heapq.nsmallest(BEAM, (peer for peer in among if peer in known), lambda peer: known[peer] ^ id)

    def _learn(self, peer: Peer, named: Collection[Peer] | None) -> None:
        if named is None:
            self._failed.add(peer)
            self._known.pop(peer, None)
            return
        self._answered.add(peer)
        for other in named:
            if other not in self._failed:
                self._known.setdefault(other, self._id_of(other))

    def _wanted(self) -> list[tuple[Peer, list[bytes]]]:
        """Peers to ask next, and the keys for each."""
        if len(self._calls) >= WORKERS:
            return []
        wanted = {peer: list(keys) for peer, keys in self._also.items()}
        for key in self._keys:
            for peer in self._nearest(key, self._known):
                if key not in self._asked.get(peer, ()) and key not in wanted.get(peer, ()):
                    wanted.setdefault(peer, []).append(key)
        busy = set(self._calls.values())  # asked for the rest when it has answered: once, not key by key
        return [(peer, keys) for peer, keys in wanted.items() if peer not in busy and keys]


def direct(connected: Sequence[str], bootstrap: Collection[str], members: int, rng: random.Random) -> list[str]:
    """Some of the peers that are connected and keep a part of the DHT (longest connected first), to deal with directly
    while `members` others are known."""
    first = [peer for peer in connected if peer in bootstrap]
    if not members:
        return list(dict.fromkeys([*first, *connected]))[:BLIND]
    proven, oldest = (ASKED_BOOTSTRAP, ASKED_OLDEST) if members <= SMALL_SWARM else (LARGE_BOOTSTRAP, LARGE_OLDEST)
    chosen = rng.sample(first, min(proven, len(first)))
    chosen += [peer for peer in connected if peer not in chosen][:oldest]
    rest = [peer for peer in connected if peer not in chosen]
    return chosen + rng.sample(rest, min(proven + oldest + ASKED_RANDOM - len(chosen), len(rest)))
