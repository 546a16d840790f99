"""Weights of stages travel from peers that hold them to peers that need them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor

from swarm_node.pipeline.recovery.weight_transfer import (
    AT_ONCE,
    MAX_ASKS,
    OTHER_CREW_PAUSE_S,
    PER_PEER,
    StageWeights,
    Wanted,
    WeightTransfer,
    _Copy,
    ordered,
)
from swarm_protocol.errors import ProtocolError, RemoteProtocolError
from swarm_protocol.messages import PROTOCOL_VERSION
from swarm_protocol.tensors import KEEP_METHOD, STATE_METHOD, KeepHead, StateHead, encode_head
from swarm_protocol.transports.base import Accepted, Acceptor, Outgoing
from swarm_protocol.transports.memory import MemoryNetwork, VirtualClock

SWARM, ARCHITECTURE = "ab" * 32, "cd" * 8


def weights(first: int, end: int, rest: bool = False, seed: int = 0) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    state = {f"model.layers.{i}.{part}": torch.randn(5, 3, generator=rng) for i in range(first, end) for part in "ba"}
    return state | ({"model.embed.weight": torch.randn(7, 3, generator=rng)} if rest else {})


class Crew:
    """Peers a, b, c … on a virtual clock."""

    def __init__(self, count: int = 2) -> None:
        self.clock = VirtualClock()
        network = MemoryNetwork(self.clock, seed=0)
        self.transports = []
        self.doors: list[dict[str, Acceptor]] = [{} for _ in range(count)]
        """How each peer answers calls, by their method."""
        for i in range(count):
            known = [address for one in self.transports for address in one.addresses]
            self.transports.append(network.join("abcdef"[i], SWARM, bootstrap=known))
            self.transports[i].accept = partial(self.accept, i, self.transports[i].accept)  # type: ignore[method-assign]
        self.strangers: set[str] = set()
        self.guests: set[str] = set()
        self.shelves: dict[int, Mapping[str, Tensor]] = {}
        """Stages that are kept for a peer that leaves, and their shapes."""
        self.shelved: list[int] = []
        """Peers that have told the crew of a stage that they keep."""
        self.room = 0
        self.peers = [
            WeightTransfer(
                transport,
                (SWARM, ARCHITECTURE),
                self.allowed,
                lambda peer: peer not in self.guests,
                self.shelf,
                lambda i=i: self.shelved.append(i),  # type: ignore[misc]
                lambda: self.room,
                self.clock.now,
            )
            for i, transport in enumerate(self.transports)
        ]
        self.clock.run_until(20.0)

    def accept(self, i: int, accept: Callable[[str, Acceptor], None], method: str, acceptor: Acceptor) -> None:
        self.doors[i][method] = acceptor
        accept(method, acceptor)

    def allowed(self, peer: str, stage: int) -> bool:
        return peer not in self.strangers

    def shelf(self, peer: str, stage: int) -> Mapping[str, Tensor]:
        if peer in self.strangers or stage not in self.shelves:
            raise RemoteProtocolError("stranger", f"stage {stage}")
        return self.shelves[stage]

    def offer(self, i: int, j: int, stage: int, updates: int) -> int | str:
        """Updates of peer j's copy when peer i asks it to keep a stage, or why it refuses; its fetch then arrives."""
        offered = self.peers[i].offer(self.id(j), stage, updates, 30.0)
        self.clock.run_until(self.clock.now() + 60)
        error = offered.exception(0)
        return offered.result(0) if error is None else getattr(error, "reason", str(error))

    def hold(self, i: int, stage: int, tensors: Mapping[str, Tensor], updates: int = 1, omega: float = 0.0) -> None:
        self.peers[i].hold(stage, lambda: StageWeights(tensors, updates, omega), nullcontext)

    def id(self, i: int) -> str:
        return self.transports[i].peer_id

    def fetched(self, fetch: Future[StageWeights]) -> StageWeights:
        self.clock.run_until(self.clock.now() + 60)
        return fetch.result(0)

    def why_not(self, fetch: Future[StageWeights]) -> str:
        self.clock.run_until(self.clock.now() + 60)
        with pytest.raises(ProtocolError) as caught:
            fetch.result(0)
        return caught.value.reason if isinstance(caught.value, RemoteProtocolError) else type(caught.value).__name__


