"""NoLoCo over a real network: one peer of the cohort at a time, no collective, no barrier (arXiv 2506.10911).

    outer round = floor(Unix time / period)      fragment = round mod F      partner = pairing(cohort, round)

    step boundary, `every` updates since the fragment was last exchanged -> copy it, call the partner
    a partner calls, likewise due                                        -> copy it, answer
    both bodies whole -> checks, new momentum -> both know -> next step boundary: weights += difference

Nobody negotiates: both compute the pair alone, and a call that does not fit the callee's own view is refused, so that
differing views cost a round, never a wrong pair. A callee answers in the middle of its own round, so that slow peers
take part. When both call at once, the lower peer id's call counts. An exchange that did not end well teaches nothing
about the partner; after three of a partner's calls that did not, the round is over for it.

A node that leaves asks one after the other, its partner first, until somebody has taken part in an exchange of what it
has learned since the last one. Each node does so for one peer in each round, and for each peer once an hour; its own
call, or its partner's, breaks off what a leaving peer began.

What does not touch weights is done on the transport's worker threads, while training goes on. Beside the weights, their
slow copy and momentum, an exchange takes twice the memory of its fragment: our copy and the partner's values, in which
everything after that is worked out in place.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from protocol.errors import ProtocolError, RemoteProtocolError
from protocol.peers import is_relayed
from protocol.tensors import AVERAGE_METHOD, AverageHead, Codec, decode_head
from protocol.transports.base import Accepted, Outgoing, Sink
from protocol.transports.transfer import reason_of
from swarm_node.averaging.averager import CONTENTS, Averager, readable
from swarm_node.averaging.codecs import Decoder, Reader, Readers, encoded_size, pieces
from swarm_node.averaging.lattice_codec import (
    LatticeReader,
    block_count,
    lattice_pieces,
    lattice_size,
    most_written_out,
)
from swarm_node.averaging.outer_optimizer import NoLoCo
from swarm_node.averaging.pairing import partner
from swarm_node.averaging.robust import Verdict, chunks, distance, square
from swarm_node.errors import CheckpointError, UserError

CODECS: dict[str, Codec] = {"float32": "float32", "8bit": "lattice8", "4bit": "lattice4"}
BITS: dict[Codec, int] = {"lattice8": 8, "lattice4": 4}
AGAIN = 0.05
"""A partner that was busy or could not be reached is called again this part of a round later."""
EARLY_AGAIN = 0.25
"""Likewise one that was not due, which will call when it is: each call costs a copy of the weights."""
FINAL = frozenset(
    {"partner", "cohort", "version", "schema", "size", "late", "round", "fragment", "codec", "diverged", "fault"}
    | {"replaced", *CONTENTS}
)
"""What ends a round's attempts: asking again would not help."""
GRACE_S = 5.0
"""The transport gives up our own calls by itself, about when they end."""
CLOCKS_S = 5.0
"""Clocks may differ by as much, or by a quarter of the period if that is less."""
MOST_ASKED = 8
"""In vain, by a node that leaves."""
BUSY_S = 0.25
"""After who was busy, the next is asked."""
ANSWER_S = 1.0, 10.0
"""Shortest and longest that a node which leaves waits for an answer before it asks the next; a third of its time."""
DRAIN_EXCHANGE_S = 15.0
"""Longest that an exchange with a peer that leaves may take, here; or a quarter of the round."""
LEFT_S = 3600.0
"""Between two exchanges of a fragment with a peer that leaves: nobody's weights count much more by saying so."""
ATTEMPTS = 3
"""Calls of a partner that are accepted in one round, if they come to nothing: each costs a copy of the weights."""
FARTHEST = 1e18
"""Weights that went so far (root mean square) since the last exchange are not worth averaging."""


