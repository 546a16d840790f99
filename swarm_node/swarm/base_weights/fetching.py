"""Get the swarm's model from members: the listing, then pieces from several of them at once.

    members --(who is free, proven donors first)--> ask for a piece --> check its sha256 --> its place in a file
                                                         |
       wrong bytes: counted, said, never asked again     refused, or gone: asked again later

Pieces share this node's line, and a piece that takes longer than `PACE` allows is lost. So there are few at first, and
one more while those on their way would arrive in a third of that time:  pieces * PIECE_BYTES <= rate * limit / 3.
A slow line carries one or two. A donor that is slow beside others has its place taken by another one.

Every piece is checked before it is written. Nothing here trusts anything but the digest.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field

from swarm_node.errors import UserError
from swarm_node.say import Once, Say
from swarm_node.swarm.base_weights.giving import PACE, UPLOAD_SLOTS_PER_PEER
from swarm_protocol.codec import version_for
from swarm_protocol.errors import ProtocolError, RemoteProtocolError
from swarm_protocol.limits import MAX_CHUNK_BYTES
from swarm_protocol.model_listing import MAX_LISTING_BYTES, MODEL_METHOD, PIECE_BYTES
from swarm_protocol.peers import peer_of
from swarm_protocol.tensors import BlobHead, decode_head, encode_head
from swarm_protocol.transports.base import Outgoing, Sink, Transport
from swarm_protocol.transports.transfer import Donor, Retry, outcome, reason_of

AT_FIRST, AT_ONCE, MOST_AT_ONCE = 2, 8, 24
"""Pieces on their way: before anything has come | at most (64 MiB in memory) | at most, stuck ones included."""
ASKED_UNKNOWN = 4  # at most so many of them are asked of members that have given nothing yet
NO_PIECE_S = 300.0  # if not a single byte has come for so long, no member can give the model
FETCH_LOOP_S = 0.05
PROGRESS_EVERY_S = 10.0
RATE_HALF_LIFE_S = 10.0  # bytes that came so long ago count half in the rate
YOUNG_S = 5.0  # a piece that has been on its way for less is not called stuck
BEHIND = 4
"""A piece is stuck if it has got so many times less than its share of all that came meanwhile. Others are asked as if
it were not on its way and, when all pieces are asked for, for the same piece."""
MAX_ASKED = 4  # members asked for one piece at the same time
RETRY = Retry(busy_s=0.5, accident_s=1.0, max_accident_s=60.0, refused_s=20.0)
WITHOUT_S = 20.0  # a member that has no right copy of a piece is not asked for it before
LIES = frozenset({"size", "digest", "hash", "schema"})
"""Faults in an answer that no accident explains, found by this node. A member that names one only refuses."""

Wait = Callable[[Collection["Future[None]"], float], None]
"""Wait until one of the futures is done, or so many seconds are over."""


def wait(running: Collection[Future[None]], seconds: float) -> None:
    """A `Wait` on the clock of this machine."""
    if running:
        wait_for(running, seconds, FIRST_COMPLETED)
    else:
        time.sleep(seconds)


@dataclass
class PieceDonor(Donor):
    """A member that may have the model."""

    asked: int = 0  # pieces on their way from it
    given: int = 0  # bytes
    without: dict[str, float] = field(default_factory=dict)
    """sha256 of pieces that it lacks -> when it may be asked for them again."""


@dataclass(eq=False)
class PieceRequest:
    """A listing or a piece on its way."""

    peer: str
    sha256: str
    size: int | None  # `None` for the listing, whose size is not known
    began: float
    done: Future[None] = field(default_factory=Future)
    answered: bool = False  # the peer did not refuse
    data: bytearray = field(default_factory=bytearray)
    counted: int = 0  # bytes of `data` that are in the rate
    share: float = 0.0  # bytes that it would have if all that came since it began had come to all alike

    def is_stuck(self, now: float) -> bool:
        """Whether it gets nothing, or much less than others. Streams deliver bytes in chunks: two are allowed for, as
        much as a piece may have got that had the line to itself a moment ago."""
        seconds = now - self.began
        chunk = min(self.size or 0, MAX_CHUNK_BYTES)
        if seconds <= YOUNG_S:
            return False
        if not self.data and seconds > YOUNG_S + self.answered * 2 * chunk / PACE.bytes_per_s:
            return True
        return len(self.data) * BEHIND < self.share - 2 * chunk

    def is_late(self, now: float) -> bool:
        """Whether another member is to be asked for it as well."""
        return self.is_stuck(now) or now - self.began > PACE.seconds(self.size or PIECE_BYTES) / 2


class Donors:
    """The members that may have the model; remembers which of them gave some, and which gave something else."""

    def __init__(
        self,
        transport: Transport,
        swarm: str,
        first: Sequence[str],
        say: Say,
        clock: Callable[[], float] = time.monotonic,
        wait: Wait = wait,
        rng: random.Random | None = None,
    ) -> None:
        """`first`: addresses of members to begin with, which may have no card yet."""
        self.donors: dict[str, PieceDonor] = {}
        self.liars: set[str] = set()  # never asked again
        self._transport = transport
        self._swarm = swarm
        self._first = [peer_of(address) for address in first]
        self._say, self._say_once = say, Once(say)
        self._clock = clock
        self._wait = wait
        self._rng = rng or random.Random()
        self._running: list[PieceRequest] = []
        self._bytes, self._seconds, self._looked_at = 0.0, 0.0, clock()
        """Bytes that came and the time that they took, both fading by `RATE_HALF_LIFE_S`; when they were counted."""

    def get(
        self,
        wanted: Mapping[str, int | None],
        keep: Callable[[str, bytearray], None],
        called: str,
        patience_s: float = NO_PIECE_S,
    ) -> None:
        """Fetch all that is `wanted` (sha256 -> bytes, if known), and call `keep` with each once it is here and right.
        Raises UserError if nothing came for `patience_s`, or nothing whole for as long as a piece may take."""
        missing, running = dict(wanted), self._running
        moved = came = said = began = self._looked_at = self._clock()
        self._bytes = self._seconds = 0.0
        whole_s = max(patience_s, PACE.seconds(PIECE_BYTES))
        total, there = sum(size or 0 for size in missing.values()), 0
        while missing:
            if self._count():
                moved = self._clock()
            for ask in [ask for ask in running if ask.done.done()]:
                running.remove(ask)
                if self._arrived(ask) and ask.sha256 in missing:
                    keep(ask.sha256, ask.data)
                    del missing[ask.sha256]
                    there += len(ask.data)
                    came = self._clock()
            now = self._clock()
            if now - max(moved, came) > patience_s or now - came > whole_s:
                raise UserError(self._why(called, patience_s))
            if now - said > PROGRESS_EVERY_S:
                said = now
                self._say(self._progress(called, there, total, now - began))
            self._ask_more(missing, now)
            if missing:
                self._wait([ask.done for ask in running], FETCH_LOOP_S)

    def _count(self) -> int:
        """Count the bytes that came since the last call, in all and for each piece on its way; returns the sum."""
        now, sizes = self._clock(), [len(ask.data) for ask in self._running]
        seconds, self._looked_at = now - self._looked_at, now
        came = sum(sizes) - sum(ask.counted for ask in self._running)
        for ask, size in zip(self._running, sizes, strict=True):
            ask.counted = size
            ask.share += came / len(sizes)
        if any(ask.answered for ask in self._running):  # while all members are busy, the line is no slower
            fade = 0.5 ** (seconds / RATE_HALF_LIFE_S)
            self._bytes, self._seconds = self._bytes * fade + came, self._seconds * fade + seconds
        return came

    def _bears_more(self, moving: Sequence[PieceRequest], listing: bool) -> bool:
        """Whether the line has room for another piece beside those that are `moving`. A `listing` is small."""
        if len(moving) >= AT_ONCE or len(self._running) >= MOST_AT_ONCE:
            return False
        if listing:
            return True
        if not self._bytes:
            return len(moving) < AT_FIRST
        on_their_way = len(moving) * PIECE_BYTES
        return on_their_way * self._seconds <= self._bytes * PACE.seconds(PIECE_BYTES) / 3

    def _ask_more(self, missing: dict[str, int | None], now: float) -> None:
        moving = [ask for ask in self._running if not ask.is_stuck(now)]
        listing = None in missing.values()
        unknown = sum(not self.donors[ask.peer].given for ask in moving)
        for peer in self._free(now):
            known = bool(self.donors[peer].given)
            if not self._bears_more(moving, listing):
                return
            if not known and unknown >= ASKED_UNKNOWN:
                continue
            sha256 = self._next(peer, missing, now)
            if sha256 is None:
                continue
            unknown += not known
            ask = self._ask(peer, sha256, missing[sha256], now)
            moving.append(ask)
            self._running.append(ask)

    def _free(self, now: float) -> Iterator[str]:
        """Peers that may be asked now, those that gave most first. Second places come after all first ones."""
        present = {*self._first, *self._transport.members()} - {"", self._transport.peer_id, *self.liars}
        peers = self._rng.sample(sorted(present), len(present))
        for peer in peers:
            self.donors.setdefault(peer, PieceDonor())
        peers.sort(key=lambda peer: -self.donors[peer].given)
        for place in range(UPLOAD_SLOTS_PER_PEER):
            for peer in peers:
                donor = self.donors[peer]
                places = UPLOAD_SLOTS_PER_PEER if donor.given else 1
                if donor.next_at <= now and donor.asked <= place < places:
                    yield peer

    def _next(self, peer: str, missing: dict[str, int | None], now: float) -> str | None:
        """The piece to ask `peer` for: one that no member was asked for yet, else one that has been on its way for
        long. A listing is small, so it is asked of any member."""
        asked: defaultdict[str, list[PieceRequest]] = defaultdict(list)
        for ask in self._running:
            asked[ask.sha256].append(ask)
        late: list[PieceRequest] = []
        for sha256, size in missing.items():
            asks = asked[sha256]
            if self.donors[peer].without.get(sha256, now) > now or any(ask.peer == peer for ask in asks):
                continue
            if not asks or size is None:
                return sha256
            if len(asks) < MAX_ASKED and all(ask.is_late(now) for ask in asks):
                late.append(asks[0])
        return min(late, key=lambda ask: ask.began).sha256 if late else None

    def _ask(self, peer: str, sha256: str, size: int | None, now: float) -> PieceRequest:
        ask, whole = PieceRequest(peer, sha256, size, now), False

        def answered(head: bytes, length: int) -> Sink:
            ask.answered = True
            theirs = decode_head(head, BlobHead)
            if (theirs.swarm, theirs.sha256) != (self._swarm, sha256):
                raise RemoteProtocolError("digest", "something else than was asked for")
            if length > MAX_LISTING_BYTES if size is None else length != size:
                raise RemoteProtocolError("size", f"{length} bytes for {size}")

            def sink(part: memoryview) -> None:
                nonlocal whole
                ask.data += part
                if len(ask.data) == length:
                    if hashlib.sha256(ask.data).hexdigest() != sha256:
                        raise RemoteProtocolError("digest", "not what its sha256 says")
                    whole = True

            return sink

        def check() -> None:
            if not whole:  # the sink is never called for an empty body
                raise RemoteProtocolError("size", "nothing")

        version = version_for(peer, self._transport.members())
        ours = Outgoing(encode_head(BlobHead(version, self._swarm, sha256)))
        limit = PACE.seconds(PIECE_BYTES if size is None else size)
        self.donors[peer].asked += 1
        ask.done = outcome(self._transport.exchange(peer, MODEL_METHOD, ours, answered, limit), check)
        return ask

    def _arrived(self, ask: PieceRequest) -> bool:
        """Whether what was asked for is here and right. Updates the donor."""
        donor, now = self.donors[ask.peer], self._clock()
        donor.asked -= 1
        try:
            ask.done.result()
        except ProtocolError as error:
            reason, _ = reason_of(error)
            if ask.answered and reason in LIES:
                lie = f"peer {ask.peer} gives something else than the swarm's model ({reason}): not asked again"
                self._say_once(ask.peer, lie)
                self.liars.add(ask.peer)
                return False
            if reason == "gone":
                donor.without[ask.sha256] = now + WITHOUT_S
                reason = "busy"
            donor.failed(reason, now, RETRY, self._rng.uniform(1, 2))
            return False
        donor.accidents, donor.given = 0, donor.given + len(ask.data)
        return True

    def _progress(self, called: str, there: int, total: int, seconds: float) -> str:
        if not there:
            remedy = "`swarm-node bootstrap SWARM --model DIR` gives it; with a copy of your own, join with --model DIR"
            return f"none of {len(self.donors)} members gives {called} yet: still asking ({remedy})"
        givers = sum(1 for donor in self.donors.values() if donor.given)
        rate = there / 1e6 / max(seconds, 1e-9)
        members = f"{givers} member{'s' * (givers != 1)}"
        return f"{called}: {there / 2**20:.0f} of {total / 2**20:.0f} MiB from {members}, {rate:.1f} MB/s"

    def _why(self, called: str, patience_s: float) -> str:
        lied = f", {len(self.liars)} gave something else" if self.liars else ""
        return (
            f"none of {len(self.donors)} members has given {called} for {patience_s:.0f} s{lied}: start again later "
            "(what has arrived is kept), or give it as a directory or hub id with --model"
        )
