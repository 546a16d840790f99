"""Cohorts on a virtual clock: weights come together, and no failure gets into them."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache, partial
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from swarm_node.averaging import averager as averager_module
from swarm_node.averaging import pair_averager
from swarm_node.averaging.averager import MUTED_AFTER
from swarm_node.averaging.codecs import coded_bytes, pieces
from swarm_node.averaging.cohort_weights import weights_head
from swarm_node.averaging.costs import EVERYBODY, FLOOR, KEPT, NOTHING, TOGETHER
from swarm_node.averaging.pair_averager import PairAverager
from swarm_node.averaging.pair_exchange import PairExchange
from swarm_node.errors import CheckpointError, UserError
from swarm_node.install import upgrade_command
from swarm_protocol.codec import spoken_by, version_for
from swarm_protocol.errors import LocalProtocolError, RemoteProtocolError
from swarm_protocol.messages import PROTOCOL_VERSION, PeerCard
from swarm_protocol.tensors import AVERAGE_METHOD, AverageHead, WeightsHead, decode_head, encode_head
from swarm_protocol.transports.base import Accepted, Outgoing
from swarm_protocol.transports.memory import LinkModel
from tests.support.averaging_cohort import COHORT, PAPER, PERIOD_S, SWARM, Cohort, Trainee
from tests.support.locks import Watched


@cache
def drifting_apart() -> float:
    """The spread of peers that do not average."""
    alone = Cohort(4, every=10**6)
    alone.run(200.0)
    return alone.spread()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"codec": "4bit"},
        {"fragments": 3},
        {"overlap": False},
        {"alpha": 0.0, "beta": 1.0, "gamma": 1.0},
        {"gamma": 0.5, "codec": "8bit", "fragments": 2},
        {"mixing": 0.5},
        {"clip": 1.5, "gates": True},
        {"method": "diloco", "overlap": False, "codec": "8bit", "fragments": 3},
        {"method": "diloco", "clip": 1.5},
        {"method": "per_step", "overlap": False},
    ],
    ids=str,
)
def test_averaging_keeps_peers_together(options: dict[str, Any]) -> None:
    cohort = Cohort(4, **options)
    cohort.run(200.0)
    assert cohort.spread() < 0.8 * drifting_apart()
    assert all(n >= 10 for n in cohort.exchanges())
    assert all(0.7 < float(trainee.flat.mean()) < 1.3 for trainee in cohort.trainees), "all go where training goes"
    assert cohort.exchanges() == [t.averager.metrics()["averaging/exchanges"] for t in cohort.trainees]


@pytest.mark.parametrize(("mixing", "values"), [(0.0, (1.225, 1.825)), (0.5, (1.1125, 2.1625))])
def test_a_pair_steps_as_the_formula_says(mixing: float, values: tuple[float, float]) -> None:
    cohort = Cohort(2, every=1, mixing=mixing)
    a, b = cohort.trainees
    for trainee, value in ((a, 1.0), (b, 2.5)):
        trainee.trains = False
        for tensor in trainee.weights.values():
            tensor.fill_(value)
    for slow in b.averager.slow:
        slow.fill_(2.0)
    cohort.run(2 * PERIOD_S)
    assert cohort.exchanges() == [1, 1], "the golden values are of the first exchange"
    for trainee, value in zip((a, b), values, strict=True):  # appendix: phi = (0, 2), theta = (1, 2.5)
        torch.testing.assert_close(trainee.flat, torch.full_like(trainee.flat, value))


def test_a_diverged_node_says_so_and_calls_no_peer() -> None:
    cohort = Cohort(2, every=1)
    diverged, other = cohort.trainees
    for tensor in diverged.weights.values():
        tensor.fill_(float("nan"))
    cohort.run(4 * PERIOD_S)
    assert diverged.averager.counts["skipped/diverged"] >= 1
    assert any("lower grpo.learning_rate" in sentence for sentence in diverged.said)
    assert cohort.exchanges() == [0, 0] and bool(other.flat.isfinite().all())


def test_training_during_an_exchange_is_kept() -> None:
    """Bodies take eight seconds: eight steps happen meanwhile, and none is lost."""
    slow_link = LinkModel(latency_s=0.02, bandwidth_bytes_s=400.0)
    cohort = Cohort(2, link=slow_link, every=1)
    a, b = cohort.trainees
    for trainee in (a, b):
        trainee.trains = False
    cohort.run(2 * PERIOD_S + 1)
    with a.averager.changing():
        for tensor in a.weights.values():
            tensor += 3.0
    cohort.run(PERIOD_S)
    assert min(cohort.exchanges()) >= 1
    assert float(a.flat.mean()) == pytest.approx(3.0, abs=1e-5)


def test_the_odd_one_out_and_the_lonely_skip() -> None:
    three, one = Cohort(3), Cohort(1)
    three.run(300)
    one.run(300)
    assert sum(t.averager.counts["skipped/odd"] for t in three.trainees) >= 5
    assert sum(three.exchanges()) >= 20
    assert one.trainees[0].averager.counts["skipped/alone"] >= 5 and one.exchanges() == [0]
    assert one.trainees[0].updates > 250


def test_peers_of_another_cohort_are_left_alone() -> None:
    cohort = Cohort(2)
    stranger = cohort.join(cohort="d" * 16)
    cohort.trainees.append(stranger)
    cohort.run(300)
    assert cohort.exchanges()[2] == 0 and cohort.exchanges()[0] >= 10
    assert stranger.averager.counts["skipped/alone"]


@pytest.mark.parametrize("method", ["noloco", "diloco"])
def test_a_peers_death_leaves_others_as_they_were(method: str) -> None:
    """Bit for bit: training stands still, so weights may change by averaging only."""
    slow_link = LinkModel(latency_s=0.02, bandwidth_bytes_s=600.0)
    cohort = Cohort(2, link=slow_link, every=1, method=method, timeout_s=30.0)
    a, b = cohort.trainees
    for i, trainee in enumerate((a, b)):
        trainee.trains = False
        for tensor in trainee.weights.values():
            tensor.fill_(float(i + 1))
    before = a.flat.clone()
    while not (a.transport.stats()["bytes_out"] or b.transport.stats()["bytes_out"]):
        assert cohort.clock.step(), "no exchange began"
    cohort.kill(b)
    cohort.run(100)
    assert torch.equal(a.flat, before)
    assert a.averager.counts["exchanges"] == 0 and a.updates > 50
    assert sum(n for name, n in a.averager.counts.items() if name.startswith("skipped/")) >= 1


@pytest.mark.parametrize("method", ["noloco", "diloco"])
def test_remaining_members_go_on_averaging(method: str) -> None:
    cohort = Cohort(5, method=method, timeout_s=5.0)
    cohort.run(60)
    cohort.kill(cohort.trainees[2])
    cohort.run(80)  # its card has run out
    before = cohort.exchanges()
    cohort.run(100)
    assert all(after >= n + 4 for i, (n, after) in enumerate(zip(before, cohort.exchanges(), strict=True)) if i != 2)


def test_a_slow_peer_averages_and_delays_none() -> None:
    """The slow peer's steps take most of a round, and it answers in the middle of one."""
    cohort = Cohort(2)
    cohort.trainees[1].step_s = 8.0
    cohort.run(800)
    fast, slow = cohort.trainees
    assert fast.updates > 750
    assert slow.averager.counts["exchanges"] >= 10


