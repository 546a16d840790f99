"""States of a pair's exchange: each legal and illegal move, its memory, and the slot for one exchange at a time."""

from __future__ import annotations

import threading
from itertools import product

import pytest
import torch

from swarm_node.averaging.codecs import pieces
from swarm_node.averaging.pair_exchange import (
    EXCHANGE_GRACE_S,
    LIVE,
    OVER,
    TRANSITIONS,
    ExchangeEvent,
    ExchangeSlot,
    ExchangeState,
    FragmentCopy,
    PairExchange,
)
from swarm_protocol.errors import LocalProtocolError, RemoteProtocolError
from swarm_protocol.messages import PROTOCOL_VERSION
from swarm_protocol.tensors import AverageHead

HEAD = AverageHead(PROTOCOL_VERSION, "a" * 64, "c" * 16, "peer2", "peer1", 7, 0)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def exchange(partner: str = "peer2", ours: bool = True, draining: bool = False) -> PairExchange:
    copy = FragmentCopy(0, torch.ones(100), torch.zeros(100), 1.0, torch.zeros(0, dtype=torch.int64), 5, 0, 0)
    return PairExchange(7, partner, ours, copy, "float32", False, "seed", 160.0, Clock(), draining)


def in_state(state: ExchangeState) -> PairExchange:
    """An exchange that got there by legal moves."""
    found, reached = {ExchangeState.WAITING: list[ExchangeEvent]()}, [ExchangeState.WAITING]
    for known in reached:
        for event, then in TRANSITIONS[known].items():
            if then not in found:
                found[then] = [*found[known], event]
                reached.append(then)
    one = exchange()
    for event in found[state]:
        one.move(event)
    return one


@pytest.mark.parametrize(("state", "event"), list(product(ExchangeState, ExchangeEvent)), ids=lambda x: x.name)
def test_moves_are_those_of_the_table(state: ExchangeState, event: ExchangeEvent) -> None:
    one = in_state(state)
    if event in TRANSITIONS[state]:
        one.move(event)
        assert one.state is TRANSITIONS[state][event]
    else:
        with pytest.raises(LocalProtocolError, match=f"state {state.name} takes no {event.name}"):
            one.move(event)
        assert one.state is state


def test_the_table_names_every_state() -> None:
    assert set(TRANSITIONS) == set(ExchangeState) == LIVE | OVER | {ExchangeState.COMPLETE}
    for state in OVER:
        assert set(TRANSITIONS[state].values()) <= {state}, "nothing brings it back"


@pytest.mark.parametrize("state", list(ExchangeState), ids=lambda state: state.name)
def test_only_ended_exchanges_let_go_of_tensors(state: ExchangeState) -> None:
    assert (len(in_state(state).copy.fast) == 0) == (state in OVER)


@pytest.mark.parametrize("state", list(ExchangeState), ids=lambda state: state.name)
def test_bodies_are_taken_from_live_exchanges_only(state: ExchangeState) -> None:
    one = in_state(state)
    if state in LIVE:
        one.check_live()
        one.clock.now = 160.0 + EXCHANGE_GRACE_S + 0.1  # type: ignore[attr-defined]
    with pytest.raises(RemoteProtocolError, match="slow"):
        one.check_live()


def test_a_body_that_has_arrived_is_handed_on_once() -> None:
    one, arrived = exchange(), list[torch.Tensor]()
    sink = one.sink(HEAD, arrived.append)
    assert one.state is ExchangeState.TRAVELLING
    for piece in pieces("float32", torch.full((100,), 3.0)):
        sink(piece[:40])
        assert not arrived
        sink(piece[40:])
    assert len(arrived) == 1 and torch.equal(arrived[0], torch.full((100,), 3.0)) and not one.readers


def test_an_exchange_dropped_at_work_keeps_tensors_until_then() -> None:
    one = exchange()

    def arrived(fast: torch.Tensor) -> None:
        one.move(ExchangeEvent.DROP)
        assert len(one.copy.fast) == 100

    sink = one.sink(HEAD, arrived)
    for piece in pieces("float32", torch.zeros(100)):
        sink(piece)
    assert len(one.copy.fast) == 0


# --------------------------------------------------------------------- one at a time


def slot(me: str = "peer1") -> ExchangeSlot:
    return ExchangeSlot(me, 60.0, Clock(), threading.Event())


def test_a_lower_peer_id_takes_the_place_of_a_crossing_call() -> None:
    here = slot("peer3")
    here.put(exchange("peer2"))
    assert here.make_way("peer2") is here.exchange
    here = slot("peer1")
    here.put(exchange("peer2"))
    with pytest.raises(RemoteProtocolError, match="crossed"):
        here.make_way("peer2")
    with pytest.raises(RemoteProtocolError, match="busy"):
        here.make_way("peer4")


@pytest.mark.parametrize(
    ("ours", "draining", "stays"), [(True, True, True), (False, False, True), (False, True, False)]
)
def test_only_a_leaving_peers_exchange_is_interrupted(ours: bool, draining: bool, stays: bool) -> None:
    here, one = slot(), exchange(ours=ours, draining=draining)
    here.put(one)
    here.interrupt()
    assert (here.exchange is one) == stays == one.live and not here.failures


def test_a_failure_after_a_drop_counts_once() -> None:
    here, one = slot(), exchange()
    here.put(one)
    here.give_up("late")
    here.end(one, RemoteProtocolError("torn", ""))
    complete, failures = here.collect()
    assert complete is None and [str(error) for _, error in failures] == ["slow: late"]
    assert here.exchange is None and one.state is ExchangeState.DROPPED


def test_a_complete_exchange_is_collected_and_finished() -> None:
    here, one = slot(), exchange()
    here.put(one)
    assert here.collect() == (None, [])
    one.move(ExchangeEvent.ANSWER)
    here.end(one, None)
    assert here.collect() == (one, [])
    here.finish()
    assert here.exchange is None and one.state is ExchangeState.FINISHED
