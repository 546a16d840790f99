"""Give the swarm's model to members who ask for it, piece by piece.

Any member may ask, because the manifest has made the model public in the swarm. A few pieces leave at a time, so that
averaging and pipelines find room beside them; a limit on what is sent (`network.max_upload_mbit`) means fewer. A peer
that held an upload slot for long gives way to the others, so a few slow ones block nobody. Each piece is hashed
before it leaves: a file that was changed on this machine leads to a refusal, never to wrong bytes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial

from swarm_node.say import Once, Say
from swarm_node.swarm.base_weights.files import Model, pieces_of, read_piece
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.model_listing import MODEL_METHOD, encode_listing
from swarm_protocol.tensors import BlobHead, decode_head, encode_head
from swarm_protocol.transports.base import Accepted, Outgoing, Transport
from swarm_protocol.transports.transfer import Pace, UploadSlot, UploadSlots, chunks, expect_no_body, in_time

MAX_UPLOAD_SLOTS, UPLOAD_SLOTS_PER_PEER = 4, 2
"""Pieces that leave at once: 32 MiB in memory, and a quarter of the exchanges that a node takes part in."""
SLOT_MBIT = 2.0  # where sending is limited, there is one upload slot for each of so many Mbit/s
PACE = Pace(30.0, 2**15)  # a quarter of a megabit a second: one piece may take five minutes
UNTAKEN_WAIT_S = 5.0
"""How long a peer waits that asked for a piece and did not take it. Reading and hashing one takes milliseconds."""
FAST_BYTES_S = 2**20
YIELD_TIMES = 3.0
"""A peer that held an upload slot for longer than a fast line needs gives way to others so many times as long."""


class Giver:
    """Answers requests for one model."""

    def __init__(
        self,
        transport: Transport,
        swarm: str,
        model: Model,
        say: Say,
        max_upload_mbit: float = 0.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.given: Counter[str] = Counter()  # bytes that left, by peer
        self._swarm = swarm
        self._say_once = Once(say)
        self._now = now
        slots = max(1, min(MAX_UPLOAD_SLOTS, int(max_upload_mbit / SLOT_MBIT))) if max_upload_mbit else MAX_UPLOAD_SLOTS
        self._slots = UploadSlots(slots, UPLOAD_SLOTS_PER_PEER, now)
        self._listing = encode_listing(model.listing)
        self._pieces = {piece.sha256: piece for piece in pieces_of(model.listing)}
        transport.accept(MODEL_METHOD, self.accept)

    def accept(self, peer: str, head: bytes, size: int) -> Accepted:
        """Answer a peer that asks for a piece, or the listing. Raises RemoteProtocolError: swarm, size, unknown (not of
        this model), busy, gone (changed on this machine)."""
        wanted = decode_head(head, BlobHead)
        if wanted.swarm != self._swarm:
            raise RemoteProtocolError("swarm", wanted.swarm[:16])
        expect_no_body(size)
        if wanted.sha256 != self.model.digest and wanted.sha256 not in self._pieces:
            raise RemoteProtocolError("unknown", "not of the model that is here")
        return self._slots.give(peer, partial(self._give, wanted), self._over)

    def _give(self, wanted: BlobHead, slot: UploadSlot) -> Outgoing:
        data = self._listing if wanted.sha256 == self.model.digest else self._read(wanted.sha256)
        until = slot.since + PACE.seconds(len(data))
        head = encode_head(BlobHead(wanted.protocol, self._swarm, wanted.sha256))
        return Outgoing(head, len(data), lambda: in_time(chunks(memoryview(data)), lambda taken: until, self._now))

    def _over(self, slot: UploadSlot, size: int, error: Exception | None) -> None:
        too_long = self._now() - slot.since - size / FAST_BYTES_S
        wait_s = 0.0 if error is None else UNTAKEN_WAIT_S
        self._slots.leave(slot, wait_s=wait_s, yield_s=max(0.0, YIELD_TIMES * too_long))
        if error is None:
            self.given[slot.peer] += size

    def _read(self, sha256: str) -> bytes:
        """The bytes of a piece. Raises RemoteProtocolError: gone."""
        piece = self._pieces[sha256]
        data = read_piece(self.model.folder, piece)
        if data is not None:
            return data
        path = self.model.folder / piece.name
        self._say_once(piece.name, f"{path} was changed: members are refused the pieces that differ")
        raise RemoteProtocolError("gone", "changed since")