def test_a_late_member_catches_up_with_the_round() -> None:
    cohort = Cohort(3, method="diloco", timeout_s=5.0)
    cohort.run(80)
    late = cohort.join()
    cohort.trainees.append(late)
    cohort.run(100)
    assert late.averager.counts["exchanges"] >= 5


def test_a_late_member_gets_slow_weights_too() -> None:
    """A member that missed a round takes them over too: progress alone would leave it an offset for ever."""
    cohort = Cohort(3, method="diloco", codec="8bit", timeout_s=5.0, overlap=False)
    cohort.run(80)
    late = cohort.join()
    cohort.trainees.append(late)
    cohort.run(100)
    assert late.averager.counts["exchanges"] >= 5
    slow = torch.stack([torch.cat(trainee.averager.slow) for trainee in cohort.trainees])
    assert float(slow.mean()) > 0.1
    assert (slow - slow[0]).abs().max() < 1e-5


def test_unusable_weights_replace_nothing() -> None:
    trainee = Cohort(1).trainees[0]
    averager = trainee.averager
    before = torch.cat(averager.slow)
    better, broken = [torch.full_like(before, 2.0)], [torch.full_like(before, 3e38)]
    trainee.probe = lambda: float((averager.tensors["embed"] - 2.0).abs().mean())

    def trial() -> Callable[[], bool]:
        own = trainee.probe() or 0.0
        return lambda: not (trainee.probe() or 0.0) <= own + 1.0

    averager.trial = trial
    assert averager.replace(better) and averager.replaced == 1
    for worse in (broken, [torch.zeros_like(before)], [-better[0]], [torch.full_like(before, math.nan)]):
        assert not averager.replace(worse) and averager.replaced == 1
    assert averager.replace([torch.full_like(before, 2.5)]), "somewhat worse, as weights that learned something else"
    assert averager.replace(better)
    assert torch.equal(torch.cat(averager.slow), better[0])
    assert all(bool((tensor == 2.0).all()) for tensor in averager.tensors.values())