@dataclass(eq=False)
class _Exchange:
    """One exchange, from the copy of our weights to the outer step."""

    round: int
    fragment: int
    partner: str
    updates: int
    """Of ours when the copy was made."""
    fast: Tensor
    """The copy."""
    slow: Tensor
    """Slow weights at that time."""
    reach: float
    """How far the copy may be from the partner's, as far as we can tell."""
    written_out: Tensor
    """Numbers of the blocks that could not be read the last time."""
    ends: float
    """When it is given up."""
    ours: bool
    """We called."""
    draining: bool = False
    """Who called leaves."""
    replaced: int = 0
    """How often weights had been replaced."""
    generation: int = 0
    """How often those of this fragment had been averaged."""
    theirs: AverageHead | None = None
    answer_by: float = field(default=math.inf, init=False)
    """When the next is asked, by a node that leaves."""
    readers: list[Reader] = field(default_factory=list, init=False)
    """What reads the partner's body: its fast weights, and slow ones if they travel."""
    apart: float = field(default=0.0, init=False)
    """Root mean square distance to the partner."""
    momentum: Tensor | None = field(default=None, init=False)
    """The new one, once the partner's body is there and has passed all checks."""
    verdict: Verdict = field(default_factory=Verdict, init=False)
    failed: Tensor | None = field(default=None, init=False)
    """Blocks of the partner's body that could not be read, bool."""
    refused: RemoteProtocolError | UserError | None = field(default=None, init=False)
    """Why there is no new momentum. The partner is not told, so that both remember each other, whoever is quicker."""
    done: bool = field(default=False, init=False)
    dropped: bool = field(default=False, init=False)
    """Nobody here waits for its end any more."""
    workers: int = field(default=0, init=False)
    """Of the transport, that have to do with it right now."""

    def drop(self) -> None:
        self.dropped = True
        if not self.workers:  # else the last of them will forget
            self.forget()

    def forget(self) -> None:
        """Let go of what is large, or holds it by its traceback: this may be held itself, by one, until Python's next
        great collection."""
        self.fast = self.slow = torch.empty(0)
        self.readers.clear()
        self.momentum = self.failed = self.refused = None


