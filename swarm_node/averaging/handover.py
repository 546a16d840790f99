"""All trained weights from one peer of the cohort to another: for those who come late, or come back with nothing.

Nothing waits: the newcomer trains at once, and for its first minutes looks for somebody whose weights are an outer
round or more ahead of its own. When a body has arrived whole (`fetching`), it goes on with those at a step boundary.
What a cohort's weights are worth is the cohort's affair: a newcomer has little to judge them by (`Averager.replace`),
so it asks one whose version is not below the middle, chosen at random; if that fails, another.

Weights are given to one peer at a time, and for no longer than a slow line takes: who asks and then takes nothing keeps
others from them for that long only.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from functools import partial
from math import inf
from statistics import median_low

from torch import Tensor

from protocol.errors import ProtocolError, RemoteProtocolError
from protocol.tensors import WEIGHTS_METHOD, open_weights_head
from protocol.transports.base import Accepted, Outgoing
from swarm_node.averaging.averager import Averager, reason_of
from swarm_node.averaging.codecs import encoded_size, pieces
from swarm_node.averaging.fetching import (
    AGAIN_S,
    GRACE_S,
    MAX_VERSION,
    Fetch,
    check_place,
    fetch,
    longest_s,
    weights_head,
)

SEEK_S = 120.0
"""How long a node looks for such a peer: cards take seconds, dialling all of a large swarm a minute."""


class Handover:
    """Gives weights to those who ask, and asks for them."""

    def __init__(self, averager: Averager, rng: random.Random) -> None:
        self.averager = averager
        self.version = 0
        """Of the policy whose weights these are; 0 = never trained, so nobody wants them."""
        self._rng = rng
        self._seek_s: float | None = None
        """How long to look, from the next step on."""
        self._seek_until = -1.0
        self._ask_at: dict[str, float] = {}
        """When those who were asked may be asked again."""
        self._fetch: Fetch | None = None
        self._guard = threading.Lock()
        """Of the two below."""
        self._turn = 0
        """Counts those who were given the weights."""
        self._giving_until = -1.0
        """Before that nobody else is."""
        averager.transport.accept(WEIGHTS_METHOD, self._accept)

    # ----------------------------------------------------------------- asking

    def seek(self, seconds: float = SEEK_S) -> None:
        """From the next step on, look for somebody to go on from: until then nobody could be gone on from."""
        self._seek_s = seconds

    def step(self, version: int) -> Fetch | None:
        """At a step boundary, with the policy at `version`. What has arrived, if this node now has its weights."""
        self.version = version
        if self._seek_s is not None:
            self._seek_until, self._seek_s = self.averager.now() + self._seek_s, None
        fetch = self._fetch
        if fetch is None:
            if self.averager.now() < self._seek_until:
                self._ask(version)
            return None
        if fetch.done is None or not fetch.done.done():
            return None
        self._fetch = None
        try:
            fetch.done.result()
            values = fetch.bodies.values()
        except (ProtocolError, CancelledError) as error:
            self._failed(fetch.peer, *reason_of(error))
            return None
        if not self.averager.replace(values):
            self._failed(fetch.peer, "probe", "nothing could be computed with them")
            return None
        self._seek_until = -1.0
        return fetch

    def _failed(self, peer: str, reason: str, detail: str) -> None:
        """Others are looked for, even if this took all the time there was."""
        self.averager.skip(reason, detail)
        now = self.averager.now()
        if reason == "busy":
            self._ask_at[peer] = now + AGAIN_S
        else:
            self._seek_until = max(self._seek_until, now + GRACE_S)

    def _ask(self, version: int) -> None:
        """Ask somebody who is ahead, and has not failed before."""
        place, every = self.averager.place, self.averager.config.every
        versions = {
            peer: card.policy_version
            for peer, card in sorted(self.averager.transport.members().items())
            if card.cohort == place.cohort
        }
        if not versions:
            return
        least, now = max(median_low(versions.values()), version + every), self.averager.now()
        ahead = [
            peer
            for peer, theirs in versions.items()
            if least <= theirs <= MAX_VERSION and self._ask_at.get(peer, now) <= now
        ]
        if ahead:
            peer = self._rng.choice(ahead)
            self._fetch = self.fetch(peer, versions[peer])
            self._ask_at[peer] = inf

    def fetch(self, peer: str, least: int) -> Fetch:
        """Have the weights of `peer` sent, of version `least` or later: what its card says."""
        place = self.averager.place
        sizes = self.averager.fragments.sizes
        return fetch(self.averager.transport, place.swarm, place.cohort, peer, sizes, least, self.version)

    # ----------------------------------------------------------------- giving

    def _accept(self, peer: str, head: bytes, size: int) -> Accepted:
        place = self.averager.place
        check_place(open_weights_head(head), place.swarm, place.cohort)
        if size:
            raise RemoteProtocolError("size", f"{size} bytes where none are wanted")
        if not self.version:
            raise RemoteProtocolError("early", "not trained yet")
        whole = sum(encoded_size("float32", n) for n in self.averager.fragments.sizes)
        now = self.averager.now()
        with self._guard:
            if now < self._giving_until:
                raise RemoteProtocolError("busy", "another peer is being given them")
            until = self._giving_until = now + longest_s(whole)
            self._turn += 1
            turn = self._turn
        try:
            version, copies = self.version, self.averager.copies()
        except BaseException:
            self._end_turn(turn)
            raise
        ours = Outgoing(weights_head(place.swarm, place.cohort, version), whole, partial(self._body, copies, until))
        return Accepted(ours, _refuse, lambda error: self._end_turn(turn))

    def _body(self, copies: list[Tensor], until: float) -> Iterator[memoryview]:
        """All fragments; none is kept when it has left. RemoteProtocolError `slow` after `until`."""
        while copies:
            for piece in pieces("float32", copies.pop(0)):
                if self.averager.now() > until:
                    raise RemoteProtocolError("slow", "the weights were not taken in time")
                yield piece

    def _end_turn(self, turn: int) -> None:
        """Whoever's it was, unless another's has begun."""
        with self._guard:
            if turn == self._turn:
                self._giving_until = -1.0


def _refuse(piece: memoryview) -> None:
    raise RemoteProtocolError("size", "bytes where none are wanted")