def test_a_neighbours_layers_arrive_as_they_are() -> None:
    crew, theirs = Crew(), weights(2, 5, rest=True)
    crew.hold(0, 1, theirs, 7, 0.5)
    state = crew.fetched(crew.peers[1].fetch(crew.id(0), Wanted(1, 3, 5, rest=False), weights(2, 5)))
    assert state.updates == 7 and state.omega == 0.5
    assert list(state.tensors) == [f"model.layers.{i}.{part}" for i in (3, 4) for part in "ab"]
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in state.tensors.items())


def test_tensors_are_ordered_by_layer_then_name() -> None:
    names = weights(9, 11, rest=True)
    assert ordered(names, Wanted(0, 0, 99, rest=True)) == [
        *("model.layers.9.a", "model.layers.9.b", "model.layers.10.a", "model.layers.10.b"),
        "model.embed.weight",
    ]


def test_a_replica_survives_the_one_it_is_of() -> None:
    crew, live = Crew(3), weights(0, 2, rest=True)
    crew.hold(0, 0, live, 3, 0.1)
    before = {name: tensor.clone() for name, tensor in live.items()}
    crew.peers[1].keep(0, crew.id(0), live)
    crew.clock.run_until(crew.clock.now() + 60)
    for tensor in live.values():
        tensor.add_(1)
    crew.transports[0].close()
    state = crew.fetched(crew.peers[2].fetch(crew.id(1), Wanted(0, 0, 2, rest=True, replica=True), live))
    assert state.updates == 3 and all(torch.equal(state.tensors[name], before[name]) for name in live)


def test_a_replica_may_hold_embedding_or_head_alone() -> None:
    crew, live = Crew(), weights(0, 2, rest=True)
    crew.hold(0, 0, live, 3, 0.1)
    crew.peers[1].keep(0, crew.id(0), {"model.embed.weight": live["model.embed.weight"]})
    crew.clock.run_until(crew.clock.now() + 60)
    assert list(crew.peers[1].replicas[0].tensors) == ["model.embed.weight"]
    state = crew.fetched(crew.peers[1].fetch(crew.id(0), Wanted(0, 0, 2, rest=True), live))
    assert state.tensors.keys() == live.keys()


def test_weights_are_given_as_between_two_updates() -> None:
    crew, live = Crew(), weights(0, 2, rest=True)
    lock, seen = threading.Lock(), []

    @contextmanager
    def still() -> Iterator[None]:
        with lock:
            live["model.layers.0.a"].fill_(1.0)  # what was under way is done
            seen.append("copied")
            yield

    def state() -> StageWeights:
        return StageWeights(live, 3 + lock.locked(), 0.1)

    live["model.layers.0.a"].fill_(0.5)
    crew.peers[0].hold(0, state, still)
    fetch = crew.peers[1].fetch(crew.id(0), Wanted(0, 0, 2, rest=True), live)
    while not seen:
        crew.clock.run_until(crew.clock.now() + 0.01)
    for tensor in live.values():  # an update, as the bytes leave
        tensor.fill_(7.0)
    state_ = crew.fetched(fetch)
    assert state_.updates == 4 and bool((state_.tensors["model.layers.0.a"] == 1.0).all())
    assert not any(bool((tensor == 7.0).any()) for tensor in state_.tensors.values())


def test_strangers_get_nothing() -> None:
    crew, live = Crew(), weights(0, 1)
    crew.hold(0, 0, live)
    crew.peers[0].replicas[1] = StageWeights(live, 1, 0.0)
    crew.strangers.add(crew.id(1))
    assert crew.why_not(crew.peers[1].fetch(crew.id(0), Wanted(0, 0, 1, rest=False), live)) == "stranger"
    assert crew.why_not(crew.peers[1].fetch(crew.id(0), Wanted(1, 0, 1, False, replica=True), live)) == "stranger"
    assert crew.transports[0].stats()["rejected/stranger"] == 2


