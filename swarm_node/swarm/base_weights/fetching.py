"""Get the swarm's model from members: the listing, then pieces from several of them at once.

    members --(who is free, those first who have given before)--> ask for a piece --> sha256 --> its place in a file
                                                                     |
       wrong bytes: counted, said, never asked again     refused, for whatever reason, or gone: asked again later

Pieces share this node's line, and each must arrive within `longest_s` or is lost. So there are few at first, and one
more while those that are on their way would arrive in a third of that:  pieces * PIECE_BYTES <= rate * longest_s / 3.
On a slow line there is one or two; a source that is slow beside others has its place taken by another one.

Every piece is checked as it arrives, before anything is written. What has arrived is on disk (`files`): whoever is
killed goes on from there. Nothing here trusts anybody but the digest.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from protocol.codec import version_for
from protocol.errors import ProtocolError, RemoteProtocolError
from protocol.limits import MAX_CHUNK_BYTES
from protocol.manifest import ManifestModel
from protocol.model_listing import (
    MAX_LISTING_BYTES,
    MODEL_METHOD,
    PIECE_BYTES,
    ModelListing,
    open_listing,
    seal_listing,
)
from protocol.peers import peer_of
from protocol.tensors import BlobHead, open_blob_head, seal_head
from protocol.transports.base import Outgoing, Sink, Transport
from swarm_node.errors import UserError
from swarm_node.storage.rundir import os_errors_explained
from swarm_node.swarm.base_weights.files import (
    LISTING,
    SPARE_BYTES,
    Model,
    Piece,
    cache,
    cached_model,
    is_right,
    known_listing,
    pieces_of,
    read_piece,
)
from swarm_node.swarm.base_weights.giving import BYTES_PER_S, MAX_PLACES_PER_PEER, longest_s

AT_FIRST, AT_ONCE, MOST_AT_ONCE = 2, 8, 24
"""Pieces on their way while nothing has come | at most: 64 MiB in memory | with those that do not get on."""
ASKED_UNKNOWN = 4
"""Of which, asked of members of whom nothing is known."""
PATIENCE_S = 300.0
"""Without a single piece that long, there is nobody to have them from."""
TICK_S = 0.05
SAY_S = 10.0
"""Between two sentences about how it goes."""
HALF_S = 10.0
"""What came so long ago counts half in the rate."""
HURRY_S = 5.0
"""What has been on its way for less gets on."""
BEHIND = 4
"""What has got so many times less than its share of all that came meanwhile does not: others are asked as if it were
not on its way, and when all is asked for, for the same piece."""
MOST_TWICE = 4
"""Of how many a piece is asked at the same time."""
BUSY_S, UNKNOWN_S, GONE_S, MAX_GONE_S = 0.5, 20.0, 0.5, 60.0
"""When a member is asked again that is busy | does not have it yet, or refuses it otherwise | cannot be reached, each
time twice as long."""
LIES = frozenset({"size", "digest", "hash", "schema"})
"""What this node finds wrong with an answer that can be no mishap. A refusal is none, whatever it says."""

Say = Callable[[str], None]
Wait = Callable[[Collection["Future[None]"], float], None]
"""Until one of these is done, or so many seconds are over."""


def wait(running: Collection[Future[None]], seconds: float) -> None:
    """As `Wait`, on the clock of this machine."""
    if running:
        wait_for(running, seconds, FIRST_COMPLETED)
    else:
        time.sleep(seconds)


@dataclass
class Source:
    """A member, as far as it is known here."""

    asked: int = 0
    """Pieces on their way from it."""
    given: int = 0
    """Bytes."""
    gone: int = 0
    """How often in a row it could not be reached, or went away."""
    next_at: float = 0.0
    """Before that it is not asked."""
    without: dict[str, float] = field(default_factory=dict)
    """sha256 of pieces that it has no longer -> before that it is not asked for them."""


@dataclass(eq=False)
class Ask:
    """A listing or a piece on its way."""

    peer: str
    sha256: str
    size: int | None
    """`None` = of the listing: not known."""
    began: float
    done: Future[None] | None = None
    answered: bool = False
    """By something else than a refusal."""
    data: bytearray = field(default_factory=bytearray)
    right: bool = False
    """All of it is there, and it is what was asked for."""
    counted: int = 0
    """Bytes of `data` that are in the rate."""
    share: float = 0.0
    """Bytes that it would have if all that came since it began had come to all alike."""

    def is_stuck(self, now: float) -> bool:
        """Whether it does not get on, beside others or at all. A stream shows its bytes in chunks: two are allowed for,
        as one would be that had its line to itself a moment ago."""
        seconds = now - self.began
        chunk = min(self.size or 0, MAX_CHUNK_BYTES)
        if seconds <= HURRY_S:
            return False
        if not self.data and seconds > HURRY_S + self.answered * 2 * chunk / BYTES_PER_S:
            return True
        return len(self.data) * BEHIND < self.share - 2 * chunk

    def is_late(self, now: float) -> bool:
        """Whether it is to be asked of somebody else as well."""
        return self.is_stuck(now) or now - self.began > longest_s(self.size or PIECE_BYTES) / 2


class Members:
    """Those who may have the model; remembers who did, and who lied."""

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
        """`first`: addresses to begin with, of members that may have no card yet."""
        self.sources: dict[str, Source] = {}
        self.liars: dict[str, str] = {}
        """Peer -> what was wrong; never asked again."""
        self._transport = transport
        self._swarm = swarm
        self._first = [peer_of(address) for address in first]
        self._say = say
        self._clock = clock
        self._wait = wait
        self._rng = rng or random.Random()
        self._running: list[Ask] = []
        self._bytes, self._seconds, self._looked_at = 0.0, 0.0, clock()
        """What came, and how long it took, by `HALF_S`; when it was last looked at."""

    def get(
        self,
        wanted: Sequence[tuple[str, int | None]],
        keep: Callable[[str, bytearray], None],
        called: str,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Ask for all that is `wanted`, (sha256, bytes if known), and call `keep` with each that has arrived and is
        right. Raises UserError when nothing has come for `patience_s`, and if nothing whole for as long as a piece
        may take."""
        missing, running = dict(wanted), self._running
        moved = came = said = began = self._looked_at = self._clock()
        self._bytes = self._seconds = 0.0
        whole_s = max(patience_s, longest_s(PIECE_BYTES))
        total, there = sum(size or 0 for _, size in wanted), 0
        while missing:
            if self._count():
                moved = self._clock()
            for ask in [ask for ask in running if ask.done is not None and ask.done.done()]:
                running.remove(ask)
                if self._arrived(ask) and ask.sha256 in missing:
                    keep(ask.sha256, ask.data)
                    del missing[ask.sha256]
                    there += len(ask.data)
                    came = self._clock()
            now = self._clock()
            if now - max(moved, came) > patience_s or now - came > whole_s:
                raise UserError(self._why(called, patience_s))
            if now - said > SAY_S:
                said = now
                self._say(self._progress(called, there, total, now - began))
            self._ask_more(missing, now)
            if missing:
                self._wait([ask.done for ask in running if ask.done is not None], TICK_S)

    # ----------------------------------------------------------------- asking

    def _count(self) -> int:
        """Bytes that came since the last look; who of those on their way had how much of it."""
        now, sizes = self._clock(), [len(ask.data) for ask in self._running]
        seconds, self._looked_at = now - self._looked_at, now
        came = sum(sizes) - sum(ask.counted for ask in self._running)
        for ask, size in zip(self._running, sizes, strict=True):
            ask.counted = size
            ask.share += came / len(sizes)
        if any(ask.answered for ask in self._running):  # while all are busy, the line is no slower
            fade = 0.5 ** (seconds / HALF_S)
            self._bytes, self._seconds = self._bytes * fade + came, self._seconds * fade + seconds
        return came

    def _bears_more(self, moving: Sequence[Ask], listing: bool) -> bool:
        """Whether what is on its way leaves room on the line for another piece, or the `listing`, which is small."""
        if len(moving) >= AT_ONCE or len(self._running) >= MOST_AT_ONCE:
            return False
        if listing:
            return True
        if not self._bytes:
            return len(moving) < AT_FIRST
        on_their_way = len(moving) * PIECE_BYTES
        return on_their_way * self._seconds <= self._bytes * longest_s(PIECE_BYTES) / 3

    def _ask_more(self, missing: dict[str, int | None], now: float) -> None:
        moving = [ask for ask in self._running if not ask.is_stuck(now)]
        listing = None in missing.values()
        unknown = sum(not self.sources[ask.peer].given for ask in moving)
        for peer in self._free(now):
            known = bool(self.sources[peer].given)
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
        """Peers that may be asked, one place of each after the other; those that gave most before the others."""
        present = {*self._first, *self._transport.members()} - {"", self._transport.peer_id, *self.liars}
        peers = self._rng.sample(sorted(present), len(present))
        for peer in peers:
            self.sources.setdefault(peer, Source())
        peers.sort(key=lambda peer: -self.sources[peer].given)
        for place in range(MAX_PLACES_PER_PEER):
            for peer in peers:
                source = self.sources[peer]
                places = MAX_PLACES_PER_PEER if source.given else 1
                if source.next_at <= now and source.asked <= place < places:
                    yield peer

    def _next(self, peer: str, missing: dict[str, int | None], now: float) -> str | None:
        """What to ask `peer` for: what nobody was asked for yet; else what has been on its way for long, or a listing,
        which is small."""
        without = {sha256 for sha256, until in self.sources[peer].without.items() if until > now}
        asked: dict[str, list[Ask]] = {}
        for ask in self._running:
            asked.setdefault(ask.sha256, []).append(ask)
        for sha256, size in missing.items():
            if sha256 in without:
                continue
            asks = asked.get(sha256)
            if not asks:
                return sha256
            if size is None and peer not in {ask.peer for ask in asks}:
                return sha256
        late = [
            asks
            for asks in asked.values()
            if asks[0].sha256 in missing
            and asks[0].sha256 not in without
            and len(asks) < MOST_TWICE
            and all(ask.peer != peer and ask.is_late(now) for ask in asks)
        ]
        return min(late, key=lambda asks: asks[0].began)[0].sha256 if late else None

    def _ask(self, peer: str, sha256: str, size: int | None, now: float) -> Ask:
        ask = Ask(peer, sha256, size, now)

        def answered(head: bytes, length: int) -> Sink:
            ask.answered = True
            theirs = open_blob_head(head)
            if (theirs.swarm, theirs.sha256) != (self._swarm, sha256):
                raise RemoteProtocolError("digest", "something else than was asked for")
            if length > MAX_LISTING_BYTES if size is None else length != size:
                raise RemoteProtocolError("size", f"{length} bytes for {size}")

            def sink(part: memoryview) -> None:
                ask.data += part
                if len(ask.data) == length:
                    if hashlib.sha256(ask.data).hexdigest() != sha256:
                        raise RemoteProtocolError("digest", "not what its sha256 says")
                    ask.right = True

            return sink

        version = version_for(peer, self._transport.members())
        ours = Outgoing(seal_head(BlobHead(version, self._swarm, sha256)))
        self.sources[peer].asked += 1
        limit = longest_s(PIECE_BYTES if size is None else size)
        ask.done = self._transport.exchange(peer, MODEL_METHOD, ours, answered, limit)
        return ask

    def _arrived(self, ask: Ask) -> bool:
        """Whether it has; what it says of the peer is remembered."""
        source, now = self.sources[ask.peer], self._clock()
        source.asked -= 1
        try:
            assert ask.done is not None
            ask.done.result()
        except (ProtocolError, CancelledError) as error:
            reason = error.reason if isinstance(error, RemoteProtocolError) else "unreachable"
            if ask.answered and reason in LIES:
                self._lied(ask.peer, reason)
            elif reason in ("busy", "gone"):
                source.next_at = now + BUSY_S * self._rng.uniform(1, 2)
                if reason == "gone":
                    source.without[ask.sha256] = now + UNKNOWN_S
            elif reason in ("unreachable", "torn", "slow"):
                source.gone += 1
                source.next_at = now + min(MAX_GONE_S, GONE_S * 2**source.gone)
            else:
                source.next_at = now + UNKNOWN_S
            return False
        if not ask.right:  # an empty body never reaches the sink
            self._lied(ask.peer, "size")
            return False
        source.gone, source.given = 0, source.given + len(ask.data)
        return True

    def _lied(self, peer: str, reason: str) -> None:
        if peer not in self.liars:
            self.liars[peer] = reason
            self._say(f"peer {peer} gives something else than the swarm's model ({reason}): not asked again")

    # ----------------------------------------------------------------- words

    def _progress(self, called: str, there: int, total: int, seconds: float) -> str:
        if not there:
            return f"none of {len(self.sources)} members gives {called} yet: still asking"
        givers = sum(1 for source in self.sources.values() if source.given)
        rate = there / 1e6 / max(seconds, 1e-9)
        return f"{called}: {there / 2**20:.0f} of {total / 2**20:.0f} MiB from {givers} members, {rate:.1f} MB/s"

    def _why(self, called: str, patience_s: float) -> str:
        lied = f", {len(self.liars)} gave something else" if self.liars else ""
        return (
            f"none of {len(self.sources)} members has given {called} for {patience_s:.0f} s{lied}: start again later "
            "(what has arrived is kept), or give it as a directory or hub id with --model"
        )