def test_weights_on_trial_are_not_given_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for weights of another peer, and for averaged ones, until the probe has passed."""
    monkeypatch.setattr(averager_module, "COPY_S", 0.01)
    cohort = Cohort(2, every=1, probe=True)
    victim, other = cohort.trainees
    victim.trains = other.trains = False
    other.weights["embed"].fill_(2.0)
    averager = victim.averager
    looked: list[str] = []

    def probe() -> float:
        """A peer asks in the middle of each look at weights that are not the old ones."""
        value = float(averager.tensors["embed"][0])
        if value:
            with pytest.raises(RemoteProtocolError, match="busy"):
                averager.copies([0])
            looked.append("on trial")
        return math.inf if value else 0.0

    victim.probe = probe
    assert not averager.replace([torch.full((n,), 2.0) for n in averager.fragments.sizes])
    assert looked == ["on trial"]
    cohort.run(3 * PERIOD_S)
    assert len(looked) == 1 + averager.counts["skipped/probe"] > 1
    assert not any(bool(copy.any()) for copy in averager.copies([0]))


def test_a_copy_made_during_replacement_is_not_averaged() -> None:
    cohort = Cohort(2, every=1, alpha=0.0)
    victim, liar = cohort.trainees
    victim.dead = liar.dead = True  # neither ticks: this test says what happens
    averager = victim.averager
    assert isinstance(averager, PairAverager)
    averager.step(100)
    cohort.run(0.5)  # the call that it made is refused: its partner has made no update
    now, size = int(cohort.clock.now() / PERIOD_S), len(averager.slow[0])
    me, peer = victim.transport.peer_id, liar.transport.peer_id
    head = encode_head(AverageHead(PROTOCOL_VERSION, SWARM, COHORT, peer, me, now, 0))
    new, gather = torch.full((size,), 10.0), averager.fragments.gather
    accepted: list[Accepted] = []

    def while_slow_weights_are_gathered(i: int) -> Tensor:
        if not accepted and not averager._lock.locked() and torch.equal(gather(i), new):
            accepted.append(averager.accept(peer, head, coded_bytes("float32", size)))
        return gather(i)

    averager.fragments.gather = while_slow_weights_are_gathered  # type: ignore[method-assign]
    assert averager.replace([new])
    for piece in pieces("float32", new):
        accepted[0].sink(piece)
    accepted[0].done(None)
    averager.step(100)
    assert torch.equal(victim.flat, new), "both had these weights"
    assert averager.counts["skipped/replaced"] == 1 and averager.counts["exchanges"] == 0


def test_a_state_can_be_saved_and_restored() -> None:
    cohort = Cohort(2, clip=1.5, gates=True)
    cohort.run(200)
    a = cohort.trainees[0].averager
    tensors, numbers = a.state_dict()
    other = Cohort(1, clip=1.5, gates=True).trainees[0].averager
    other.load_state_dict(tensors, numbers)
    assert all(torch.equal(x, y) for x, y in zip(other.slow + other.momentum, a.slow + a.momentum, strict=True))
    assert other.counts["exchanges"] == a.counts["exchanges"] > 0
    assert other.robust.state() == a.robust.state()
    assert other.state_dict()[1] == numbers
    assert numbers["exchanged_at"] != [0] and numbers["apart"] != [0.0]


@pytest.mark.parametrize(
    "changes",
    [
        *({name: None} for name in ("cohort", "robust", "counts", "exchanged_at", "apart")),
        {"cohort": "d" * 16},
        {"exchanged_at": [1, 2]},
        {"exchanged_at": ["soon"]},
        {"exchanged_at": [math.inf]},
        {"counts": [1]},
        {"robust": {"probed": []}},
        {"apart": []},
        {"apart": [math.nan]},
        {"apart": [-1.0]},
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["noloco", "diloco"])
def test_a_state_that_is_none_changes_nothing(changes: dict[str, Any], method: str) -> None:
    averager = Cohort(1, method=method).trainees[0].averager
    before = {name: tensor.clone() for name, tensor in averager.state_dict()[0].items()}
    _, kept = averager.state_dict()
    tensors = {name: tensor + 1.0 for name, tensor in before.items()}
    good = {**kept, "counts": {"exchanges": 7}, "exchanged_at": [5]}
    damaged = {name: value for name, value in {**good, **changes}.items() if value is not None}
    if method == "noloco" or "apart" not in changes:
        with pytest.raises(CheckpointError, match="averaging state"):
            averager.load_state_dict(tensors, damaged)
        with pytest.raises(CheckpointError, match="averaging state"):
            averager.load_state_dict({name: tensor[:5] for name, tensor in tensors.items()}, good)
    assert averager.state_dict()[1] == kept
    assert all(torch.equal(tensor, before[name]) for name, tensor in averager.state_dict()[0].items())
    averager.load_state_dict(tensors, good)
    assert averager.counts["exchanges"] == 7 and float(averager.slow[0][0]) == 1.0


def test_bytes_sent_at_the_same_time_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first worker reads the count, and goes on when the second one waits or has read it too."""
    second_is_there, looks = threading.Event(), list[int]()
    monkeypatch.setattr(
        averager_module,
        "threading",
        SimpleNamespace(Lock=lambda: Watched(second_is_there), Event=threading.Event),
    )
    averager = Cohort(1).trainees[0].averager

    class Read(Counter[str]):
        def __getitem__(self, name: str) -> int:
            value = super().__getitem__(name)
            looks.append(value)
            if len(looks) == 2:
                second_is_there.set()
            assert second_is_there.wait(60)
            return value

    averager.counts = Read()
    halves = [
        averager._outgoing("peer7", "float32", 10, lambda: iter([memoryview(bytes(10))]), round=0, fragment=0)
        for _ in range(2)
    ]
    workers = [threading.Thread(target=lambda half=half: list(half.pieces())) for half in halves]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert averager.counts.get("bytes") == 20


