"""One exchange of a fragment between two peers: its states, the two bodies, and the memory that it holds.

`PairExchange` is one exchange, `ExchangeSlot` the place for the one that is under way.

    WAITING --answer--> TRAVELLING --arrive--> COMPLETE --finish--> FINISHED
       |                     |
       +------ fail ---------+---------------> FAILED
       +------ drop ---------+---------------> DROPPED

The transport's worker threads encode and decode bodies while training goes on. An exchange that is over lets go of its
tensors as soon as no worker uses them.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from swarm_node.averaging.codecs import BodyDecoder, Reader, Readers, coded_bytes, pieces
from swarm_node.averaging.lattice_codec import LatticeReader, lattice_pieces, lattice_size, most_written_out
from swarm_node.averaging.robust import Judged, distance
from swarm_node.errors import UserError
from swarm_protocol.errors import LocalProtocolError, RemoteProtocolError, in_seconds
from swarm_protocol.tensors import PROMISES, AverageHead, WeightCodec, decode_head
from swarm_protocol.transports.base import Outgoing, Sink

PAIR_CODECS: dict[str, WeightCodec] = {"float32": "float32", "8bit": "lattice8", "4bit": "lattice4"}
BITS: dict[WeightCodec, int] = {"lattice8": 8, "lattice4": 4}
EXCHANGE_GRACE_S = 5.0
"""An exchange is given up so long after its time. The transport ends this node's own calls earlier, by itself."""


class ExchangeState(Enum):
    WAITING = "the partner's head is not known"
    TRAVELLING = "both heads are known, bodies are on their way"
    COMPLETE = "both peers have both bodies; the next step boundary applies the result"
    FINISHED = "a step boundary has applied the result, or refused it"
    FAILED = "the transport has reported an error"
    DROPPED = "this node has given it up; what the transport reports later changes nothing"


ExchangeEvent = Enum("ExchangeEvent", "ANSWER ARRIVE FINISH FAIL DROP")

_S, _E = ExchangeState, ExchangeEvent
TRANSITIONS: dict[ExchangeState, dict[ExchangeEvent, ExchangeState]] = {
    _S.WAITING: {_E.ANSWER: _S.TRAVELLING, _E.FAIL: _S.FAILED, _E.DROP: _S.DROPPED},
    _S.TRAVELLING: {_E.ARRIVE: _S.COMPLETE, _E.FAIL: _S.FAILED, _E.DROP: _S.DROPPED},
    _S.COMPLETE: {_E.FINISH: _S.FINISHED},
    _S.FINISHED: {},
    _S.FAILED: {},
    _S.DROPPED: {_E.ARRIVE: _S.DROPPED, _E.FAIL: _S.DROPPED},
}
LIVE = frozenset({_S.WAITING, _S.TRAVELLING})
OVER = frozenset({_S.FINISHED, _S.FAILED, _S.DROPPED})


@dataclass(frozen=True)
class FragmentCopy:
    """This node's fragment at one moment. One copy may serve two exchanges."""

    fragment: int
    fast: Tensor
    slow: Tensor
    reach: float  # estimate of the root mean square distance between `fast` and the partner's fast weights
    written_out: Tensor  # numbers of the blocks that the last reader could not decode
    updates: int  # this node's optimiser updates
    replaced: int  # how often this node's weights had been replaced
    generation: int  # how often this fragment had been averaged


