"""NoLoCo over a real network: this node averages with one peer of its cohort at a time (arXiv 2506.10911).

    outer round = floor(Unix time / period)      fragment = round mod F      partner = pairing(cohort, round)

    step boundary, `every` updates since the fragment was last exchanged -> copy it, call the partner
    a partner calls, and the fragment is due here too                    -> copy it, answer
    both bodies arrived whole -> checks, new momentum -> next step boundary: weights += difference

Nobody negotiates. Both peers compute the pair alone, and a call that does not fit the callee's view is refused. So
differing views cost a round, but never cause a wrong pair. A callee answers in the middle of its own round, so that
slow peers take part. When both peers call at once, the call of the lower peer id counts. Each promises its body before
it gets the other's, so none can be made for its receiver; that takes a second pass over the encoding.

Besides the weights, their slow copy and the momentum, an exchange needs twice the memory of its fragment: this node's
copy, and the partner's values, which the new momentum overwrites.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import CancelledError
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from swarm_node.averaging.averager import Averager, readable
from swarm_node.averaging.lattice_codec import block_count, most_written_out
from swarm_node.averaging.outer_rounds import Drain, OuterRounds
from swarm_node.averaging.outer_step import NoLoCo, slow_minus_fast
from swarm_node.averaging.pair_exchange import (
    PAIR_CODECS,
    ExchangeEvent,
    ExchangeSlot,
    ExchangeState,
    FragmentCopy,
    PairExchange,
    body_size,
    check_head,
    root_mean_square,
)
from swarm_node.averaging.pairing import only_relayed, partner
from swarm_node.errors import CheckpointError, UserError
from swarm_protocol.codec import version_for
from swarm_protocol.errors import ProtocolError, RemoteProtocolError, in_seconds
from swarm_protocol.peers import is_relayed
from swarm_protocol.tensors import AVERAGE_METHOD, AverageHead
from swarm_protocol.transports.base import Accepted, Outgoing, Sink
from swarm_protocol.transports.transfer import reason_of

FARTHEST = 1e18
"""Weights that moved further than this (root mean square) since the last exchange are not worth averaging."""
DRAIN_EXCHANGE_S = 15.0
"""Longest exchange with a leaving peer, for the node that stays, or a quarter of the round if that is less."""


class PairAverager(Averager):
    """Averages with one partner in each outer round."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.config
        self.outer = NoLoCo(config.alpha, config.beta, config.gamma)
        self._codec = PAIR_CODECS[config.codec]
        self._both = config.gamma != config.beta  # slow weights travel as well
        self._apart = [0.0] * config.fragments  # root mean square distance to the last partner, of each fragment
        self._failed_blocks = [torch.zeros(block_count(size), dtype=torch.bool) for size in self.fragments.sizes]
        self._updates = 0
        self._generations = [0] * config.fragments
        """How often each fragment was averaged: an exchange that began before is of no use after."""
        self._partners = lru_cache(maxsize=4)(partner)
        self._drain = Drain()
        self.slot = ExchangeSlot(self.place.peer_id, config.timeout_s, self.now, self.woken)
        self._rounds = OuterRounds(self.place.period_s)
        self.transport.accept(AVERAGE_METHOD, self.counted()(self.accept))

    # ----------------------------------------------------------------- for training

    def step(self, updates: int) -> None:
        self._updates = updates
        self.roster.look(self._members(), self.now())
        self._finish()
        now = self.now()
        round = self._rounds.at(now)
        with self.slot.guard:
            failed = self._rounds.forget(now)
            due = self._due(round) and self._rounds.may_call(round, now)
            if due:
                self.slot.interrupt()
            exchange = self.slot.exchange
            if exchange is not None and exchange.state is ExchangeState.WAITING and now > exchange.answer_by:
                self.slot.give_up(f"no answer within {in_seconds(self._drain.answer_s)}")
        for reason, peer in failed:
            self.skip(reason, peer=peer)
        if due and self.slot.exchange is None:
            self._call(round, now)
        if self.slot.exchange is None and self._drain.ready(now):
            self._pass_on(round)

    def drain(self, seconds: float) -> None:
        self._drain.begin(seconds)
        with self.slot.guard:
            if self.slot.exchange is not None:
                self.slot.exchange.answer_by = self.now() + self._drain.answer_s

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, numbers = super().state_dict()
        return tensors, numbers | {"apart": list(self._apart)}

    def load_state_dict(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        with readable():
            apart = [float(distance) for distance in numbers["apart"]]
        if len(apart) != self.config.fragments or not all(0 <= distance <= FARTHEST for distance in apart):
            raise CheckpointError("the averaging state has impossible distances to partners")
        super().load_state_dict(tensors, numbers)
        self._apart = apart

    def waiting(self) -> bool:
        exchange = None if self.config.overlap else self.slot.exchange
        return exchange is not None and self._rounds.waits(exchange.round, self.now())

    def under_way(self) -> bool:
        with self.slot.guard:
            if self.slot.exchange is not None or self.slot.failures:  # `step` has yet to count the latter
                return True
        return self._drain.active and bool(self._learned() and self._drain.candidates(self._cohort()))

    # ----------------------------------------------------------------- calling

    def _fragment(self, round: int) -> int:
        return round % self.config.fragments

    def _due(self, round: int) -> bool:
        return self._updates - self._exchanged_at[self._fragment(round)] >= self.config.every

    def _learned(self) -> list[int]:
        """Fragments with updates since they were last exchanged."""
        return [i for i, updates in enumerate(self._exchanged_at) if updates < self._updates]

    def _partner(self, round: int) -> str | None:
        """This node's partner in a round, by its own view of the cohort."""
        me, hidden = self.place.peer_id, only_relayed(self.transport.members())
        if all(map(is_relayed, self.transport.addresses)):
            hidden.add(me)
        return self._partners(me, tuple(self._cohort()), round, self.place.cohort, frozenset(hidden))

    def _call(self, round: int, now: float) -> None:
        peer = self._partner(round)
        if peer is None:
            self._rounds.settle(round)
            self.skip("odd" if self._cohort() else "alone")
            return
        try:
            exchange = self._exchange(round, self._copied(self._fragment(round)), peer, ours=True)
        except RemoteProtocolError as error:
            self._rounds.settle(round)
            self.skip(error.reason, error.detail, peer)
            return
        self._rounds.call(now)
        self._ask(exchange)

    def _pass_on(self, round: int) -> None:
        """Ask the next peer to take part in an exchange of what this node, which is leaving, has learned."""
        learned, candidates = self._learned(), self._drain.candidates(self._cohort())
        if not learned or not candidates:
            return
        relayed = only_relayed(self.transport.members())
        peer = self._drain.choose(candidates, self.place.peer_id, self._partner(round), relayed)
        try:
            exchange = self._exchange(round, self._copied(learned[0]), peer, ours=True, draining=True)
        except RemoteProtocolError as error:
            self._drain.active = False
            self.skip(error.reason, error.detail, peer, then="what was learned since the last exchange stays here")
        else:
            self._ask(exchange)

    def _ask(self, exchange: PairExchange) -> None:
        if self._drain.active:
            exchange.answer_by = self.now() + self._drain.answer_s
        with self.slot.guard:
            if self.slot.exchange is not None:  # a peer has called in the meantime
                exchange.move(ExchangeEvent.DROP)
                return
            self._begin(exchange)
        answered, ended = partial(self._answered, exchange), partial(self.slot.end, exchange)
        self._call_peer(exchange.partner, self._half(exchange), answered, ended)

    def _answered(self, exchange: PairExchange, head: bytes, size: int) -> Sink:
        theirs = self._checked(exchange.partner, head, size)
        if (theirs.round, theirs.fragment) != (exchange.round, exchange.copy.fragment):
            raise RemoteProtocolError("round", f"answer of round {theirs.round} to a call of round {exchange.round}")
        return exchange.sink(theirs, partial(self._weigh, exchange))

    # ----------------------------------------------------------------- answering

    def accept(self, peer: str, head: bytes, size: int) -> Accepted:
        """Take part in an exchange that `peer` calls for. Raises RemoteProtocolError unless it is this round's partner
        and the fragment is due here, or it is the round's first leaving peer."""
        theirs = self._checked(peer, head, size)
        round, fragment = theirs.round, theirs.fragment
        self._rounds.check_present(round, self.now())
        self._check_open(theirs, peer)
        if theirs.draining:
            if peer not in self._cohort():
                raise RemoteProtocolError("partner", "not of this node's cohort")
        else:
            self._check_turn(theirs, peer)
        with self.slot.guard:
            if not theirs.draining:
                self.slot.interrupt()
            mine = self.slot.make_way(peer)
            copy = mine.copy if mine is not None and mine.round == round and mine.copy.fragment == fragment else None
        if copy is None or not self._fits(copy):  # else one copy serves both calls
            copy = self._copied(fragment)
        exchange = self._exchange(round, copy, peer, ours=False, draining=theirs.draining)
        sink = exchange.sink(theirs, partial(self._weigh, exchange))
        try:
            with self.slot.guard:
                self.slot.make_way(peer)
                self._check_open(theirs, peer)
                if not self._fits(copy):
                    raise RemoteProtocolError("busy", "weights were averaged, or replaced, meanwhile")
                self._rounds.accept(theirs, peer)
                self._begin(exchange)
        except RemoteProtocolError:
            exchange.move(ExchangeEvent.DROP)
            raise
        return Accepted(self._half(exchange), sink, partial(self.slot.end, exchange))

    def _checked(self, peer: str, data: bytes, size: int) -> AverageHead:
        """The head that `peer` sent. Raises RemoteProtocolError unless it begins a pair's exchange, of `size` bytes."""
        head = self._head_of(peer, data)
        version = version_for(peer, self.transport.members())
        check_head(head, size, self.fragments.sizes[head.fragment], self._both, version)
        return head

    def _check_turn(self, call: AverageHead, peer: str) -> None:
        """Raises RemoteProtocolError unless `peer` is this round's partner, and the round's fragment is due here."""
        if call.fragment != self._fragment(call.round):
            raise RemoteProtocolError("fragment", f"{call.fragment} in round {call.round}")
        if not self._due(call.round):
            raise RemoteProtocolError("early", "not enough updates since the last exchange")
        if peer not in self._cohort() or self._partner(call.round) != peer:  # a stranger is not worth pairing
            raise RemoteProtocolError("partner", f"another is this node's in round {call.round}")

    def _check_open(self, call: AverageHead, peer: str) -> None:
        """Raises RemoteProtocolError `late` if no such call is accepted in its round any more."""
        self._rounds.check_open(call, peer, self.now())
        if call.draining and self._drain.active:
            raise RemoteProtocolError("late", "this node is leaving as well")

    def _copied(self, fragment: int) -> FragmentCopy:
        """This node's fragment as of now. Raises RemoteProtocolError: busy, or diverged if no peer would want it."""
        counts = self._updates, self.replaced, self._generations[fragment]  # read before the copy is made: see `_fits`
        (fast,), slow = self.copies([fragment]), self.slow[fragment]
        reach = max(root_mean_square(fast, slow), self._apart[fragment])
        if not reach <= FARTHEST:
            raise RemoteProtocolError("diverged", "this node's weights are not finite, or went very far")
        written_out = self._failed_blocks[fragment].nonzero()[: most_written_out(len(fast)), 0]
        return FragmentCopy(fragment, fast, slow, reach, written_out, *counts)

    def _fits(self, copy: FragmentCopy) -> bool:
        """Whether this node's slow weights are still those of the copy. On another thread they may have changed."""
        return (copy.replaced, copy.generation) == (self.replaced, self._generations[copy.fragment])

    def _exchange(self, round: int, copy: FragmentCopy, peer: str, ours: bool, draining: bool = False) -> PairExchange:
        most_s = min(DRAIN_EXCHANGE_S, self.place.period_s / 4) if draining and not ours else math.inf
        seed, ends = f"{self.place.cohort} {round} {copy.fragment}", self.now() + min(self.config.timeout_s, most_s)
        return PairExchange(round, peer, ours, copy, self._codec, self._both, seed, ends, self.now, draining)

    def _begin(self, exchange: PairExchange) -> None:
        self.slot.put(exchange)
        if not exchange.draining:
            self._rounds.begin(exchange.round, exchange.ends)

    def _half(self, exchange: PairExchange) -> Outgoing:
        copy, me = exchange.copy, self.place.peer_id
        size = body_size(self._codec, self.fragments.sizes[copy.fragment], len(copy.written_out), self._both)
        ours = self._outgoing(exchange.partner, self._codec, size, partial(exchange.pieces, me), **exchange.head())
        return exchange.promised(ours, me, partial(self._rounds.show, exchange.round, copy.fragment, exchange.partner))

    def _weigh(self, exchange: PairExchange, theirs: Tensor, their_slow: Tensor | None = None) -> None:
        """Check the partner's weights, which have arrived, and compute the new momentum in their place."""
        copy, apart = exchange.copy, exchange.apart
        try:
            exchange.verdict = self.robust.check(copy.fragment, copy.fast, copy.slow, theirs, their_slow)
            if exchange.verdict.refused:
                raise RemoteProtocolError("gates", exchange.verdict.refused)
            if self._reducer is not None:
                apart = root_mean_square(theirs, copy.fast) if apart is None else apart
                mean = self._reducer(copy.fast, theirs[None])
                torch.lerp(copy.fast, mean, 2.0, out=theirs)  # the partner with whom the plain mean is `mean`
        except (RemoteProtocolError, UserError) as error:  # the latter ends the run, from the main thread
            exchange.refused = error.with_traceback(None)
            return
        clipped = self.outer.momentum_in_place(copy.slow, self.momentum[copy.fragment], copy.fast, theirs, their_slow)
        if apart is None or self.robust.clip:  # what was clipped off says nothing about the distance of honest peers
            apart = clipped if apart is None else min(apart, clipped)
        exchange.apart, exchange.momentum = apart, theirs

    def _finish(self) -> None:
        """Count failed exchanges, and take the outer step if an exchange is complete."""
        exchange, failures = self.slot.collect()
        for failed, error in failures:
            if not isinstance(error, ProtocolError | CancelledError):
                raise error
            self._failed(failed, *reason_of(error))
        if exchange is None:
            return
        try:
            if not exchange.draining:  # what is usual is learned from partners only
                if exchange.failed is not None:
                    self._failed_blocks[exchange.copy.fragment] = exchange.failed
                self.robust.remember(exchange.copy.fragment, exchange.verdict)
            if exchange.refused is not None:
                raise exchange.refused
            if not self._fits(exchange.copy):
                raise RemoteProtocolError("replaced", "this node went on with other weights meanwhile")
            self._average(exchange)
        except RemoteProtocolError as error:
            self._failed(exchange, *reason_of(error))
        finally:
            self.slot.finish()

    def _average(self, exchange: PairExchange) -> None:
        """Take the outer step. Raises RemoteProtocolError `probe`, with nothing changed, if the probe refuses it."""
        copy, momentum = exchange.copy, exchange.momentum
        fragment, helped = copy.fragment, exchange.draining and not exchange.ours
        assert momentum is not None and exchange.apart is not None
        slow_minus_fast(copy.slow, momentum, copy.fast)
        part, cheap, _ = self._apply(fragment, copy.fast, exchange.partner)
        if part < 1.0:  # the slow weights go with the fast ones, as if the partner had been nearer
            momentum.sub_(self.fragments.moved(fragment, copy.fast), alpha=(1 / part - 1) / (1 - self.config.mixing))
        copy.slow.add_(momentum)
        self.momentum[fragment] = momentum
        if not helped:  # an exchange with a leaving peer leaves this node's own turn as it was
            self._exchanged_at[fragment] = copy.updates
            self._rounds.average(exchange.round, fragment, exchange.partner)
        self._generations[fragment] += 1  # last: a thread that reads this number copies all of the above afterwards
        if helped:
            self._rounds.drained(exchange.round, fragment, exchange.partner, self.now())
        if not exchange.draining:
            self.spread = self._apart[fragment] = exchange.apart
            self.robust.accept(fragment, exchange.verdict, cheap)
        self._went_well(exchange.partner)

    def _failed(self, exchange: PairExchange, reason: str, detail: str) -> None:
        """Nothing was applied. It is tried again in this round if that may help."""
        peer = exchange.partner
        if exchange.draining and exchange.ours:
            if self._drain.failed(peer, reason, self.now()):
                self.skip(reason, detail, peer, then=self._drain.then(self._cohort()))
        elif exchange.draining:
            self.skip(reason, detail, peer, then="that peer is leaving")
        elif self._rounds.fail(exchange.round, exchange.copy.fragment, reason, peer, self.now()):
            self.skip(reason, detail, peer)