# --------------------------------------------------------------------- to disk


def fetch_model(
    wanted: ManifestModel, members: Members, say: Say, near: Sequence[Path] = (), patience_s: float = PATIENCE_S
) -> Model:
    """Get the model into the cache, from where an earlier call left off; pieces that are in the directories `near` are
    copied. Raises UserError if the disk is full, or nobody gives it."""
    folder = cache() / wanted.digest
    with os_errors_explained(folder), _alone(wanted, say):
        found = cached_model(wanted.digest)  # of another process, while this one waited
        if found is not None:
            return found
        partial = folder.with_name(f"{wanted.digest}.partial")
        partial.mkdir(exist_ok=True)
        called = f"model {wanted.name}"
        listing = _listing(wanted, members, partial, called, patience_s)
        draft = Draft(partial, listing)
        need, free = draft.missing_bytes + SPARE_BYTES, shutil.disk_usage(partial).free
        if draft.missing and need > free:
            raise UserError(
                f"{called} takes {draft.missing_bytes / 2**30:.1f} GiB more at {cache()}, where {free / 2**30:.1f} GiB "
                "are free: make room, or choose another disk with HF_HOME"
            )
        draft.take_from(near)
        began, size = time.monotonic(), draft.missing_bytes
        if draft.missing:
            at_hand = listing.size - size
            here = f", {at_hand / 2**20:.1f} MiB of it are here" if at_hand else ""
            say(f"getting {called} from members: {listing.size / 2**20:.1f} MiB{here}")
            members.get(list(draft.missing.items()), draft.keep, called, patience_s)
            givers = Counter({peer: source.given for peer, source in members.sources.items() if source.given})
            seconds = time.monotonic() - began
            say(f"{called} is here: {size / 2**20:.1f} MiB in {seconds:.1f} s from {len(givers)} members, all checked")
        draft.finish(folder)
    return Model(wanted.digest, folder, listing)


