"""Give the swarm's model to members who ask for it, piece by piece.

Anybody in the swarm may ask: who wrote its manifest has made the model public there. A few pieces leave at a time, so
that averaging and crews find room beside them, and no piece has its place for longer than a slow line takes; a limit on
what is sent (`network.max_upload_mbit`) means fewer. Who has held a place for long gives way to those who ask
meanwhile, so a few slow ones keep nobody from the model. Each piece is hashed before it leaves, so a file that was
changed here makes a refusal, not a liar.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

from protocol.errors import RemoteProtocolError
from protocol.limits import MAX_CHUNK_BYTES
from protocol.model_listing import MODEL_METHOD, seal_listing
from protocol.tensors import BlobHead, open_blob_head, seal_head
from protocol.transports.base import Accepted, Outgoing, Transport
from swarm_node.swarm.base_weights.files import Model, is_right, pieces_of, read_piece

MAX_PLACES, MAX_PLACES_PER_PEER = 4, 2
"""Pieces that leave at once: 32 MiB in memory, and a quarter of the exchanges that a node takes part in."""
PLACE_MBIT = 2.0
"""Where sending is limited, a place for each of so many Mbit/s."""
GRACE_S, BYTES_PER_S = 30.0, 2**15
"""Who takes a piece more slowly is given up: at a quarter of a megabit a second one takes five minutes."""
COOL_S = 5.0
"""Who asked for a piece and then did not take it waits so long: reading and hashing one takes a few milliseconds."""
FAST_BYTES_S = 2**20
RESTS = 3.0
"""Who held a place for longer than a fast line needs gives way to others so many times as long."""
CALLED_S = 20.0
"""Who asked so recently is one to give way to; askers that were told `busy` ask again within a second."""


def longest_s(size: int) -> float:
    """Seconds that `size` bytes may take."""
    return GRACE_S + size / BYTES_PER_S


class Giver:
    """Answers for one model."""

    def __init__(
        self,
        transport: Transport,
        swarm: str,
        model: Model,
        say: Callable[[str], None],
        max_upload_mbit: float = 0.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.given: Counter[str] = Counter()
        """Bytes that left, by peer."""
        self._swarm = swarm
        self._say = say
        self._now = now
        self._places = max(1, min(MAX_PLACES, int(max_upload_mbit / PLACE_MBIT))) if max_upload_mbit else MAX_PLACES
        self._listing = seal_listing(model.listing)
        self._pieces = {piece.sha256: piece for piece in pieces_of(model.listing)}
        self._guard = threading.Lock()
        """Of the five below."""
        self._taken: Counter[str] = Counter()
        """Places, by peer."""
        self._cool_until: dict[str, float] = {}
        """Before that it is given nothing; a few, since they had a place each."""
        self._rests_until: dict[str, float] = {}
        """Before that it gives way."""
        self._called_until: dict[str, float] = {}
        """Before that it is given way to."""
        self._damaged: set[str] = set()
        """Files that are not what they were."""
        transport.accept(MODEL_METHOD, self.accept)

    def accept(self, peer: str, head: bytes, size: int) -> Accepted:
        """A peer asks for a piece, or the listing. Raises RemoteProtocolError: why it gets none now."""
        wanted = open_blob_head(head)
        if wanted.swarm != self._swarm:
            raise RemoteProtocolError("swarm", wanted.swarm[:16])
        if size:
            raise RemoteProtocolError("size", f"{size} bytes where none are wanted")
        if wanted.sha256 != self.model.digest and wanted.sha256 not in self._pieces:
            raise RemoteProtocolError("unknown", "not of the model that is here")
        now = self._now()
        with self._guard:
            if not self._has_place(peer, now):
                raise RemoteProtocolError("busy", "others are given pieces just now")
            self._taken[peer] += 1
        try:
            data = self._listing if wanted.sha256 == self.model.digest else self._read(wanted.sha256)
        except BaseException:
            self._leave(peer)
            raise
        ours = seal_head(BlobHead(wanted.protocol, self._swarm, wanted.sha256))
        until = now + longest_s(len(data))

        def over(error: Exception | None) -> None:
            self._leave(peer, 0 if error else len(data))
            left = self._now()
            too_long = left - now - len(data) / FAST_BYTES_S
            with self._guard:
                if error is not None:
                    self._cool_until[peer] = left + COOL_S
                if too_long > 0:
                    self._rests_until[peer] = max(self._rests_until.get(peer, 0.0), left + RESTS * too_long)

        return Accepted(Outgoing(ours, len(data), partial(self._body, data, until)), _refuse, over)

    def _has_place(self, peer: str, now: float) -> bool:
        """Whether there is one for it."""
        for times in (self._cool_until, self._rests_until, self._called_until):
            for one in [one for one, until in times.items() if until <= now]:
                del times[one]
        if peer in self._cool_until:
            return False
        if peer not in self._rests_until:
            self._called_until[peer] = now + CALLED_S
        elif self._called_until.keys() - {peer}:
            return False
        return self._taken.total() < self._places and self._taken[peer] < MAX_PLACES_PER_PEER

    def _read(self, sha256: str) -> bytes:
        """Raises RemoteProtocolError: gone."""
        piece = self._pieces[sha256]
        try:
            data = read_piece(self.model.folder, piece)
        except OSError:
            data = b""
        if is_right(piece, data):
            return data
        with self._guard:
            told = piece.name in self._damaged
            self._damaged.add(piece.name)
        if not told:
            self._say(f"{self.model.folder / piece.name} is not what it was: members are refused what has changed")
        raise RemoteProtocolError("gone", "changed since")

    def _body(self, data: bytes, until: float) -> Iterator[memoryview]:
        view = memoryview(data)
        for start in range(0, len(data), MAX_CHUNK_BYTES):
            if self._now() > until:
                raise RemoteProtocolError("slow", "the piece was not taken in time")
            yield view[start : start + MAX_CHUNK_BYTES]

    def _leave(self, peer: str, given: int = 0) -> None:
        with self._guard:
            self._taken[peer] -= 1
            self._taken += Counter()  # forgets zeros
            if given:
                self.given[peer] += given


def _refuse(piece: memoryview) -> None:
    raise RemoteProtocolError("size", "bytes where none are wanted")
