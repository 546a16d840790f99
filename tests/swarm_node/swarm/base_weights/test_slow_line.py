"""Pieces of full size over lines of all speeds, on a driven clock: each piece must arrive in time, or is lost."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest

from swarm_node.swarm.base_weights.fetching import AT_ONCE, Donors
from swarm_protocol.errors import PeerUnreachable
from swarm_protocol.limits import MAX_CHUNK_BYTES
from swarm_protocol.messages import PROTOCOL_VERSION, PeerCard
from swarm_protocol.tensors import BlobHead, decode_head, encode_head
from swarm_protocol.transports.base import Outgoing, Sink
from tests.support.fake_transport import FakeTransport

SWARM = "5a" * 32
PIECE = 8 * 2**20
TICK_S = 0.5


@dataclass(eq=False)
class Stream:
    """A piece on its way."""

    peer: str
    data: bytes
    sink: Sink
    until: float
    done: Future[None] = field(default_factory=Future)
    there: float = 0.0
    shown: int = 0


class Line(FakeTransport):
    """A newcomer's downlink, shared by all that is on its way; what comes is shown in whole chunks, as by a stream."""

    def __init__(self, mbit: float, sources: Mapping[str, float], pieces: int) -> None:
        """`mbit`: of the downlink; `sources`: peer -> Mbit/s of each of its streams."""
        super().__init__()
        self.now, self.lost, self.most = 0.0, 0, 0
        self.rate, self.sources = mbit * 1e6 / 8, {peer: rate * 1e6 / 8 for peer, rate in sources.items()}
        self.streams: list[Stream] = []
        self.pieces = {hashlib.sha256(data).hexdigest(): data for data in (bytes([i]) * PIECE for i in range(pieces))}

    def members(self) -> dict[str, PeerCard]:
        return {peer: PeerCard(PROTOCOL_VERSION, SWARM, 0.0, peer, ["trainer"]) for peer in self.sources}

    def exchange(
        self, peer: str, method: str, ours: Outgoing, answered: Callable[[bytes, int], Sink], timeout: float
    ) -> Future[None]:
        sha256 = decode_head(ours.head, BlobHead).sha256
        data = self.pieces[sha256]
        sink = answered(encode_head(BlobHead(PROTOCOL_VERSION, SWARM, sha256)), len(data))
        self.streams.append(Stream(peer, data, sink, self.now + timeout))
        self.most = max(self.most, len(self.streams))
        return self.streams[-1].done

    def wait(self, running: Collection[Future[None]], seconds: float) -> None:
        self.now += TICK_S
        shares = self._shares()
        for stream in list(self.streams):
            stream.there = min(len(stream.data), stream.there + shares[stream] * TICK_S)
            while stream.shown + MAX_CHUNK_BYTES <= stream.there:
                stream.sink(memoryview(stream.data)[stream.shown : stream.shown + MAX_CHUNK_BYTES])
                stream.shown += MAX_CHUNK_BYTES
            if stream.shown == len(stream.data):
                self.streams.remove(stream)
                stream.done.set_result(None)
            elif self.now >= stream.until:
                self.streams.remove(stream)
                self.lost += 1
                stream.done.set_exception(PeerUnreachable("took longer"))

    def _shares(self) -> dict[Stream, float]:
        """Bytes a second of each: equal ones, and what slow sources leave is for the others."""
        shares, left = {}, self.rate
        for i, stream in enumerate(sorted(self.streams, key=lambda stream: self.sources[stream.peer])):
            shares[stream] = min(self.sources[stream.peer], left / (len(self.streams) - i))
            left -= shares[stream]
        return shares

    def get(self, **options: Any) -> list[str]:
        """What has arrived."""
        donors = Donors(self, SWARM, [], lambda sentence: None, lambda: self.now, self.wait, random.Random(0))
        came: list[str] = []
        wanted = dict.fromkeys(self.pieces, PIECE)
        donors.get(wanted, lambda sha256, data: came.append(sha256), "the model", **options)
        assert not donors.liars
        return came


@pytest.fixture(autouse=True)
def full_size(monkeypatch: pytest.MonkeyPatch, small_pieces: None) -> None:
    monkeypatch.setattr("swarm_node.swarm.base_weights.fetching.PIECE_BYTES", PIECE)


@pytest.mark.parametrize("patience_s", [60.0, 300.0])
@pytest.mark.parametrize("mbit", [0.5, 1.0, 2.0, 4.0])
def test_a_slow_line_is_asked_for_little(mbit: float, patience_s: float) -> None:
    line = Line(mbit, {f"p{i}": math.inf for i in range(8)}, pieces=6)
    assert len(line.get(patience_s=patience_s)) == 6
    assert line.lost == 0
    assert line.now < 1.2 * 6 * PIECE / line.rate  # virtual seconds: nearly all that came was of use


def test_a_fast_line_asks_for_many_at_once() -> None:
    line = Line(200.0, {f"p{i}": 10.0 for i in range(8)}, pieces=24)
    assert len(line.get()) == 24
    assert line.most == AT_ONCE


def test_a_slow_source_loses_its_place() -> None:
    line = Line(20.0, {"slow": 0.3, "a": 40.0, "b": 40.0}, pieces=12)
    assert len(line.get()) == 12
    assert line.now < 2 * 12 * PIECE / line.rate
