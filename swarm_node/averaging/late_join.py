"""All trained weights from one peer of the cohort to another: for those who come late, or come back with nothing.

Nothing waits: the newcomer trains at once, and for its first minutes looks for somebody whose weights are an outer
round or more ahead of its own. When a body has arrived whole (`fetching`), it goes on with those at a step boundary.
What a cohort's weights are worth is the cohort's affair: a newcomer refuses only what nothing can be computed with
(`Averager.replace`), so it asks one whose version is not below the middle, chosen at random; if that fails, another.

Weights are given to one peer at a time, and for no longer than a slow line takes: who asks and then takes nothing keeps
others from them for that long only. Each turn costs one copy of all weights, which training waits for, so the next
begins a while after the last has ended, and one of the same peer much later.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
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
from swarm_node.averaging.cohort_weights import (
    AGAIN_S,
    GONE,
    GRACE_S,
    MAX_VERSION,
    TRIES,
    Fetch,
    check_place,
    fetch,
    longest_s,
    weights_head,
)

SEEK_S = 120.0
"""How long a node looks for such a peer: cards take seconds, dialling all of a large swarm a minute."""
REST_S = 5.0
"""After the weights were given to one peer, before they are to another."""
COOL_S = 60.0
"""Likewise to the same one, at least: it waits for as long as its last turn took, if that is more."""


class LateJoin:
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
        self._tries: Counter[str] = Counter()
        """How often each of them could not be reached, or went away in the middle."""
        self._asked_at = -1.0
        """When the last was asked."""
        self._fetch: Fetch | None = None
        self._guard = threading.Lock()
        """Of the three below."""
        self._turn = 0
        """Counts those who were given the weights."""
        self._giving_until = -1.0
        """Before that nobody else is."""
        self._cool_until: dict[str, float] = {}
        """Before that they themselves are not. Few at a time, since turns come one after the other."""
        averager.transport.accept(WEIGHTS_METHOD, averager.counted(self.accept))

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
        """Others are looked for, even if this took all the time there was, and `peer` when it may give again."""
        self.averager.skip(reason, detail, peer, then="it, or another, is asked again")
        now = self.averager.now()
        if reason == "busy":
            self._ask_at[peer] = now + AGAIN_S
            return
        self._seek_until = max(self._seek_until, now + max(COOL_S, now - self._asked_at) + GRACE_S)
        if reason in GONE:
            self._tries[peer] += 1
            if self._tries[peer] < TRIES:
                self._ask_at[peer] = now + AGAIN_S * self._tries[peer]

    def _ask(self, version: int) -> None:
        """Ask somebody who is ahead, and has not failed for good."""
        every, members = self.averager.config.every, self.averager.transport.members()
        versions = {peer: members[peer].policy_version for peer in self.averager._cohort() if peer in members}
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
            self._asked_at = now
            self._fetch = self.fetch(peer, versions[peer])
            self._ask_at[peer] = inf

    def fetch(self, peer: str, least: int) -> Fetch:
        """Have the weights of `peer` sent, of version `least` or later: what its card says."""
        place = self.averager.place
        sizes = self.averager.fragments.sizes
        return fetch(self.averager.transport, place.swarm, place.cohort, peer, sizes, least, self.version)

    # ----------------------------------------------------------------- giving

    def accept(self, peer: str, head: bytes, size: int) -> Accepted:
        """A peer asks for the weights. Raises RemoteProtocolError: why it gets none now."""
        place = self.averager.place
        check_place(open_weights_head(head), place.swarm, place.cohort)
        if size:
            raise RemoteProtocolError("size", f"{size} bytes where none are wanted")
        if not self.version:
            raise RemoteProtocolError("early", "not trained yet")
        whole = sum(encoded_size("float32", n) for n in self.averager.fragments.sizes)
        now = self.averager.now()
        with self._guard:
            self._cool_until = {one: until for one, until in self._cool_until.items() if until > now}
            if now < max(self._giving_until, self._cool_until.get(peer, now)):
                raise RemoteProtocolError("busy", "they were given to a peer a moment ago, or still are")
            until = self._giving_until = now + longest_s(whole)
            self._cool_until[peer] = until + longest_s(whole)  # unless the end of this turn comes first
            self._turn += 1
            turn = self._turn
        try:
            version, copies = self.version, self.averager.copies()
        except BaseException:
            self._end_turn(turn, peer)
            raise
        reply = weights_head(self.averager.transport, peer, place.swarm, place.cohort, version)
        ours = Outgoing(reply, whole, partial(self._body, copies, until))

        def over(error: Exception | None) -> None:
            self._end_turn(turn, peer, REST_S, max(COOL_S, self.averager.now() - now))

        return Accepted(ours, _refuse, over)

    def _body(self, copies: list[Tensor], until: float) -> Iterator[memoryview]:
        """All fragments; none is kept when it has left. RemoteProtocolError `slow` after `until`."""
        while copies:
            for piece in pieces("float32", copies.pop(0)):
                if self.averager.now() > until:
                    raise RemoteProtocolError("slow", "the weights were not taken in time")
                yield piece

    def _end_turn(self, turn: int, peer: str, rest_s: float = 0.0, cool_s: float = 0.0) -> None:
        """It was that of `peer`; by now another's may have begun."""
        now = self.averager.now()
        with self._guard:
            self._cool_until[peer] = now + cool_s
            if turn == self._turn:
                self._giving_until = now + rest_s


def _refuse(piece: memoryview) -> None:
    raise RemoteProtocolError("size", "bytes where none are wanted")
