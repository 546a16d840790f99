"""The memory that exchanges of pairs hold, who waits for them, and which calls are answered."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from swarm_node.averaging import pair_averager as pairs
from swarm_node.averaging import pair_exchange
from swarm_node.averaging.averager import MUTED_AFTER
from swarm_node.averaging.codecs import Readers, coded_bytes, pieces
from swarm_node.averaging.outer_rounds import ATTEMPTS
from swarm_node.averaging.pair_averager import PairAverager
from swarm_node.averaging.pair_exchange import EXCHANGE_GRACE_S
from swarm_node.averaging.pairing import partner
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.messages import PROTOCOL_VERSION
from swarm_protocol.tensors import PROMISES, AverageHead, decode_head, encode_head
from swarm_protocol.transports.base import Accepted
from tests.support.averaging_cohort import COHORT, PERIOD_S, SWARM, Cohort


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Python's collector is off, and does not list older objects."""
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


def vectors(values: int) -> int:
    """Count float32 tensors with so many values or more, made since the collector is off; views count once."""
    tensors = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(size >= 4 * values for size in storages.values())


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(
    ("codec", "fault"),
    [("float32", ""), ("8bit", ""), ("4bit", ""), ("float32", "gates"), ("8bit", "gates"), ("4bit", "sink")],
)
def test_between_exchanges_there_are_slow_weights_and_momentum(
    codec: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last exchange may have ended in any way, and Python's collector is off."""

    def refuse(*arguments: object) -> None:
        raise RemoteProtocolError("gates", "refused")

    cohort = Cohort(2, codec=codec, clip=1.5, gates=True)
    averagers = [trainee.averager for trainee in cohort.trainees]
    for averager in averagers:
        if fault == "gates":
            monkeypatch.setattr(averager.robust, "check", refuse)
        elif fault == "sink":
            monkeypatch.setattr(averager, "_weigh", refuse)
    cohort.run(2.5 * PERIOD_S)
    for averager in averagers:
        averager.config = averager.config.model_copy(update={"every": 10**9})  # no more of them
    cohort.run(5.0)
    assert not any(averager.under_way() for averager in averagers)
    assert sum(averager.counts["skipped/gates" if fault else "exchanges"] for averager in averagers) >= 1
    assert vectors(730) == 2 * len(averagers)


def test_without_overlap_a_callee_waits_too() -> None:
    cohort = Cohort(2, overlap=False)
    waits = {trainee.number: 0 for trainee in cohort.trainees}

    def look() -> None:
        for trainee in cohort.trainees:
            assert isinstance(trainee.averager, PairAverager)
            exchange = trainee.averager.slot.exchange
            if exchange is not None and not exchange.ours and exchange.live:
                waits[trainee.number] += trainee.averager.waiting()
                assert trainee.averager.waiting()
        cohort.at(0.01, look)

    look()
    cohort.run(4 * PERIOD_S)
    assert sum(waits.values()) > 0


# --------------------------------------------------------------------- whom it answers, and how long


class Answering:
    """A member that makes steps when told to, and no calls. The other members do nothing by themselves."""

    def __init__(self, n: int = 2, me: int = 0, **options: Any) -> None:
        self.cohort = Cohort(n, every=1, **options)
        for trainee in self.cohort.trainees:
            trainee.dead = True
        averager = self.cohort.trainees[me].averager
        assert isinstance(averager, PairAverager)
        self.averager = averager
        averager._call = lambda round, now: None  # type: ignore[method-assign]
        self.updates = 0
        self.at(1010, 0.5)

    def at(self, round: int, part: float) -> None:
        """Let time pass until this part of a round, and make a step."""
        self.cohort.clock.run_until((round + part) * PERIOD_S)
        self.step()

    def step(self) -> None:
        self.updates += 1
        self.averager.step(self.updates)

    def called(self, round: int, peer: str = "", protocol: int = PROTOCOL_VERSION, draining: bool = False) -> Accepted:
        """Its partner of that round, or `peer`, calls it in round `round`."""
        size, me = len(self.averager.slow[0]), self.averager.place.peer_id
        peer = peer or partner(me, self.averager.transport.members(), round, COHORT) or ""
        head = AverageHead(protocol, SWARM, COHORT, peer, me, round, 0, draining=draining)
        return self.averager.accept(peer, encode_head(head), coded_bytes("float32", size))

    def refusal(self, round: int, peer: str = "", **changes: Any) -> str:
        with pytest.raises(RemoteProtocolError) as error:
            self.called(round, peer, **changes)
        return error.value.reason

    def body(self, value: float) -> Tensor:
        return torch.full_like(self.averager.slow[0], value)

    def exchange(self, round: int, peer: str = "") -> None:
        """A whole exchange."""
        send(self.called(round, peer), self.body(1.0)).done(None)
        self.step()

    @property
    def skipped(self) -> dict[str, int]:
        return {name: n for name, n in self.averager.counts.items() if name.startswith("skipped/")}


def send(call: Accepted, body: Tensor) -> Accepted:
    for piece in pieces("float32", body):
        call.sink(piece)
    return call


TORN = RemoteProtocolError("torn", "the end is missing")


def test_a_copy_outdated_by_another_exchange_is_refused() -> None:
    node = Answering()
    node.at(1020, 0.1)
    copy = node.averager.copies

    def meanwhile(fragments: Iterable[int]) -> list[Tensor]:
        node.averager.copies = copy  # type: ignore[method-assign]
        fast = copy(fragments)
        node.exchange(1019)
        return fast

    node.averager.copies = meanwhile  # type: ignore[method-assign]
    assert node.refusal(1020) == "busy"
    assert node.averager.counts["exchanges"] == 1
    node.exchange(1020)
    assert node.averager.counts["exchanges"] == 2


def test_an_exchange_given_up_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_exchange, "pieces", lambda codec, values: iter([memoryview(b"a"), memoryview(b"b")]))
    node = Answering(timeout_s=6.0, clip=1.5, gates=True)
    call, (piece,) = node.called(1010), pieces("float32", node.body(1.0))
    exchange, sent, known = node.averager.slot.exchange, iter(call.ours.pieces()), node.averager.robust.state()
    assert exchange is not None and next(sent) == b"a"
    call.sink(piece[:100])
    node.cohort.run(6.0 + EXCHANGE_GRACE_S + 0.1)
    assert len(exchange.copy.fast) == 730, "nobody noticed"
    node.step()
    assert not node.averager.under_way() and node.skipped == {"skipped/slow": 1}
    assert len(exchange.copy.fast) == len(exchange.copy.slow) == len(exchange.readers) == 0
    for go_on in (lambda: call.sink(piece[100:]), lambda: next(sent), lambda: next(iter(call.ours.pieces()))):
        with pytest.raises(RemoteProtocolError) as error:
            go_on()
        assert error.value.reason == "slow"
    call.done(None)
    node.step()
    assert node.averager.counts["exchanges"] == 0 and node.averager.robust.state() == known