@pytest.mark.parametrize("method", ["noloco", "diloco"])
def test_an_own_fault_is_not_blamed_on_network(method: str) -> None:
    cohort = Cohort(2, method=method, every=1, timeout_s=5.0)
    a, b = cohort.trainees
    b.dead = True

    def failing(*_: Any) -> Future[None]:
        future: Future[None] = Future()
        future.set_exception(LocalProtocolError("a part of this node does not work"))
        return future

    a.transport.exchange = failing  # type: ignore[method-assign]
    cohort.run(3 * PERIOD_S)
    assert a.averager.counts["skipped/fault"] >= 1 and a.averager.counts["exchanges"] == 0
    assert not a.averager.counts["skipped/unreachable"] and not a.averager.counts["skipped/absent"]
    assert any("this node failed (a part of this node" in sentence for sentence in a.said)


def test_dial_only_peers_average_with_those_they_dial() -> None:
    cohort = Cohort(4, hidden=2)
    cohort.run(300)
    assert all(n >= 10 for n in cohort.exchanges())
    unreachable = [trainee.averager.counts["skipped/unreachable"] for trainee in cohort.trainees]
    assert sum(unreachable) <= 2, "two of them were never paired"


def plain_mean(own: Tensor, others: Tensor) -> Tensor:
    return (own + others.sum(0)) / (1 + len(others))