class PairAverager(Averager):
    """Averages with one partner in each outer round."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.config
        self.outer = NoLoCo(config.alpha, config.beta, config.gamma)
        self._codec = CODECS[config.codec]
        self._apart = [0.0] * config.fragments
        """Root mean square distance to the last partner, of each fragment."""
        self._failed_blocks = [torch.zeros(block_count(size), dtype=torch.bool) for size in self.fragments.sizes]
        self._both = config.gamma != config.beta
        """Slow weights travel as well."""
        self._updates = 0
        self._generations = [0] * config.fragments
        """How often each fragment was averaged: exchanges begun before are of no use after."""
        self._partners = lru_cache(maxsize=4)(partner)
        self._guard = threading.Lock()
        """Of the four below: `accept` and ends of exchanges come on other threads."""
        self.exchange: _Exchange | None = None
        """The exchange that is under way, if any."""
        self._failures: list[tuple[_Exchange, BaseException]] = []
        """Exchanges that failed, and have not been counted."""
        self._accepted: Counter[tuple[int, str, int]] = Counter()
        """Calls, by round, peer and, of those that leave, fragment (else -1)."""
        self._waits: dict[int, float] = {}
        """Round -> until when training waits for exchanges of it."""
        self._settled: set[int] = set()
        """Rounds in which an exchange came about, or need not be tried again."""
        self._tried: dict[int, tuple[str, str]] = {}
        """Round -> why it did not come about, and with whom, as long as it has not."""
        self._call_at = 0.0
        self._draining = False
        self._answer_s = 0.0
        self._asked: set[str] = set()
        """Since it leaves, in vain."""
        self._busy: dict[str, float] = {}
        """Those of the cohort who were busy -> when."""
        self._left: dict[tuple[str, int], float] = {}
        """Who has left and which fragment it handed over -> when."""
        self._parted: dict[int, str] = {}
        """Round -> who has left in it."""
        self.transport.accept(AVERAGE_METHOD, self.counted(self.accept))

    # ----------------------------------------------------------------- for training

    def step(self, updates: int) -> None:
        self._updates = updates
        self._look()
        self._finish()
        now = self.now()
        round = math.floor(now / self.place.period_s)
        for over in sorted(r for r in self._tried if r < round):
            reason, peer = self._tried.pop(over)
            self.skip(reason, peer=peer)
        with self._guard:
            self._settled = {r for r in self._settled if r >= round - 1}
            self._accepted = Counter({call: n for call, n in self._accepted.items() if call[0] >= round - 1})
            self._waits = {r: end for r, end in self._waits.items() if r >= round - 1 or now < end}
            self._parted = {r: peer for r, peer in self._parted.items() if r >= round - 1}
            self._left = {handed: at for handed, at in self._left.items() if now - at < LEFT_S}
            if self._own_turn(round) and now >= self._call_at:
                self._break_off()
            mine = self.exchange
            if mine is not None and mine.ours and mine.theirs is None and now > mine.answer_by:
                self._give_up(mine, f"no answer within {self._answer_s:.1f} s")
            idle = self.exchange is None
        if idle and self._own_turn(round) and now >= self._call_at:
            self._call(round, now)
        with self._guard:
            idle = self.exchange is None
        if self._draining and idle and now >= max(self._busy.values(), default=0.0) + BUSY_S:
            self._hand_over(round)

    def drain(self, seconds: float) -> None:
        self._draining = True
        self._answer_s = min(max(ANSWER_S[0], seconds / 3), ANSWER_S[1])
        with self._guard:
            if self.exchange is not None:
                self.exchange.answer_by = self.now() + self._answer_s

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, numbers = super().state_dict()
        return tensors, numbers | {"apart": list(self._apart)}

    def load_state_dict(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        with readable():
            apart = [float(distance) for distance in numbers["apart"]]
        if len(apart) != self.config.fragments or not all(0 <= distance <= FARTHEST for distance in apart):
            raise CheckpointError("its averaging state has no distances to partners that can be")
        super().load_state_dict(tensors, numbers)
        self._apart = apart

    def waiting(self) -> bool:
        if self.config.overlap:
            return False
        with self._guard:
            return self.exchange is not None and self.now() < self._waits.get(self.exchange.round, 0.0)

    def under_way(self) -> bool:
        with self._guard:
            if self.exchange is not None or self._failures:  # of the latter `step` has yet to hear
                return True
        return self._draining and bool(self._learned() and self._heirs())

    # ----------------------------------------------------------------- a round

    def _fragment(self, round: int) -> int:
        return round % self.config.fragments

    def _due(self, round: int) -> bool:
        return self._updates - self._exchanged_at[self._fragment(round)] >= self.config.every

    def _own_turn(self, round: int) -> bool:
        """Whether there is an exchange with this round's partner to come."""
        return round not in self._settled and self._due(round)

    def _break_off(self) -> None:
        """What a peer that leaves began here; with `_guard` held."""
        mine = self.exchange
        if mine is not None and mine.draining and not mine.ours and not mine.done:
            self.exchange = None
            mine.drop()

    def _partner(self, round: int) -> str | None:
        """Of this node in that round, as far as it knows the cohort."""
        members = self.transport.members()
        hidden = {peer for peer, card in members.items() if all(map(is_relayed, card.addresses))}
        if all(map(is_relayed, self.transport.addresses)):
            hidden.add(self.place.peer_id)
        return self._partners(self.place.peer_id, tuple(self._cohort()), round, self.place.cohort, frozenset(hidden))

    def _call(self, round: int, now: float) -> None:
        """Call this round's partner, if there is one."""
        peer = self._partner(round)
        if peer is None:
            self._settle(round)
            self.skip("odd" if self._cohort() else "alone")
            return
        fragment = self._fragment(round)
        try:
            exchange = self._exchange(round, fragment, peer, ours=True)
        except RemoteProtocolError as error:
            self._settle(round)
            self.skip(error.reason, error.detail, peer)
            return
        self._call_at = now + AGAIN * self.place.period_s
        self._ask(exchange)

    def _hand_over(self, round: int) -> None:
        """Ask the next of the cohort to take part in an exchange of what was learned since the last one."""
        learned, heirs = self._learned(), self._heirs()
        if not learned or not heirs:
            return
        mine, partner, members = self.place.peer_id, self._partner(round), self.transport.members()

        def last(peer: str) -> tuple[float, ...]:
            relayed = peer in members and all(map(is_relayed, members[peer].addresses))
            return self._busy.get(peer, 0.0), peer != partner, relayed, peer < mine  # so not all ask the same one

        peer = min(heirs, key=last)
        try:
            exchange = self._exchange(round, learned[0], peer, ours=True, draining=True)
        except RemoteProtocolError as error:
            self._draining = False
            self.skip(error.reason, error.detail, peer, then="what was learned since the last one stays here")
        else:
            self._ask(exchange)

    def _learned(self) -> list[int]:
        """Fragments with updates since they were last exchanged."""
        return [i for i, updates in enumerate(self._exchanged_at) if updates < self._updates]

    def _heirs(self) -> list[str]:
        """Whom a node that leaves may yet ask."""
        if len(self._asked) >= MOST_ASKED:
            return []
        return [peer for peer in self._cohort() if peer not in self._asked]

    def _ask(self, exchange: _Exchange) -> None:
        if self._draining:
            exchange.answer_by = self.now() + self._answer_s
        with self._guard:
            if self.exchange is not None:  # it was quicker
                exchange.forget()
                return
            self._begin(exchange)
        peer = exchange.partner
        answered = self.counted(partial(self._answered, exchange))
        timeout = self.config.timeout_s
        future = self.transport.exchange(peer, AVERAGE_METHOD, self._half(exchange), answered, timeout)
        future.add_done_callback(partial(self._called, exchange))

    def _answered(self, exchange: _Exchange, head: bytes, size: int) -> Sink:
        """The partner takes part."""
        theirs = decode_head(head, AverageHead)
        self._check(theirs, exchange.partner, size)
        if (theirs.round, theirs.fragment) != (exchange.round, exchange.fragment):
            raise RemoteProtocolError("round", f"answer of round {theirs.round} to a call of round {exchange.round}")
        return self._sink(exchange, theirs)

    def _called(self, exchange: _Exchange, future: Future[None]) -> None:
        self._end(exchange, CancelledError() if future.cancelled() else future.exception())

    def accept(self, peer: str, head: bytes, size: int) -> Accepted:
        """A peer calls: take part if it is whom we would call in this round, and we are due as well; or if it leaves,
        and is the first that does."""
        theirs = decode_head(head, AverageHead)
        self._check(theirs, peer, size)
        round, fragment = theirs.round, theirs.fragment
        self._is_now(round)
        self._not_over(theirs, peer)
        if theirs.draining:
            if peer not in self._cohort():
                raise RemoteProtocolError("partner", "not of this node's cohort")
        else:
            if fragment != self._fragment(round):
                raise RemoteProtocolError("fragment", f"{fragment} in round {round}")
            if not self._due(round):
                raise RemoteProtocolError("early", "not enough updates since the last exchange")
            # A stranger is not worth the work of pairing.
            if peer not in self._cohort() or self._partner(round) != peer:
                raise RemoteProtocolError("partner", f"another is this node's in round {round}")
        with self._guard:
            if not theirs.draining:
                self._break_off()
            mine = self._make_way(peer)
            exchange = None
            if mine is not None and (mine.round, mine.fragment) == (round, fragment) and self._fits(mine):
                exchange = replace(mine, ours=False, draining=theirs.draining)  # one copy serves both calls
        if exchange is None:
            exchange = self._exchange(round, fragment, peer, ours=False, draining=theirs.draining)
        sink = self._sink(exchange, theirs)
        try:
            with self._guard:
                mine = self._make_way(peer)
                self._not_over(theirs, peer)
                if not self._fits(exchange):
                    raise RemoteProtocolError("busy", "weights were averaged, or replaced, meanwhile")
                if mine is not None:
                    mine.drop()
                self._accepted[round, peer, fragment if theirs.draining else -1] += 1
                self._begin(exchange)
        except RemoteProtocolError:
            exchange.forget()
            raise
        return Accepted(self._half(exchange), sink, partial(self._end, exchange))

    def _not_over(self, call: AverageHead, peer: str) -> None:
        """Raises RemoteProtocolError if no call such as this is accepted in its round any more."""
        round, now = call.round, self.now()
        if self._accepted[round, peer, call.fragment if call.draining else -1] >= ATTEMPTS:
            raise RemoteProtocolError("late", f"round {round} is over")
        if not call.draining:
            if round in self._settled:
                raise RemoteProtocolError("late", f"round {round} is over")
            return
        if self._draining or self._parted.get(round, peer) != peer:
            raise RemoteProtocolError("late", "this node leaves as well, or another has handed it its weights")
        if now - self._left.get((peer, call.fragment), -math.inf) < LEFT_S:
            raise RemoteProtocolError("late", "this peer has left within the last hour")

    def _is_now(self, round: int) -> None:
        """Raises RemoteProtocolError unless it may be the present round by the caller's clock: early (it is the next
        one), round."""
        now, period = self.now(), self.place.period_s
        may_differ = min(CLOCKS_S, period / 4)
        if not math.floor((now - may_differ) / period) <= round <= math.floor((now + may_differ) / period):
            if round == math.floor(now / period) + 1:
                raise RemoteProtocolError("early", f"round {round} has not begun")
            raise RemoteProtocolError("round", f"round {round} is not now")

    def _make_way(self, peer: str) -> _Exchange | None:
        """Our own call, if a call of `peer` takes its place. Raises RemoteProtocolError unless it may take the place of
        what is under way."""
        mine = self.exchange
        if mine is not None and not mine.done and self.now() > mine.ends:
            self._give_up(mine)
            mine = None
        if mine is None:
            return None
        if not mine.ours or mine.partner != peer or mine.done:
            raise RemoteProtocolError("busy", "another exchange is under way")
        if self.place.peer_id < peer:
            raise RemoteProtocolError("crossed", "this node's call counts")
        return mine

    def _exchange(self, round: int, fragment: int, peer: str, ours: bool, draining: bool = False) -> _Exchange:
        """RemoteProtocolError: busy; diverged if there is nothing here that anybody would want. On a worker thread,
        weights may be averaged meanwhile: whether it `_fits` shows when it begins."""
        updates, replaced, generation = self._updates, self.replaced, self._generations[fragment]
        fast, slow = self._copy(fragment), self.slow[fragment]
        reach = max(_root_mean_square(fast, slow), self._apart[fragment])
        if not reach <= FARTHEST:
            raise RemoteProtocolError("diverged", "this node's weights are not finite, or went very far")
        failed = self._failed_blocks[fragment] if self._codec in BITS else torch.zeros(0, dtype=torch.bool)
        written_out = failed.nonzero()[: most_written_out(len(fast)), 0]
        ends = self.now() + self.config.timeout_s
        if draining and not ours:
            ends = min(ends, self.now() + min(DRAIN_EXCHANGE_S, self.place.period_s / 4))
        return _Exchange(
            round, fragment, peer, updates, fast, slow, reach, written_out, ends, ours, draining, replaced, generation
        )

    def _fits(self, exchange: _Exchange) -> bool:
        """Its copy and our slow weights are still those that belong together."""
        return (exchange.replaced, exchange.generation) == (self.replaced, self._generations[exchange.fragment])

    def _begin(self, exchange: _Exchange) -> None:
        """With `_guard` held."""
        self.exchange = exchange
        if not exchange.draining:
            self._waits.setdefault(exchange.round, exchange.ends)

    def _half(self, exchange: _Exchange) -> Outgoing:
        """Our half of an exchange."""
        return self._sealed(
            exchange.partner,
            self._codec,
            self._size(self._codec, exchange.fragment, len(exchange.written_out)),
            partial(self._pieces, exchange),
            round=exchange.round,
            fragment=exchange.fragment,
            reach=exchange.reach,
            written_out=len(exchange.written_out),
            version=exchange.updates,
            draining=exchange.draining and exchange.ours,
        )

    def _pieces(self, exchange: _Exchange) -> Iterator[memoryview]:
        """Our body; the partner's head is known by now."""
        assert exchange.theirs is not None
        codec, reach, theirs = self._codec, exchange.reach, exchange.theirs.reach
        seed, written_out = self._seed(exchange, self.place.peer_id), exchange.written_out
        with self._at_work(exchange):
            fast, slow = exchange.fast, exchange.slow
        for values in [fast, slow][: 1 + self._both]:
            if codec == "float32":
                body = pieces(codec, values)
            else:
                body = lattice_pieces(BITS[codec], values, slow, reach, theirs, seed, written_out)
            for piece in body:
                self._in_time(exchange)
                yield piece

    def _seed(self, exchange: _Exchange, writer: str) -> str:
        return f"{self.place.cohort} {exchange.round} {exchange.fragment} {writer}"

    def _sink(self, exchange: _Exchange, theirs: AverageHead) -> Sink:
        """Where the partner's body goes."""
        codec, written_out = theirs.codec, theirs.written_out
        seed = self._seed(exchange, exchange.partner)
        with self._at_work(exchange):
            exchange.theirs = theirs
            exchange.readers = [
                Decoder(codec, len(near)) if codec == "float32" else LatticeReader(BITS[codec], near, seed, written_out)
                for near in [exchange.fast, exchange.slow][: 1 + self._both]
            ]

        def write(piece: memoryview) -> None:
            with self._at_work(exchange):
                readers = Readers(exchange.readers)
                readers.write(piece)
                if len(piece) == readers.size:
                    self._weigh(exchange, *readers.values())

        return write

    def _in_time(self, exchange: _Exchange) -> None:
        """Raises RemoteProtocolError `slow` if it has been given up: the transport would run one that we answer on for
        hours."""
        if exchange.dropped or self.now() > exchange.ends + GRACE_S:
            raise RemoteProtocolError("slow", "the exchange was given up")

    @contextmanager
    def _at_work(self, exchange: _Exchange) -> Iterator[None]:
        """What is large stays there meanwhile. Raises as `_in_time`."""
        with self._guard:
            self._in_time(exchange)
            exchange.workers += 1
        try:
            yield
        finally:
            with self._guard:
                exchange.workers -= 1
                if exchange.dropped and not exchange.workers:
                    exchange.forget()

    def _weigh(self, exchange: _Exchange, partner_fast: Tensor, partner_slow: Tensor | None = None) -> None:
        """Check what came, and work out our new momentum in its place; on a worker thread."""
        fragment, fast, slow = exchange.fragment, exchange.fast, exchange.slow
        lattices = [reader for reader in exchange.readers if isinstance(reader, LatticeReader)]
        exchange.readers.clear()
        apart = lattices[0].apart() if lattices else None
        if lattices:
            exchange.failed = torch.stack([reader.failed() for reader in lattices]).any(0)
        try:
            exchange.verdict = self.robust.check(fragment, fast, slow, partner_fast, partner_slow)
            if exchange.verdict.refused:
                raise RemoteProtocolError("gates", exchange.verdict.refused)
            if self._reducer is not None:
                apart = _root_mean_square(partner_fast, fast) if apart is None else apart
                mean = self._reducer(fast, partner_fast[None])
                torch.lerp(fast, mean, 2.0, out=partner_fast)  # the partner with whom the mean would be that
        except (RemoteProtocolError, UserError) as error:  # the latter ends the run, from the main thread
            exchange.refused = error.with_traceback(None)
            return
        squares = 0.0
        theirs = [partner_fast, *([] if partner_slow is None else [partner_slow])]
        for start, momentum, mine, *parts in chunks(slow, self.momentum[fragment], fast, *theirs):
            squares += square(parts[0] - mine)
            moved = momentum.clone()
            self.outer.turn(start, moved, mine, *parts)
            parts[0].copy_(moved)
        believed = math.sqrt(squares / len(fast))
        if apart is None:
            exchange.apart = believed
        else:  # what was cut off says nothing of how far honest ones are
            exchange.apart = min(apart, believed) if self.config.clip else apart
        exchange.momentum = partner_fast

    def _size(self, codec: Codec, fragment: int, written_out: int) -> int:
        """Bytes of a body."""
        values = self.fragments.sizes[fragment]
        if codec in BITS:
            return lattice_size(BITS[codec], values, written_out) * (1 + self._both)
        return encoded_size(codec, values) * (1 + self._both)

    def _check(self, head: AverageHead, peer: str, size: int) -> None:
        """Raises RemoteProtocolError unless `head` is of a pair's exchange between us, of a body of the right size."""
        self._belongs(head, peer)
        if head.phase or head.group:
            raise RemoteProtocolError("schema", "not a pair's exchange")
        if head.codec not in CODECS.values():
            raise RemoteProtocolError("codec", head.codec)
        if head.written_out > (most_written_out(self.fragments.sizes[head.fragment]) if head.codec in BITS else 0):
            raise RemoteProtocolError("schema", f"{head.written_out} blocks written out")
        expected = self._size(head.codec, head.fragment, head.written_out)
        if size != expected:
            raise RemoteProtocolError("size", f"{size} bytes for {expected}")

    # ----------------------------------------------------------------- the end of an exchange

    def _end(self, exchange: _Exchange, error: BaseException | None) -> None:
        """It is over, on whichever thread."""
        with self._guard:
            exchange.done = True
            if error is not None and not exchange.dropped:
                self._failures.append((exchange, error))
                if self.exchange is exchange:
                    self.exchange = None
            if error is not None or exchange.dropped:
                exchange.forget()
        self.woken.set()

    def _give_up(self, exchange: _Exchange, why: str = "") -> None:
        """What is under way; with `_guard` held."""
        self.exchange = None
        why = why or f"more than {self.config.timeout_s:g} s"
        self._failures.append((exchange, RemoteProtocolError("slow", why)))
        exchange.drop()

    def _finish(self) -> None:
        """Count what has failed, and step the outer optimiser with what has arrived, if anything has."""
        with self._guard:
            exchange = self.exchange
            if exchange is not None and not exchange.done:
                if self.now() > exchange.ends + GRACE_S:  # a partner that we answer takes its time
                    self._give_up(exchange)
                exchange = None
            failures, self._failures = self._failures, []
        for failed, error in failures:
            if not isinstance(error, ProtocolError | CancelledError):
                raise error
            self._failed(failed, *reason_of(error))
        if exchange is None:
            return
        try:
            if not exchange.draining:  # what is usual is learned from those whose turn it is
                if exchange.failed is not None:
                    self._failed_blocks[exchange.fragment] = exchange.failed
                self.robust.remember(exchange.fragment, exchange.verdict)
            if exchange.refused is not None:
                raise exchange.refused
            if not self._fits(exchange):
                raise RemoteProtocolError("replaced", "this node went on with other weights meanwhile")
            self._average(exchange)
        except RemoteProtocolError as error:
            self._failed(exchange, *reason_of(error))
        finally:
            with self._guard:
                self.exchange = None
            exchange.forget()

    def _average(self, exchange: _Exchange) -> None:
        """The outer step. Raises RemoteProtocolError, with nothing changed, if the probe says no."""
        fragment, slow, momentum, difference = exchange.fragment, exchange.slow, exchange.momentum, exchange.fast
        assert momentum is not None
        for start, moved, fast in chunks(slow, momentum, difference):
            torch.sub(start + moved, fast, out=fast)
        if not self._apply(fragment, difference):
            raise RemoteProtocolError("probe", "this node's own best answers became less likely")
        slow.add_(momentum)
        self.momentum[fragment] = momentum
        if exchange.ours or not exchange.draining:  # the round of who takes over what another leaves is not over
            self._exchanged_at[fragment] = exchange.updates
            self._settle(exchange.round)
        self._generations[fragment] += 1  # last: whoever reads this number, and what it copies after that, has all
        if exchange.draining and not exchange.ours:
            self._parted[exchange.round] = exchange.partner
            self._left[exchange.partner, fragment] = self.now()
        if not exchange.draining:
            self.spread = self._apart[fragment] = exchange.apart
            self.robust.accept(fragment, exchange.verdict)
        self._went_well(exchange.partner)

    def _failed(self, exchange: _Exchange, reason: str, detail: str) -> None:
        """Nothing was applied. What may yet come about in this round is tried again."""
        if exchange.draining:
            if exchange.ours and reason == "busy":
                self._busy[exchange.partner] = self.now()
            elif exchange.ours:
                self._asked.add(exchange.partner)
                self.skip(reason, detail, exchange.partner, then="somebody else is asked")
            else:
                self.skip(reason, detail, exchange.partner, then="it leaves")
        elif reason in FINAL:
            self._settle(exchange.round)
            self.skip(reason, detail, exchange.partner)
        else:
            self._tried[exchange.round] = reason, exchange.partner
            if reason == "early":
                self._call_at = self.now() + EARLY_AGAIN * self.place.period_s

    def _settle(self, round: int) -> None:
        self._settled.add(round)
        self._tried.pop(round, None)


def _root_mean_square(a: Tensor, b: Tensor) -> float:
    """Of their difference."""
    return distance(a, b) / math.sqrt(len(a))