def test_replicas_no_longer_kept_are_forgotten() -> None:
    crew, live = Crew(), weights(0, 1)
    for stage in range(2):  # more at once are too many for one peer
        crew.hold(0, stage, live)
        crew.peers[1].keep(stage, crew.id(0), live)
    crew.clock.run_until(crew.clock.now() + 60)
    assert crew.peers[1].replicas.keys() == {0, 1}
    crew.peers[1].keep(0, crew.id(0), live)  # still on its way
    crew.peers[1].forget([1])
    crew.clock.run_until(crew.clock.now() + 60)
    assert crew.peers[1].replicas.keys() == {1}


def test_a_stages_new_holder_drops_its_replica() -> None:
    crew, live = Crew(), weights(0, 1)
    crew.hold(0, 0, live, 1, 0.0)
    crew.peers[1].keep(0, crew.id(0), live)
    crew.clock.run_until(crew.clock.now() + 60)
    assert 0 in crew.peers[1].replicas
    crew.hold(1, 0, live, 1, 0.0)
    assert crew.peers[1].replicas == {}


def test_absent_stages_and_other_crews_are_refused() -> None:
    crew, live = Crew(), weights(0, 1)
    assert crew.why_not(crew.peers[1].fetch(crew.id(0), Wanted(0, 0, 1, rest=False), live)) == "stage"
    crew.hold(0, 0, live, 1, 0.0)
    assert crew.why_not(crew.peers[1].fetch(crew.id(0), Wanted(0, 0, 1, False, replica=True), live)) == "stage"
    crew.peers[1].place = SWARM, "ef" * 8
    assert crew.why_not(crew.peers[1].fetch(crew.id(0), Wanted(0, 0, 1, rest=False), live)) == "crew"


def test_misshapen_and_non_finite_weights_are_refused() -> None:
    crew, live = Crew(), weights(0, 2)
    crew.hold(0, 0, live, 1, 0.0)
    assert crew.why_not(crew.peers[1].fetch(crew.id(0), Wanted(0, 0, 2, rest=False), weights(0, 1))) == "size"
    live["model.layers.0.a"][0, 0] = torch.nan
    assert crew.why_not(crew.peers[1].fetch(crew.id(0), Wanted(0, 0, 2, rest=False), live)) == "nonfinite"


def test_an_answer_about_another_stage_is_refused() -> None:
    crew, live = Crew(), weights(0, 1)
    head = encode_head(StateHead(PROTOCOL_VERSION, SWARM, ARCHITECTURE, 5, False, 0, 1, False))
    ours = Outgoing(head, 120, lambda: [bytes(120)])
    crew.transports[0].accept(STATE_METHOD, lambda peer, head, size: Accepted(ours, print, lambda error: None))
    assert crew.why_not(crew.peers[1].fetch(crew.id(0), Wanted(0, 0, 1, rest=False), live)) == "stage"


WHOLE = Wanted(0, 0, 2, rest=True)


def call(crew: Crew, peer: str, wanted: Wanted = WHOLE) -> Accepted:
    """The answer of peer 0, with nothing taken yet."""
    place = wanted.stage, wanted.replica, wanted.first, wanted.end, wanted.rest
    return crew.doors[0][STATE_METHOD](peer, encode_head(StateHead(PROTOCOL_VERSION, SWARM, ARCHITECTURE, *place)), 0)


def copies() -> list[_Copy]:
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is _Copy]


def test_requests_between_two_updates_share_one_copy() -> None:
    crew, live = Crew(), weights(0, 2, rest=True)
    crew.hold(0, 0, live, 3)
    calls = [call(crew, f"p{i}") for i in range(4)] + [call(crew, "p4", Wanted(0, 0, 1, rest=False))]
    (copy,) = copies()
    pieces = [b"".join(one.ours.pieces()) for one in calls]
    assert len(set(pieces[:4])) == 1 and pieces[0].startswith(pieces[4])
    live["model.layers.1.a"].add_(1.0)  # others' weights, by averaging
    calls.append(call(crew, "p5"))
    assert len(copies()) == 2 and b"".join(calls[-1].ours.pieces()) != pieces[0]
    crew.hold(0, 0, live, 4)
    calls.append(call(crew, "p6"))
    assert len(copies()) == 3
    for one in calls:
        one.done(None)
    del calls, one, copy
    assert copies() == []