@dataclass(eq=False)
class PairExchange:
    """One exchange, from the copy of this node's weights to the outer step. For any thread."""

    round: int
    partner: str
    ours: bool  # this node called
    copy: FragmentCopy
    codec: WeightCodec
    both: bool  # slow weights travel as well as fast ones
    seed: str  # common part of the two seeds of lattices; each writer's peer id completes its own
    ends: float  # when it is given up, by `clock`
    clock: Callable[[], float]
    draining: bool = False  # the caller is leaving the swarm
    state: ExchangeState = field(default=ExchangeState.WAITING, init=False)
    answer_by: float = field(default=math.inf, init=False)  # a node that is leaving asks the next peer at this time
    theirs: AverageHead | None = field(default=None, init=False)
    readers: list[Reader] = field(default_factory=list, init=False)
    apart: float | None = field(default=None, init=False)
    """Root mean square distance of the two peers' fast weights, once known."""
    failed: Tensor | None = field(default=None, init=False)
    """Blocks of the partner's body that this node could not decode, bool."""
    verdict: Judged = field(default_factory=Judged, init=False)
    momentum: Tensor | None = field(default=None, init=False)
    """The new momentum, once the partner's body has arrived and passed all checks."""
    refused: RemoteProtocolError | UserError | None = field(default=None, init=False)
    """Why there is no new momentum. The partner is not told, so that both peers remember this exchange."""
    _workers: int = field(default=0, init=False)  # threads of the transport that use the tensors right now
    _lock: threading.RLock = field(default_factory=threading.RLock, init=False)

    @property
    def live(self) -> bool:
        return self.state in LIVE

    def move(self, event: ExchangeEvent) -> None:
        """Change state. Raises LocalProtocolError for a move that is not in `TRANSITIONS`."""
        with self._lock:
            if event not in TRANSITIONS[self.state]:
                raise LocalProtocolError(f"an exchange in state {self.state.name} takes no {event.name}")
            self.state = TRANSITIONS[self.state][event]
            self._release()

    def head(self) -> dict[str, Any]:
        """Fields of this node's `AverageHead` that tell what it sends."""
        copy = self.copy
        return {
            "round": self.round,
            "fragment": copy.fragment,
            "reach": copy.reach,
            "written_out": len(copy.written_out),
            "version": copy.updates,
            "draining": self.draining and self.ours,
        }

    def check_live(self) -> None:
        """Raises RemoteProtocolError `slow` if it is over or late. The transport would serve a caller for hours."""
        if not self.live or self.clock() > self.ends + EXCHANGE_GRACE_S:
            raise RemoteProtocolError("slow", "the exchange was given up")

    def pieces(self, me: str) -> Iterator[memoryview]:
        """The body of this node, `me`. The partner's head must be known."""
        assert self.theirs is not None
        with self._at_work():
            fast, slow = self.copy.fast, self.copy.slow
        for values in [fast, slow][: 1 + self.both]:
            if self.codec in BITS:
                reaches = self.copy.reach, self.theirs.reach
                seed, written_out = f"{self.seed} {me}", self.copy.written_out
                body = lattice_pieces(BITS[self.codec], values, slow, *reaches, seed, written_out)
            else:
                body = pieces(self.codec, values)
            for piece in body:
                self.check_live()
                yield piece

    def promised(self, ours: Outgoing, me: str, shown: Callable[[], None]) -> Outgoing:
        """`ours`, the half of this node `me`, with the promise of its body if the caller's version has promises;
        `shown` is then called before the body leaves."""
        call = decode_head(ours.head, AverageHead) if self.ours else self.theirs
        assert call is not None
        if call.protocol < PROMISES:
            return ours

        def leaving() -> Iterable[bytes | memoryview]:
            shown()
            return ours.pieces()

        return replace(ours, promise=partial(self._promise, me), pieces=leaving)

    def _promise(self, me: str) -> bytes:
        hashed = hashlib.sha256()
        for piece in self.pieces(me):
            hashed.update(piece)
        return hashed.digest()

    def sink(self, theirs: AverageHead, arrived: Callable[..., None]) -> Sink:
        """The receiver of the partner's body, which follows the head `theirs`. `arrived` is called with the partner's
        fast weights, and its slow ones if those travel too."""
        with self._at_work():
            near = [self.copy.fast, self.copy.slow][: 1 + self.both]
            readers = [self._reader(vector, theirs) for vector in near]
        with self._lock:
            self.check_live()
            self.move(ExchangeEvent.ANSWER)
            self.theirs, self.readers = theirs, readers

        def write(piece: memoryview) -> None:
            with self._at_work():
                body = Readers(self.readers)
                body.write(piece)
                if len(piece) == body.size:
                    values = body.values()
                    lattices = [reader for reader in self.readers if isinstance(reader, LatticeReader)]
                    self.readers.clear()
                    if lattices:
                        self.apart = lattices[0].apart()
                        self.failed = torch.stack([reader.failed for reader in lattices]).any(0)
                    arrived(*values)

        return write

    def _reader(self, near: Tensor, theirs: AverageHead) -> Reader:
        if theirs.codec in BITS:
            return LatticeReader(BITS[theirs.codec], near, f"{self.seed} {self.partner}", theirs.written_out)
        return BodyDecoder(theirs.codec, len(near))

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Keep the tensors meanwhile. Raises RemoteProtocolError as `check_live`."""
        with self._lock:
            self.check_live()
            self._workers += 1
        try:
            yield
        finally:
            with self._lock:
                self._workers -= 1
                self._release()

    def _release(self) -> None:
        """Let go of tensors, and of errors, whose tracebacks hold tensors, once it is over and no worker uses them.
        Python's collector may find the exchange itself much later."""
        if self.state in OVER and not self._workers:
            self.copy = replace(self.copy, fast=torch.empty(0), slow=torch.empty(0))
            self.readers.clear()
            self.momentum = self.failed = self.refused = None