def _listing(wanted: ManifestModel, members: Members, partial: Path, called: str, patience_s: float) -> ModelListing:
    """From this machine, else from members."""
    listing = known_listing(wanted.digest)
    if listing is None:
        got = bytearray()
        members.get(
            [(wanted.digest, None)], lambda sha256, data: got.extend(data), f"the listing of {called}", patience_s
        )
        try:
            listing = open_listing(bytes(got), wanted.digest)
        except RemoteProtocolError as error:  # its digest is right, so it is what the swarm's maker wrote
            raise UserError(f"this swarm's {called} cannot be used: {error.detail}; choose one with --model") from error
    if listing.size != wanted.bytes:
        raise UserError(f"this swarm's {called} is not of the size that its manifest says; choose one with --model")
    (partial / LISTING).write_bytes(seal_listing(listing))
    return listing


class Draft:
    """A model of which pieces are still missing, on disk."""

    def __init__(self, folder: Path, listing: ModelListing) -> None:
        """Picks up what an earlier process left, as far as it is right."""
        self.missing: dict[str, int] = {}
        """sha256 -> bytes, in the order of the files."""
        self._folder = folder
        self._listing = listing
        self._places: dict[str, list[Piece]] = {}
        """sha256 -> where that piece goes: equal pieces are one."""
        for piece in pieces_of(listing):
            self.missing[piece.sha256] = piece.size
            self._places.setdefault(piece.sha256, []).append(piece)
        self._have = folder / "have"
        for piece in self._kept():
            if is_right(piece, read_piece(folder, piece)):
                self._places[piece.sha256] = [one for one in self._places[piece.sha256] if one != piece]
                if not self._places[piece.sha256]:
                    self.missing.pop(piece.sha256, None)

    @property
    def missing_bytes(self) -> int:
        """What the pieces take that are not on disk yet."""
        return sum(piece.size for sha256 in self.missing for piece in self._places[sha256])

    def take_from(self, folders: Sequence[Path]) -> None:
        """Copy what is in files of the same name and size elsewhere on this machine."""
        for folder in folders:
            for file in self._listing.files:
                try:
                    if (folder / file.name).stat().st_size != file.size:
                        continue
                except OSError:
                    continue
                for piece in [piece for sha256 in [*self.missing] for piece in self._places[sha256]]:
                    if piece.name == file.name and piece.sha256 in self.missing:
                        data = bytearray(read_piece(folder, piece))
                        if is_right(piece, data):
                            self.keep(piece.sha256, data)

    def keep(self, sha256: str, data: bytearray) -> None:
        """Write a piece, which was checked, to its places. Raises OSError."""
        for piece in self._places[sha256]:
            descriptor = os.open(self._folder / piece.name, os.O_WRONLY | os.O_CREAT, 0o644)
            with os.fdopen(descriptor, "wb") as file:
                file.seek(piece.start)
                file.write(data)
            with self._have.open("a") as have:
                have.write(f"{piece.number}\n")
        del self.missing[sha256]

    def finish(self, folder: Path) -> None:
        """All pieces are there: put the model in its place, whole."""
        assert not self.missing
        for name in [*(file.name for file in self._listing.files), LISTING]:
            descriptor = os.open(self._folder / name, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        self._have.unlink(missing_ok=True)
        if folder.exists():  # cut off since it was put there
            shutil.rmtree(folder)
        self._folder.rename(folder)

    def _kept(self) -> list[Piece]:
        """Pieces that are said to be there."""
        try:
            lines = self._have.read_text().splitlines()
        except OSError:
            return []
        pieces = pieces_of(self._listing)
        numbers = {int(line) for line in lines if line.isdecimal() and int(line) < len(pieces)}
        there = [pieces[number] for number in sorted(numbers)]
        return [piece for piece in there if (self._folder / piece.name).exists()]


@contextmanager
def _alone(wanted: ManifestModel, say: Say) -> Iterator[None]:
    """One process at a time fetches a model; the kernel lets go of the lock of one that dies."""
    cache().mkdir(parents=True, exist_ok=True)
    lock, told = os.open(cache() / f"{wanted.digest}.lock", os.O_RDWR | os.O_CREAT, 0o644), False
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    say(f"another process of this machine is getting model {wanted.name}: waiting for it")
                told = True
                time.sleep(0.2)
        yield
    finally:
        os.close(lock)
