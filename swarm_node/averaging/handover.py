"""All trained weights from one peer of the cohort to another: for those who come late, or come back with nothing.

    newcomer --(head: cohort)--> member       member --(head: its version | all fragments, float32)--> newcomer

Nothing waits: the newcomer trains at once, and for its first minutes looks for somebody whose weights are an outer
round or more ahead of its own. When a body has arrived whole, with the right sha256 and finite values, it goes on with
those at a step boundary. What a cohort's weights are worth is the cohort's affair: a newcomer has nothing to judge them
by, so it asks one whose version is not below the middle, chosen at random; if that fails, another.
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import inf
from statistics import median_low

from protocol.errors import ProtocolError, RemoteProtocolError
from protocol.messages import PROTOCOL_VERSION
from protocol.tensors import WEIGHTS_METHOD, WeightsHead, open_weights_head, seal_head
from protocol.transports.base import Accepted, Outgoing, Sink
from swarm_node.averaging.averager import Averager, reason_of
from swarm_node.averaging.codecs import Decoder, Readers, encoded_size, pieces

SEEK_S = 120.0
"""How long a node looks for such a peer: cards take seconds, dialling all of a large swarm a minute."""
BYTES_PER_S = 2**17
"""A handover that is slower than a megabit a second on the whole is given up."""
GRACE_S = 30.0
AGAIN_S = 5.0
"""Whoever is giving its weights to somebody else is asked again this much later."""
MAX_VERSION = 2**32
"""An update a second for 136 years: who claims more lies."""


@dataclass(eq=False)
class Fetch:
    """A handover on its way."""

    peer: str
    bodies: Readers
    version: int = 0
    done: Future[None] | None = None


class Handover:
    """Gives weights to those who ask, and asks for them."""

    def __init__(self, averager: Averager, rng: random.Random) -> None:
        self.averager = averager
        self.version = 0
        """Of the policy whose weights these are; 0 = never trained, so nobody wants them."""
        self._rng = rng
        self._seek_until = -1.0
        self._ask_at: dict[str, float] = {}
        """When those who were asked may be asked again."""
        self._fetch: Fetch | None = None
        self._giving = threading.Lock()
        averager.transport.accept(WEIGHTS_METHOD, self._accept)

    # ----------------------------------------------------------------- asking

    def seek(self, seconds: float = SEEK_S) -> None:
        """From now on, look for somebody to go on from."""
        self._seek_until = self.averager.now() + seconds

    def step(self, version: int) -> Fetch | None:
        """At a step boundary, with the policy at `version`. What has arrived, if this node now has its weights."""
        self.version = version
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
        self._seek_until = -1.0
        self.averager.replace(values)
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
            self._fetch = self.fetch(self._rng.choice(ahead))
            self._ask_at[self._fetch.peer] = inf

    def fetch(self, peer: str) -> Fetch:
        """Have the weights of `peer` sent."""
        fetch = Fetch(peer, Readers([Decoder("float32", n) for n in self.averager.fragments.sizes]))
        timeout = GRACE_S + fetch.bodies.size / BYTES_PER_S
        answered = partial(self._answered, fetch)
        exchange = self.averager.transport.exchange
        fetch.done = exchange(peer, WEIGHTS_METHOD, Outgoing(self._head(self.version)), answered, timeout)
        return fetch

    def _answered(self, fetch: Fetch, head: bytes, size: int) -> Sink:
        theirs = open_weights_head(head)
        self._check(theirs)
        if size != fetch.bodies.size:
            raise RemoteProtocolError("size", f"{size} bytes for {fetch.bodies.size}")
        if not self.version < theirs.version <= MAX_VERSION:
            raise RemoteProtocolError("claim", f"{theirs.version} updates, of which {self.version} are here")
        fetch.version = theirs.version
        return fetch.bodies.write

    # ----------------------------------------------------------------- giving

    def _accept(self, peer: str, head: bytes, size: int) -> Accepted:
        self._check(open_weights_head(head))
        if size:
            raise RemoteProtocolError("size", f"{size} bytes where none are wanted")
        if not self.version:
            raise RemoteProtocolError("early", "not trained yet")
        if not self._giving.acquire(blocking=False):
            raise RemoteProtocolError("busy", "another peer is being given them")
        try:
            version, copies = self.version, self.averager.copies()
        except BaseException:
            self._giving.release()
            raise
        ours = Outgoing(
            self._head(version),
            sum(encoded_size("float32", len(values)) for values in copies),
            lambda: chain.from_iterable(pieces("float32", values) for values in copies),
        )
        return Accepted(ours, _refuse, self._done)

    def _done(self, error: Exception | None) -> None:
        self._giving.release()

    def _head(self, version: int) -> bytes:
        place = self.averager.place
        return seal_head(WeightsHead(PROTOCOL_VERSION, place.swarm, place.cohort, version))

    def _check(self, head: WeightsHead) -> None:
        place = self.averager.place
        if (head.swarm, head.cohort) != (place.swarm, place.cohort):
            raise RemoteProtocolError("cohort", f"{head.cohort} of swarm {head.swarm[:16]}")


def _refuse(piece: memoryview) -> None:
    raise RemoteProtocolError("size", "bytes where none are wanted")