def test_only_the_wanted_part_is_copied() -> None:
    crew, live = Crew(), weights(0, 2, rest=True)
    crew.hold(0, 0, live, 3)
    one = call(crew, "p0", Wanted(0, 0, 0, rest=True))
    (copy,) = copies()
    assert copy.tensors.keys() == {"model.embed.weight"}
    another = call(crew, "p1")
    assert copy.tensors.keys() == live.keys() and len(copies()) == 1
    assert b"".join(another.ours.pieces()).endswith(b"".join(one.ours.pieces()))


def test_few_are_given_weights_at_a_time() -> None:
    crew, live = Crew(), weights(0, 2, rest=True)
    crew.hold(0, 0, live, 3)
    calls = [call(crew, "p0") for _ in range(PER_PEER)]
    with pytest.raises(RemoteProtocolError, match="busy"):
        call(crew, "p0")
    calls += [call(crew, f"p{i}") for i in range(1, AT_ONCE - 1)]
    with pytest.raises(RemoteProtocolError, match="busy"):
        call(crew, "another")
    calls.pop().done(RemoteProtocolError("torn", "gone"))
    call(crew, "another")


def test_peers_of_other_crews_take_turns() -> None:
    crew, live = Crew(), weights(0, 2, rest=True)
    crew.hold(0, 0, live, 3)
    crew.guests |= {"g", "h"}
    first = call(crew, "g")
    for peer in ("g", "h"):
        with pytest.raises(RemoteProtocolError, match="busy"):
            call(crew, peer)
    for i in range(AT_ONCE):
        call(crew, f"p{i}")
    first.done(None)
    with pytest.raises(RemoteProtocolError, match="busy"):
        call(crew, "g")
    call(crew, "h").done(None)
    crew.clock.run_until(crew.clock.now() + OTHER_CREW_PAUSE_S + 1)
    call(crew, "g")


def test_a_slow_taker_of_weights_is_cut_off() -> None:
    crew, live = Crew(), {"model.layers.0.a": torch.zeros(2**20), "model.layers.0.b": torch.zeros(2**18)}
    crew.hold(0, 0, live, 3)
    pieces = iter(call(crew, "p0").ours.pieces())
    begin, size = crew.clock.now(), 0
    with pytest.raises(RemoteProtocolError, match="slow"):
        while True:
            size += len(next(pieces))
            crew.clock.run_until(crew.clock.now() + 15.0)
    assert size == 3 * 2**20 and crew.clock.now() - begin == pytest.approx(45.0)  # 8 s each would do
    pieces = iter(call(crew, "p0").ours.pieces())
    for _ in range(5):
        next(pieces)
        crew.clock.run_until(crew.clock.now() + 10.0)


def test_a_call_that_fails_takes_nobodys_place() -> None:
    crew = Crew()
    for _ in range(2 * AT_ONCE):
        with pytest.raises(RemoteProtocolError, match="not here"):
            call(crew, "p0")


# --------------------------------------------------------------------- keeping for who leaves


def test_a_keeper_asks_once_for_a_leavers_stage() -> None:
    crew, live = Crew(), weights(0, 2, rest=True)
    crew.hold(0, 3, live, 7, 0.5)
    crew.shelves[3] = live
    assert crew.offer(0, 1, 3, 7) == 0 and crew.shelved == []  # it is asked for
    replica = crew.peers[1].replicas[3]
    assert replica.updates == 7 and all(torch.equal(replica.tensors[name], live[name]) for name in live)
    assert crew.offer(0, 1, 3, 7) == crew.offer(0, 1, 3, 7) == 7 and crew.shelved == [1]
    assert crew.peers[1].replicas[3] is replica
    crew.hold(0, 3, live, 8)  # it has stayed for another update
    assert crew.offer(0, 1, 3, 8) == 7 and crew.offer(0, 1, 3, 8) == 8


