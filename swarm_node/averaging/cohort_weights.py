"""All trained weights of a peer, for any peer that asks for them in the name of its cohort.

    asker --(head: cohort)--> member       member --(head: its version | all fragments, float32)--> asker

A body that has arrived has the right size, the right sha256 and finite values.

A newcomer waits for nothing: it trains at once, and for its first minutes looks for a peer whose weights are an outer
round or more ahead of its own. When a body has arrived whole, it goes on with those weights at a step boundary. It
refuses weights that answer its last round's questions worse than its own do (`Averager.replace`). It asks a peer chosen
at random among those whose version is not below the median; if that fails, another.

Weights are given to one peer at a time, for no longer than a slow line takes, so a peer that asks and takes nothing
blocks others only that long. Each transfer costs one copy of all weights, which training waits for. So the next one
begins a while after the last has ended, and one to the same peer much later.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from math import inf
from statistics import median_low

from torch import Tensor

from swarm_node.averaging.averager import Averager
from swarm_node.averaging.codecs import BodyDecoder, Readers, coded_bytes, pieces
from swarm_protocol.codec import version_for
from swarm_protocol.errors import ProtocolError, RemoteProtocolError
from swarm_protocol.tensors import WEIGHTS_METHOD, WeightsHead, decode_head, encode_head
from swarm_protocol.transports import transfer
from swarm_protocol.transports.base import Accepted, Outgoing, Sink, Transport

PACE = transfer.Pace(30.0, 2**17)  # both sides give up a transfer that is slower than a megabit a second on the whole
RETRY = transfer.Retry(busy_s=5.0, accident_s=5.0, max_accidents=3)
MAX_VERSION = 2**32  # an update a second for 136 years: no honest peer claims more
AT_ONCE = 3  # peers whose weights `collect_weights` fetches at the same time; all of them are in memory
COLLECT_LOOP_S = 0.1
SEEK_S = 120.0
"""How long a node looks for a peer that is ahead: cards take seconds, dialling all of a large swarm a minute."""
GIVE_PAUSE_S = 5.0  # after weights were given to one peer, before they are given to another
SAME_PEER_PAUSE_S = 60.0  # the same peer waits at least so long, and at least as long as its last transfer took
TRIALS = 3  # weights that a node tries at one start: each trial takes as long as the answers of a round


@dataclass(eq=False)
class WeightsFetch:
    """Weights on their way from a peer."""

    peer: str
    version: int = 0  # optimiser updates behind them, as the peer says when it answers
    done: Future[list[Tensor]] = field(default_factory=Future)  # the fragments, float32; fails with ProtocolError


def fetch(
    transport: Transport,
    place: tuple[str, str],
    peer: str,
    sizes: Sequence[int],
    least: int,
    have: int = 0,
    seconds: float = inf,
) -> WeightsFetch:
    """Fetch the weights of `peer`, fragments of `sizes` values, in the background. `place` is (swarm, cohort). They
    must be of version `least` or later; `have` is this node's version. They may take `seconds`, or what `PACE` allows.
    """
    result, bodies = WeightsFetch(peer), Readers([BodyDecoder("float32", n) for n in sizes])

    def answered(head: bytes, size: int) -> Sink:
        theirs = decode_head(head, WeightsHead)
        check_place(theirs, place)
        if size != bodies.size:
            raise RemoteProtocolError("size", f"{size} bytes for {bodies.size}")
        if not least <= theirs.version <= MAX_VERSION:
            raise RemoteProtocolError("claim", f"{theirs.version} updates, where there should be {least}")
        result.version = theirs.version
        return bodies.write

    ours = Outgoing(weights_head(transport, peer, place, have))
    limit = min(seconds, PACE.seconds(bodies.size))
    result.done = transfer.outcome(transport.exchange(peer, WEIGHTS_METHOD, ours, answered, limit), bodies.values)
    return result


def weights_head(transport: Transport, peer: str, place: tuple[str, str], version: int) -> bytes:
    """The head that either side sends to `peer`."""
    return encode_head(WeightsHead(version_for(peer, transport.members()), *place, version))


def check_place(head: WeightsHead, place: tuple[str, str]) -> None:
    """Raise RemoteProtocolError (cohort) unless `head` is of this (swarm, cohort)."""
    if (head.swarm, head.cohort) != place:
        raise RemoteProtocolError("cohort", f"{head.cohort} of swarm {head.swarm[:16]}")


class LateJoin:
    """Gives this node's weights to peers that ask, and asks for theirs if it comes late, or back with nothing."""

    def __init__(self, averager: Averager, rng: random.Random) -> None:
        self.averager = averager
        self.version = 0  # updates of the policy; 0 = never trained, so its weights are of no use to others
        self._place = averager.place.swarm, averager.place.cohort
        self._rng = rng
        self._seek_s: float | None = None  # how long to look, from the next step on
        self._seek_until = -1.0
        self._trials = 0  # weights that were refused
        self._donors: defaultdict[str, transfer.Donor] = defaultdict(transfer.Donor)  # the peers that were asked
        self._asked_at = -1.0  # when the last was asked
        self._fetch: WeightsFetch | None = None
        self._slots = transfer.UploadSlots(1, 1, averager.now)
        averager.transport.accept(WEIGHTS_METHOD, averager.counted()(self.accept))

    def seek(self, seconds: float = SEEK_S) -> None:
        """Look for a peer whose weights this node can go on with, from the next step on."""
        self._seek_s = seconds

    def step(self, version: int) -> WeightsFetch | None:
        """At a step boundary, with the policy at `version`. Returns the fetch whose weights this node has taken over,
        if one has just arrived."""
        self.version = version
        if self._seek_s is not None:
            self._seek_until, self._seek_s = self.averager.now() + self._seek_s, None
        fetch = self._fetch
        if fetch is None:
            if self.averager.now() < self._seek_until:
                self._ask(version)
            return None
        if not fetch.done.done():
            return None
        self._fetch = None
        try:
            values = fetch.done.result()
        except ProtocolError as error:
            self._failed(fetch.peer, *transfer.reason_of(error))
            return None
        if not self.averager.replace(values):
            self._trials += 1
            if self._trials == TRIALS:
                self._seek_until = -1.0
            self._failed(fetch.peer, "probe", "answers are worse, or nothing could be computed")
            return None
        self._seek_until = -1.0
        return fetch

    def _failed(self, peer: str, reason: str, detail: str) -> None:
        """Go on looking, long enough for `peer` to be ready again if it may be, even if this attempt took all the time
        that there was."""
        now, then = self.averager.now(), "it, or another, is asked again"
        if self._trials == TRIALS:
            then = "this node keeps its own weights, and no further peer is asked"
        self.averager.skip(reason, detail, peer, then=then)
        self._donors[peer].failed(reason, now, RETRY)
        if reason not in ("busy", "probe"):
            pause = max(SAME_PEER_PAUSE_S, now - self._asked_at)
            self._seek_until = max(self._seek_until, now + pause + PACE.grace_s)

    def _ask(self, version: int) -> None:
        """Ask a peer that is ahead and may be asked now."""
        every, members = self.averager.config.every, self.averager.transport.members()
        versions = {peer: members[peer].policy_version for peer in self.averager._cohort() if peer in members}
        if not versions:
            return
        least, now = max(median_low(versions.values()), version + every), self.averager.now()
        ahead = [
            peer
            for peer, theirs in versions.items()
            if least <= theirs <= MAX_VERSION and (peer not in self._donors or self._donors[peer].next_at <= now)
        ]
        if ahead:
            peer = self._rng.choice(ahead)
            self._asked_at = now
            self._fetch = self.fetch(peer, versions[peer])
            self._donors[peer].next_at = inf

    def fetch(self, peer: str, least: int) -> WeightsFetch:
        """Fetch the weights of `peer`, of version `least` (the one on its card) or later."""
        sizes = self.averager.fragments.sizes
        return fetch(self.averager.transport, self._place, peer, sizes, least, self.version)

    def accept(self, peer: str, head: bytes, size: int) -> Accepted:
        """Answer a peer that asks for the weights. Raises RemoteProtocolError: cohort, size, early (not trained yet),
        busy."""
        check_place(decode_head(head, WeightsHead), self._place)
        transfer.expect_no_body(size)
        if not self.version:
            raise RemoteProtocolError("early", "not trained yet")
        whole = sum(coded_bytes("float32", n) for n in self.averager.fragments.sizes)
        return self._slots.give(peer, partial(self._give, whole), self._over, PACE.seconds(whole))

    def _give(self, whole: int, slot: transfer.UploadSlot) -> Outgoing:
        version, copies = self.version, self.averager.copies(range(self.averager.config.fragments))
        head = weights_head(self.averager.transport, slot.peer, self._place, version)
        return Outgoing(
            head, whole, lambda: transfer.in_time(_body(copies), lambda taken: slot.until, self.averager.now)
        )

    def _over(self, slot: transfer.UploadSlot, size: int, error: Exception | None) -> None:
        took = self.averager.now() - slot.since
        self._slots.leave(slot, wait_s=max(SAME_PEER_PAUSE_S, took), all_wait_s=GIVE_PAUSE_S)