def no_mean(own: Tensor, others: Tensor) -> Tensor:
    return others[0, :3]


@pytest.mark.parametrize("method", ["noloco", "diloco"])
def test_a_reducer_of_the_users_own(method: str) -> None:
    name = "tests.swarm_node.averaging.test_averagers:plain_mean"
    outside, builtin = (Cohort(3, method=method, **more) for more in ({"reducer": name}, {}))
    for cohort in (outside, builtin):
        cohort.run(100)
    assert outside.exchanges() == builtin.exchanges() and sum(builtin.exchanges()) > 3
    for a, b in zip(outside.trainees, builtin.trainees, strict=True):
        torch.testing.assert_close(a.flat, b.flat)
    with pytest.raises(UserError, match="must return"):
        Cohort(2, method=method, reducer="tests.swarm_node.averaging.test_averagers:no_mean").run(100)


# --------------------------------------------------------------------- hostile partners


def call(them: Cohort, victim: Trainee, **changes: Any) -> Exception | None:
    """Peer 1's call of the victim, peer 0, in the present round, with a head or body that is changed."""
    liar = them.trainees[1]
    size = len(victim.averager.slow[0])
    body = changes.pop("body", torch.ones(size))
    declared = changes.pop("size", coded_bytes("float32", len(body)))
    now = int(them.clock.now() / PERIOD_S)
    fields = {
        "protocol": PROTOCOL_VERSION,
        "swarm": SWARM,
        "cohort": COHORT,
        "sender": liar.transport.peer_id,
        "receiver": victim.transport.peer_id,
        "round": now,
        "fragment": 0,
        **changes,
    }
    head = msgspec.msgpack.encode(AverageHead(**fields))
    ours = Outgoing(head, declared, lambda: pieces("float32", body))
    done = liar.transport.exchange(victim.transport.peer_id, AVERAGE_METHOD, ours, lambda h, s: lambda p: None, 10.0)
    them.run(1.5)
    error = done.exception() if done.done() else None
    assert error is None or isinstance(error, Exception)
    return error