def test_a_whole_copy_as_new_is_enough() -> None:
    crew, live = Crew(), weights(0, 2, rest=True)
    crew.hold(0, 3, live, 7)
    crew.shelves[3] = live
    crew.peers[1].keep(3, crew.id(0), {"model.embed.weight": live["model.embed.weight"]})
    crew.clock.run_until(crew.clock.now() + 60)
    assert crew.peers[1].replicas[3].updates == 7 and crew.offer(0, 1, 3, 7) == 0
    replica = crew.peers[1].replicas[3]
    assert replica.tensors.keys() == live.keys() and crew.offer(0, 1, 3, 7) == 7
    crew.peers[1].replicas[3] = StageWeights(dict(live), 9, 0.0)
    assert crew.offer(0, 1, 3, 8) == 9 and crew.shelved == [1, 1]


def test_a_replica_on_its_way_is_waited_for() -> None:
    crew, live = Crew(), weights(0, 2, rest=True)
    crew.hold(0, 3, live, 7)
    crew.shelves[3] = live
    fetched: list[str] = []
    answers = crew.doors[0][STATE_METHOD]
    crew.transports[0].accept(STATE_METHOD, lambda peer, *call: (fetched.append(peer), answers(peer, *call))[1])
    crew.peers[1].keep(3, crew.id(0), live)
    assert crew.offer(0, 1, 3, 7) == 0
    assert crew.offer(0, 1, 3, 7) == 7 and fetched == [crew.id(1)]


def test_a_stage_is_kept_for_its_holder_alone() -> None:
    crew, live = Crew(), weights(0, 1)
    crew.hold(0, 3, live, 7)
    assert crew.offer(0, 1, 3, 7) == "stranger"
    crew.shelves[3] = live
    crew.strangers.add(crew.id(0))
    assert crew.offer(0, 1, 3, 7) == "stranger"
    crew.strangers.clear()
    crew.peers[0].let_go(3)  # nothing comes of it
    assert crew.offer(0, 1, 3, 7) == 0
    assert crew.offer(0, 1, 3, 7) == crew.offer(0, 1, 3, 7) == "flood"
    crew.hold(0, 3, live, 7)
    crew.peers[0].place = SWARM, "ef" * 8
    assert crew.offer(0, 1, 3, 8) == "crew"
    crew.peers[0].place = SWARM, ARCHITECTURE
    crew.room = 2 * 4 * sum(tensor.numel() for tensor in live.values()) - 1
    assert crew.offer(0, 1, 3, 8) == "room" and 3 not in crew.peers[1].replicas
    crew.room += 1
    assert crew.offer(0, 1, 3, 9) == 0 and crew.peers[1].replicas[3].updates == 7  # less than it was said to be
    assert crew.offer(0, 1, 3, 9) == "flood" and crew.shelved == []
    rejected = crew.transports[1].stats()
    assert [rejected[f"rejected/{why}"] for why in ("stranger", "flood", "crew", "room")] == [2, 3, 1, 1]


def test_questions_whether_a_stage_is_kept_are_bounded() -> None:
    crew, live = Crew(), weights(0, 1)
    crew.shelves[3] = live
    crew.peers[1].replicas[3] = StageWeights(live, 7, 0.0)
    head = encode_head(KeepHead(PROTOCOL_VERSION, SWARM, ARCHITECTURE, 3, 7))
    for _ in range(MAX_ASKS):
        crew.doors[1][KEEP_METHOD](crew.id(0), head, 0)
    with pytest.raises(RemoteProtocolError, match="flood"):
        crew.doors[1][KEEP_METHOD](crew.id(0), head, 0)
    assert crew.shelved == [1]


@pytest.mark.parametrize(("stage", "size"), [(4, 0), (3, 1)])
def test_an_answer_that_does_not_fit_is_refused(stage: int, size: int) -> None:
    crew = Crew()
    ours = Outgoing(encode_head(KeepHead(PROTOCOL_VERSION, SWARM, ARCHITECTURE, stage, 7)), size, lambda: [bytes(size)])
    crew.transports[1].accept(KEEP_METHOD, lambda peer, head, size: Accepted(ours, print, lambda error: None))
    assert crew.offer(0, 1, 3, 7) == "stage"


def test_offers_with_a_body_are_refused() -> None:
    crew = Crew()
    with pytest.raises(RemoteProtocolError, match="size"):
        crew.doors[1][KEEP_METHOD]("p", encode_head(KeepHead(PROTOCOL_VERSION, SWARM, ARCHITECTURE, 3, 7)), 1)