def _body(copies: list[Tensor]) -> Iterator[memoryview]:
    """Each fragment is dropped from memory when it has left."""
    while copies:
        yield from pieces("float32", copies.pop(0))


def collect_weights(
    transport: Transport,
    place: tuple[str, str],
    versions: Mapping[str, int],
    sizes: Sequence[int],
    keep: Callable[[str, int, list[Tensor]], None],
    seconds: float,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
    rng: random.Random | None = None,
) -> dict[str, str]:
    """Fetch the weights of the peers in `versions` (peer -> version on its card) within `seconds`. `place` and `sizes`
    as for `fetch`. `keep` is called with (peer, version, fragments) as they arrive. Busy peers are asked again.

    Peers are asked in random order, each for its share of the time that is left, so that slow ones do not keep the
    others from being asked. Slow ones have the time that is left when all others have been asked.

    Returns peer -> why there are no weights of it.
    """
    end = clock() + seconds
    waiting = {peer: transfer.Donor() for peer in (rng or random.Random()).sample(list(versions), len(versions))}
    failed: dict[str, str] = {}
    running: list[tuple[WeightsFetch, transfer.Donor]] = []
    while running or (waiting and clock() < end):
        for one, donor in [pair for pair in running if pair[0].done.done()]:
            running.remove((one, donor))
            try:
                values = one.done.result()
            except ProtocolError as error:
                reason, detail = transfer.reason_of(error)
                failed[one.peer] = f"{reason} {detail}".rstrip()
                donor.failed(reason, clock(), RETRY)
                if donor.next_at < end:
                    waiting[one.peer] = donor
            else:
                failed.pop(one.peer, None)
                keep(one.peer, one.version, values)
        now = clock()
        due = [peer for peer, donor in waiting.items() if donor.next_at <= now < end]
        share = (end - now) * AT_ONCE / max(1, len(running) + len(waiting))
        for peer in sorted(due, key=lambda peer: waiting[peer].accidents)[: AT_ONCE - len(running)]:
            limit = min(end - now, max(PACE.grace_s, share))
            one = fetch(transport, place, peer, sizes, max(1, versions[peer]), seconds=limit)
            running.append((one, waiting.pop(peer)))
        if running or waiting:
            sleep(COLLECT_LOOP_S)
    return {peer: failed.get(peer, "not asked in time") for peer in versions if peer in failed or peer in waiting}