def still_pair(**options: Any) -> Cohort:
    """Two peers; the second only lies, and the first has weights of 1 and slow weights of 0."""
    cohort = Cohort(2, every=1, **options)
    victim, liar = cohort.trainees
    liar.dead = True  # never ticks: its transport answers what this test makes it say
    victim.trains = False
    cohort.run(PERIOD_S + 2)
    return cohort


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"swarm": "b" * 64}, "cohort"),
        ({"cohort": "d" * 16}, "cohort"),
        ({"sender": "peer7"}, "partner"),
        ({"receiver": "peer7"}, "partner"),
        ({"round": 0}, "round"),
        ({"round": 2**50}, "round"),
        ({"fragment": 7}, "fragment"),
        ({"phase": 1}, "schema"),
        ({"group": "0" * 16}, "schema"),
        ({"protocol": 99}, "version"),
        ({"body": torch.ones(3)}, "size"),
        ({"size": 2**30}, "size"),
        ({"codec": "int8"}, "codec"),
    ],
    ids=str,
)
def test_an_unfit_head_is_refused_before_its_body(changes: dict[str, Any], reason: str) -> None:
    cohort = still_pair()
    victim = cohort.trainees[0]
    before = victim.flat.clone()
    error = call(cohort, victim, **changes)
    assert isinstance(error, RemoteProtocolError) and error.reason == reason
    cohort.run(30)
    assert torch.equal(victim.flat, before)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_non_finite_values_mute_their_sender(value: float) -> None:
    cohort = still_pair()
    victim = cohort.trainees[0]
    before = victim.flat.clone()
    for _ in range(MUTED_AFTER + 1):
        body = torch.ones(len(victim.averager.slow[0]))
        body[17] = value
        raw = memoryview(body.numpy()).cast("B")
        padded = bytes(raw) + bytes(coded_bytes("float32", len(body)) - len(raw))
        liar = cohort.trainees[1]
        head = AverageHead(
            PROTOCOL_VERSION,
            SWARM,
            COHORT,
            liar.transport.peer_id,
            victim.transport.peer_id,
            int(cohort.clock.now() / PERIOD_S),
            0,
        )
        ours = Outgoing(encode_head(head), len(padded), lambda padded=padded: [memoryview(padded)])
        liar.transport.exchange(victim.transport.peer_id, AVERAGE_METHOD, ours, lambda h, s: lambda p: None, 10.0)
        cohort.run(PERIOD_S)
    assert torch.equal(victim.flat, before)
    assert victim.averager.counts["exchanges"] == 0
    assert victim.averager.counts["skipped/values"] == MUTED_AFTER
    assert any("for an hour" in sentence for sentence in victim.said)


def test_ten_times_the_norm_is_clipped() -> None:
    plain, robust = (Cohort(4, seed=2, clip=clip, gates=clip > 0) for clip in (0.0, 1.5))
    for cohort in (plain, robust):
        liar = cohort.trainees[3]
        cohort.run(100)
        gather = liar.averager.fragments.gather
        liar.averager.fragments.gather = lambda i, gather=gather: -10 * gather(i)  # type: ignore[method-assign]
        cohort.run(400)
    honest = [[abs(float(t.flat.mean()) - 1.0) for t in cohort.trainees[:3]] for cohort in (plain, robust)]
    assert max(honest[1]) < 0.35 < max(honest[0])


def test_the_probe_takes_back_harmful_weights() -> None:
    cohort = Cohort(2, every=1, probe=True)
    victim, other = cohort.trainees
    for trainee, value in ((victim, 1.0), (other, 900.0)):
        trainee.trains = False
        for tensor in trainee.weights.values():
            tensor.fill_(value)
    victim.probe = lambda: float((victim.flat - 1).abs().mean())
    before = victim.flat.clone()
    cohort.run(60)
    assert torch.equal(victim.flat, before)
    assert victim.averager.counts["skipped/probe"] >= 1 and victim.averager.counts["exchanges"] == 0
    assert other.averager.counts["exchanges"] >= 1