def test_a_late_body_is_refused_without_a_step() -> None:
    node = Answering(timeout_s=6.0)
    call = node.called(1010)
    node.cohort.run(6.0 + EXCHANGE_GRACE_S + 0.1)
    with pytest.raises(RemoteProtocolError, match="slow"):
        send(call, node.body(1.0))


@pytest.mark.parametrize("during", ["write", "check"])
def test_an_exchange_given_up_during_work_is_forgotten(during: str, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Answering(timeout_s=6.0, clip=1.5)
    there: list[bool] = []

    def late(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            node.cohort.run(6.0 + EXCHANGE_GRACE_S + 0.1)
            node.step()
            there.append(exchange is not None and len(exchange.copy.fast) > 0)
            return function(*arguments)

        return called

    if during == "write":
        monkeypatch.setattr(Readers, "write", late(Readers.write))
    else:
        monkeypatch.setattr(node.averager.robust, "check", late(node.averager.robust.check))
    call = node.called(1010)
    exchange = node.averager.slot.exchange
    send(call, node.body(1.0))
    assert there == [True] and not node.averager.under_way()
    assert exchange is not None and exchange.momentum is None
    assert len(exchange.copy.fast) == len(exchange.copy.slow) == 0


def test_a_withheld_end_teaches_nothing() -> None:
    node = Answering(clip=1.5, gates=True)
    for round in range(1010, 1013):
        node.at(round, 0.5)
        node.exchange(round)
    node.at(1013, 0.5)
    known = node.averager.robust.state()
    for _ in range(ATTEMPTS - 1):
        send(node.called(1013), node.body(-50.0)).done(TORN)
        node.step()
    assert node.averager.robust.state() == known
    send(node.called(1013), node.body(-50.0)).done(None)
    node.step()
    assert node.averager.robust.state() != known


@pytest.mark.parametrize("leaving", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
def test_who_has_seen_a_body_promises_none_in_that_round(leaving: bool, at_once: bool) -> None:
    """It would know the weights for which it chooses its own, also before this node's next step counts the failure."""
    node = Answering()
    call = node.called(1010, draining=leaving)
    assert call.ours.promise is not None and call.ours.promise()
    assert next(iter(call.ours.pieces()))
    call.done(TORN)
    if not at_once:
        node.step()
    assert node.refusal(1010) == node.refusal(1010, draining=True) == "late"
    node.at(1011, 0.5)
    node.called(1011, draining=leaving)


def test_a_call_that_crosses_a_body_is_late() -> None:
    """The other way into the same round: it lets this node call, takes the body, and calls as well."""
    node, caller = Answering(me=1), "peer0"
    assert caller < node.averager.place.peer_id, "its call would count"
    mine = node.averager._exchange(1010, node.averager._copied(0), caller, ours=True)
    node.averager._begin(mine)
    half = node.averager._half(mine)
    mine.sink(decode_head(half.head, AverageHead), lambda *values: None)
    assert next(iter(half.pieces()))
    assert node.refusal(1010) == "late"
    assert node.averager.slot.exchange is mine, "which goes on"


def test_a_head_older_than_its_card_is_refused() -> None:
    """Else a peer would choose that nobody promises."""
    node = Answering()
    assert node.refusal(1010, protocol=PROMISES - 1) == "schema"


def test_failures_count_and_few_fit_a_round() -> None:
    node = Answering()
    raw = b"\0\0\xc0\x7f" * (coded_bytes("float32", 730) // 4)
    for _ in range(ATTEMPTS):
        call = node.called(1010)
        with pytest.raises(RemoteProtocolError) as error:
            call.sink(memoryview(raw))
        call.done(error.value)
    assert node.refusal(1010) == "late"
    node.step()
    assert node.skipped == {"skipped/values": ATTEMPTS}
    assert ATTEMPTS >= MUTED_AFTER and any("for an hour" in said for said in node.cohort.trainees[0].said)


@pytest.mark.parametrize(("attempts", "late"), [(ATTEMPTS - 1, False), (ATTEMPTS, True)])
def test_attempts_are_remembered_into_the_next_round(attempts: int, late: bool) -> None:
    """By a partner's clock it may still be round 1010."""
    node = Answering()
    for _ in range(attempts):
        node.called(1010).done(TORN)
        node.step()
    node.at(1011, 0.05)
    if late:
        assert node.refusal(1010) == "late"
    else:
        node.called(1010)


def test_training_waits_once_for_each_round() -> None:
    node = Answering(timeout_s=4.0, overlap=False)
    call = node.called(1010)
    node.cohort.run(3.0)
    assert node.averager.waiting()
    call.done(TORN)
    node.step()
    assert not node.averager.waiting()
    node.called(1010)
    assert node.averager.waiting()
    node.cohort.run(1.5)
    assert node.averager.under_way() and not node.averager.waiting()
    node.at(1012, 0.5)
    node.called(1012)
    assert node.averager.waiting(), "for the next one again"


def test_other_rounds_are_answered_at_their_boundary_only() -> None:
    node = Answering(n=6)
    assert [node.refusal(1010 + k) for k in (-2, -1, 1, 2)] == ["round", "round", "early", "round"]
    node.at(1010, 0.9)
    node.exchange(1011)
    node.step()
    assert node.refusal(1011) == "late"
    node.exchange(1010)
    assert node.averager.counts["exchanges"] == 2
    node.at(1011, 0.1)
    node.step()
    assert [node.refusal(1010 + k) for k in (-1, 0, 1)] == ["round", "late", "late"]


def test_a_call_costs_no_more_than_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairing a thousand peers takes tens of milliseconds."""
    asked: list[int] = []

    def counting(me: str, peers: tuple[str, ...], round: int, *rest: Any) -> str:
        asked.append(round)
        return "peer1"

    monkeypatch.setattr(pairs, "partner", counting)
    node = Answering(n=3)
    assert node.refusal(1010, "stranger") == "partner" and not asked
    assert [node.refusal(1010, "peer2") for _ in range(3)] == ["partner"] * 3 and asked == [1010]
    node.exchange(1010, "peer1")
    node.at(1011, 0.5)
    node.called(1011, "peer1")
    assert asked == [1010, 1011]