class ExchangeSlot:
    """The place for the one exchange that is under way. For any thread; `guard` joins several calls into one.

    me, timeout_s    this node's peer id, and the most seconds of an exchange
    woken            set when an exchange ends
    """

    def __init__(self, me: str, timeout_s: float, clock: Callable[[], float], woken: threading.Event) -> None:
        self.guard = threading.RLock()
        self.exchange: PairExchange | None = None
        self.failures: list[tuple[PairExchange, BaseException]] = []  # exchanges that failed and have not been counted
        self._me, self._timeout_s, self._clock, self._woken = me, timeout_s, clock, woken

    def give_up(self, why: str) -> None:
        """Drop the exchange, and count it as too slow."""
        with self.guard:
            assert self.exchange is not None
            self.failures.append((self.exchange, RemoteProtocolError("slow", why)))
            self._drop()

    def interrupt(self) -> None:
        """Drop what a leaving peer began, if anything: an exchange with the partner comes first."""
        with self.guard:
            exchange = self.exchange
            if exchange is not None and exchange.draining and not exchange.ours and exchange.live:
                self._drop()

    def make_way(self, peer: str) -> PairExchange | None:
        """This node's own call, if a call of `peer` takes its place. None if the slot is empty.

        Raises RemoteProtocolError: busy, or crossed if this node has called `peer` and its call counts."""
        with self.guard:
            mine = self.exchange
            if mine is None:
                return None
            if mine.live and self._clock() > mine.ends:
                self.give_up(f"more than {in_seconds(self._timeout_s)}")
                return None
            if not mine.ours or mine.partner != peer or not mine.live:
                raise RemoteProtocolError("busy", "another exchange is under way")
            if self._me < peer:
                raise RemoteProtocolError("crossed", "this node's call counts")
            return mine

    def put(self, exchange: PairExchange) -> None:
        """`exchange` begins. What was here is dropped."""
        with self.guard:
            if self.exchange is not None:
                self._drop()
            self.exchange = exchange

    def end(self, exchange: PairExchange, error: BaseException | None) -> None:
        """The transport reports the end of an exchange, which may have been dropped."""
        with self.guard:
            exchange.move(ExchangeEvent.ARRIVE if error is None else ExchangeEvent.FAIL)
            if error is not None and exchange.state is ExchangeState.FAILED:
                self.failures.append((exchange, error))
                if self.exchange is exchange:
                    self.exchange = None
        self._woken.set()

    def collect(self) -> tuple[PairExchange | None, list[tuple[PairExchange, BaseException]]]:
        """The exchange, if it is complete, and those that failed since the last call. Gives up one that is late."""
        with self.guard:
            exchange = self.exchange
            if exchange is not None and exchange.live:
                if self._clock() > exchange.ends + EXCHANGE_GRACE_S:  # the partner that called takes its time
                    self.give_up(f"more than {in_seconds(self._timeout_s)}")
                exchange = None
            failures, self.failures = self.failures, []
            return exchange, failures

    def finish(self) -> None:
        """A step boundary has dealt with the exchange that was complete."""
        with self.guard:
            assert self.exchange is not None
            self.exchange.move(ExchangeEvent.FINISH)
            self.exchange = None

    def _drop(self) -> None:
        assert self.exchange is not None
        self.exchange.move(ExchangeEvent.DROP)
        self.exchange = None


def check_head(head: AverageHead, size: int, values: int, both: bool, version: int) -> None:
    """Raises RemoteProtocolError unless `head` begins a pair's exchange of `values` weights in a body of `size` bytes.
    Both fast and slow weights travel if `both`. The sender's card says `version`: in an older one nothing is promised.
    """
    if head.protocol < version:
        raise RemoteProtocolError("schema", f"protocol {head.protocol}, where the card says {version}")
    if head.phase or head.group:
        raise RemoteProtocolError("schema", "not a pair's exchange")
    if head.codec not in PAIR_CODECS.values():
        raise RemoteProtocolError("codec", head.codec)
    if head.written_out > (most_written_out(values) if head.codec in BITS else 0):
        raise RemoteProtocolError("schema", f"{head.written_out} blocks written out")
    expected = body_size(head.codec, values, head.written_out, both)
    if size != expected:
        raise RemoteProtocolError("size", f"{size} bytes for {expected}")


def root_mean_square(a: Tensor, b: Tensor) -> float:
    return distance(a, b) / math.sqrt(len(a))


def body_size(codec: WeightCodec, values: int, written_out: int, both: bool) -> int:
    """Bytes of a body with `values` weights, twice if `both` fast and slow weights travel."""
    one = lattice_size(BITS[codec], values, written_out) if codec in BITS else coded_bytes(codec, values)
    return one * (1 + both)