@pytest.mark.parametrize("summed_up", [True, False])
def test_a_partner_that_costs_a_little_each_time_is_left_out(summed_up: bool) -> None:
    """It sends the weights of honest nodes, moved uphill by less than any single exchange is refused for."""
    cohort = Cohort(4, every=1, probe=True, alpha=0.0, beta=1.0, gamma=1.0)
    *honest, liar = cohort.trainees
    for trainee in cohort.trainees:
        trainee.trains = False
    liar.averager.fragments.gather = lambda i: honest[0].flat + 0.16  # type: ignore[method-assign]
    for trainee in honest:
        trainee.probe = lambda trainee=trainee: float(trainee.flat.abs().mean())
        if summed_up:
            trainee.averager.probes.unseen = trainee.probe
    cohort.run(60 * PERIOD_S)
    reached = max(float(trainee.flat.abs().mean()) for trainee in honest)
    assert reached < 0.4 if summed_up else reached > 0.8
    assert all(trainee.averager.counts["exchanges"] > 20 for trainee in honest), "honest ones go on"
    assert summed_up == any(trainee.averager.counts["skipped/probe"] for trainee in honest)


@pytest.mark.parametrize("whose", ["nobody", "both", "none"])
def test_only_partners_that_cost_nothing_say_how_far_is_usual(whose: str) -> None:
    """For one of the two it costs something, to come nearer to the other. Without a probe neither knows."""
    cohort = Cohort(2, every=1, probe=whose != "none", clip=1.5, alpha=0.0, beta=1.0, gamma=1.0)
    victim, other = cohort.trainees
    for trainee in cohort.trainees:
        trainee.trains = False
        if whose == "both":
            trainee.averager.probes.unseen = lambda trainee=trainee: float(trainee.flat.abs().mean())
    for tensor in other.weights.values():
        tensor.fill_(1e-7)
    while not all(cohort.exchanges()):
        assert cohort.clock.step(), "they never met"
    distances = [trainee.averager.robust.state()["seen"]["0"]["distances"] for trainee in cohort.trainees]
    if whose == "both":
        assert not distances[0] and distances[1]
    else:
        assert all(distances)


@pytest.mark.parametrize("way", [{}, {"mixing": 0.25}, PAPER], ids=str)
def test_an_exchange_is_halved_where_all_partners_have_spent_much(way: dict[str, float]) -> None:
    """Slow weights go with the fast ones: both end where they would have with a partner that is half as far."""

    def after(value: float, spent: float) -> list[Tensor]:
        cohort = Cohort(2, every=1, probe=True, **{"alpha": 0.0, "beta": 1.0, "gamma": 1.0, **way})
        victim, other = cohort.trainees
        for trainee in cohort.trainees:
            trainee.trains = False
        for tensor in other.weights.values():
            tensor.fill_(value)
        victim.averager.probes.unseen = lambda: float(victim.flat.abs().mean())
        victim.averager.robust.costs.load({**NOTHING, "shares": {EVERYBODY: spent}})
        while not cohort.exchanges()[0]:
            assert cohort.clock.step(), "they never met"
        cost = victim.flat.abs().mean()
        shares = victim.averager.robust.costs.state()["shares"]
        assert float(cost) == pytest.approx(sum(shares.values()) - KEPT * spent)
        return [victim.flat, victim.averager.slow[0], victim.averager.momentum[0]]

    limit = TOGETHER * FLOOR
    far = 3.6 * (1 - KEPT) * limit  # what it costs is between what may be spent now and twice that
    halved, whole = after(far, limit), after(far / 2, 0.0)
    assert all(torch.allclose(a, b, atol=1e-6) and b.any() for a, b in zip(halved, whole, strict=True))


# --------------------------------------------------------------------- versions of the protocol


def test_halves_use_the_newest_version_both_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """This node or its partner may be the newer one."""
    monkeypatch.setattr("swarm_protocol.codec.SPOKEN", spoken_by(5))
    cohort = Cohort(2, every=1)
    averager = cohort.trainees[0].averager
    cards: dict[str, PeerCard] = {}
    monkeypatch.setattr(averager.transport, "members", lambda: cards)
    monkeypatch.setattr("swarm_node.averaging.averager.version_for", partial(version_for, spoken=spoken_by(5)))
    monkeypatch.setattr("swarm_node.averaging.cohort_weights.version_for", partial(version_for, spoken=spoken_by(5)))
    calls: list[AverageHead] = []

    def exchange(peer: str, method: str, ours: Outgoing, *rest: Any) -> Future[None]:
        calls.append(decode_head(ours.head, AverageHead))
        refused: Future[None] = Future()
        refused.set_exception(RemoteProtocolError("early"))
        return refused

    def weights_version(peer: str) -> int:
        return decode_head(weights_head(averager.transport, peer, (SWARM, COHORT), 1), WeightsHead).protocol

    monkeypatch.setattr(averager.transport, "exchange", exchange)
    for peer, protocol, speaks, version in (("older", 4, 0, 4), ("same", 4, 5, 5), ("newer", 5, 6, 5)):
        cards.clear()
        cards[peer] = PeerCard(protocol, SWARM, 0.0, peer, ["trainer"], cohort=COHORT, speaks=speaks)
        cohort.run(2 * PERIOD_S)
        assert (calls[-1].receiver, calls[-1].protocol) == (peer, version)
        assert weights_version(peer) == version
    cards["older"] = PeerCard(4, SWARM, 0.0, "older", ["trainer"])
    assert weights_version("unknown") == 4, "as the oldest here reads"


@pytest.mark.parametrize("calls_in", [1, 2])
def test_the_call_decides_whether_halves_are_promised(calls_in: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node of protocol 1 promises nothing, and the answer to its call says nothing that it would not expect. Its card
    says so: else its call is refused."""
    cohort = Cohort(2, every=1)
    caller = cohort.trainees[0]
    caller_id, halves = caller.transport.peer_id, list[tuple[PairExchange, Outgoing]]()
    kept: list[bool] = []
    versions = lambda peer, members: 2 if peer == caller_id else calls_in  # noqa: E731
    monkeypatch.setattr(averager_module, "version_for", versions)
    monkeypatch.setattr(pair_averager, "version_for", lambda peer, members: calls_in)
    for trainee in cohort.trainees:
        averager = trainee.averager
        assert isinstance(averager, PairAverager)

        def half(exchange: PairExchange, made: Callable[[PairExchange], Outgoing] = averager._half) -> Outgoing:
            ours = made(exchange)
            halves.append((exchange, ours))
            if ours.promise is not None and not exchange.ours:
                kept.append(ours.promise() == sha256(b"".join(ours.pieces())).digest())
            return ours

        monkeypatch.setattr(averager, "_half", half)
        monkeypatch.setattr(averager, "_call", averager._call if trainee is caller else lambda *call: None)
    cohort.run(4 * PERIOD_S)
    assert all(cohort.exchanges()) and {exchange.ours for exchange, _ in halves} == {True, False}
    assert all((ours.promise is not None) == (calls_in == 2) for _, ours in halves)
    assert all(kept) and bool(kept) == (calls_in == 2), "what is promised is what is sent"


def test_a_failure_over_versions_says_how_to_upgrade() -> None:
    trainee = Cohort(2).trainees[0]
    for _ in range(2):
        trainee.averager.skip("version", "protocol 7 is too new for a node that speaks 5 and 6")
    [said] = [text for text in trainee.said if "too new" in text]
    assert upgrade_command() in said
    assert trainee.averager.metrics()["averaging/skipped/version"] == 2


def test_a_change_of_weights_is_announced_before_it() -> None:
    cohort = Cohort(2)
    seen: list[Tensor] = []
    node = cohort.trainees[0]
    node.averager.before_change = lambda: seen.append(node.flat.clone())
    cohort.run(60.0)
    assert len(seen) == node.averager.counts["exchanges"] > 0
    now = node.flat.clone()
    assert node.averager.replace([torch.ones(len(slow)) for slow in node.averager.slow])
    assert torch.equal(seen[-1], now) and not torch.equal(node.flat, now)
