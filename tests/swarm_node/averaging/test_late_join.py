"""Weights for peers that come late: who gives them, when, and what happens if it goes wrong."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from swarm_node.averaging import cohort_weights
from swarm_node.averaging.cohort_weights import (
    AT_ONCE,
    GIVE_PAUSE_S,
    PACE,
    RETRY,
    SAME_PEER_PAUSE_S,
    SEEK_S,
    TRIALS,
    LateJoin,
    WeightsFetch,
    collect_weights,
)
from swarm_protocol.errors import PeerUnreachable, RemoteProtocolError
from swarm_protocol.messages import PROTOCOL_VERSION
from swarm_protocol.tensors import WEIGHTS_METHOD, WeightsHead, encode_head
from swarm_protocol.transports.base import Accepted, Outgoing
from swarm_protocol.transports.memory import LinkModel
from swarm_protocol.transports.transfer import Pace
from tests.support.averaging_cohort import COHORT, PERIOD_S, SWARM, Cohort, Trainee
from tests.support.donors import answers, body_bytes, with_a_nan

TRIES = int(RETRY.max_accidents)
SLOW = LinkModel(latency_s=0.02, bandwidth_bytes_s=400.0)
"""A body takes some eight seconds."""


def seekers(**options: Any) -> Cohort:
    """A cohort without members, which averages from the 500th update on."""
    return Cohort(0, **{"every": 500, **options})


def member(at: Cohort, version: int = 1000, **keys: Any) -> Trainee:
    """A member that does not train, with weights of its own and a card that says `version`."""
    trainee = at.join(dead=True, trains=False, version=version, **keys)
    for tensor in trainee.weights.values():
        tensor.normal_(generator=trainee.noise)
    trainee.late_join.version = version
    return trainee


def newcomer(cohort: Cohort, **keys: Any) -> Trainee:
    """A member that looks for weights from its first step on, 2 * PERIOD_S from now."""
    trainee = cohort.join(**keys)
    trainee.late_join.seek()
    return trainee


def asked_by(late: Trainee, first: Callable[[str], None] = lambda peer: None) -> list[str]:
    """The peers that it asks from now on; `first` is called before the first one."""
    asked: list[str] = []
    fetch = late.late_join.fetch

    def watched(peer: str, least: int) -> WeightsFetch:
        if not asked:
            first(peer)
        asked.append(peer)
        return fetch(peer, least)

    late.late_join.fetch = watched  # type: ignore[method-assign]
    return asked


def gives(liar: Trainee, body: bytes, **changes: Any) -> None:
    """Make it answer with this body and head."""
    fields = {"protocol": PROTOCOL_VERSION, "swarm": SWARM, "cohort": COHORT, "version": 1000, **changes}
    answers(liar.transport, WeightsHead(**fields), body)


def ask(ahead: Trainee, peer: str) -> Accepted | str:
    """A call by `peer`, or why it is refused."""
    try:
        return ahead.late_join.accept(peer, encode_head(WeightsHead(PROTOCOL_VERSION, SWARM, COHORT)), 0)
    except RemoteProtocolError as error:
        return error.reason


def fails_first(late: Trainee, times: int, error: Exception) -> None:
    """Make its first calls fail with this error."""
    exchange, left = late.transport.exchange, times

    def failing(peer: str, method: str, *arguments: Any) -> Future[None]:
        nonlocal left
        left -= method == WEIGHTS_METHOD
        if method != WEIGHTS_METHOD or left < 0:
            return exchange(peer, method, *arguments)
        failed: Future[None] = Future()
        failed.set_exception(error)
        return failed

    late.transport.exchange = failing  # type: ignore[method-assign]


def whole(late: Trainee) -> int:
    return body_bytes(late.averager)


# --------------------------------------------------------------------- it goes well


@pytest.mark.parametrize("options", [{}, {"fragments": 3}, {"method": "diloco"}], ids=str)
def test_a_newcomer_takes_weights_of_a_member_ahead(options: dict[str, Any]) -> None:
    cohort = seekers(**options)
    ahead, late = member(cohort), newcomer(cohort, trains=False)
    changed: list[Tensor] = []
    late.changed = lambda: changed.append(late.flat)
    for momentum in late.averager.momentum:
        momentum.fill_(3.0)
    cohort.run(2 * PERIOD_S + 4)
    assert [(fetch.peer, fetch.version) for fetch in late.fetched] == [(ahead.transport.peer_id, 1000)]
    assert torch.equal(late.flat, ahead.flat) and late.flat.any()
    assert len(changed) == 1 and torch.equal(changed[0], ahead.flat)
    for i, (slow, momentum) in enumerate(zip(late.averager.slow, late.averager.momentum, strict=True)):
        assert torch.equal(slow, ahead.averager.fragments.gather(i))
        assert not momentum.any()
    assert 1000 <= late.version < 1010
    cohort.run(SEEK_S)
    assert len(late.fetched) == 1, "once is enough"


def test_training_goes_on_meanwhile() -> None:
    cohort = seekers(link=SLOW, every=50)
    ahead = cohort.join(version=500)
    late = newcomer(cohort)
    given: list[Tensor] = []
    copies = ahead.averager.copies

    def watched(fragments: Iterable[int]) -> list[Tensor]:
        made = copies(fragments)
        given.extend(made)
        return made

    ahead.averager.copies = watched  # type: ignore[method-assign]
    while not given:
        assert cohort.clock.step(), "nobody asked"
    before = [ahead.updates, late.updates]
    while not late.fetched:
        assert cohort.clock.step(), "nothing arrived"
    assert min(ahead.updates - before[0], late.updates - before[1]) >= 5
    taken = [late.averager.fragments.gather(i) for i in range(len(given))]
    assert all(torch.equal(a, b) for a, b in zip(given, taken, strict=True)), "as of one moment"
    assert not torch.equal(late.flat, ahead.flat), "who gave them trained on"


def test_peers_that_begin_together_keep_their_own() -> None:
    cohort = seekers(every=50)
    cohort.trainees = [newcomer(cohort, step_s=step_s) for step_s in (1.0, 1.0, 1.3)]
    asked = [asked_by(trainee) for trainee in cohort.trainees]
    for second in range(int(SEEK_S) + 30):
        for trainee in cohort.trainees:
            cohort.at(second, lambda trainee=trainee: cohort.announce(trainee))
    cohort.run(SEEK_S + 30)
    assert min(trainee.updates for trainee in cohort.trainees) > 80
    versions = {card.policy_version for card in cohort.trainees[0].transport.members().values()}
    assert min(versions) > 50, "cards said how far they were"
    assert asked == [[], [], []]


def test_a_late_peer_that_finds_none_keeps_its_own() -> None:
    cohort = seekers()
    late = newcomer(cohort)
    stranger = member(cohort, cohort="d" * 16)
    cohort.run(2 * PERIOD_S + SEEK_S)
    ahead = member(cohort)
    cohort.run(60)
    assert not late.fetched and not any(t.transport.rejected for t in (stranger, ahead, late))


# --------------------------------------------------------------------- it goes wrong


def dies(cohort: Cohort, first: Trainee) -> None:
    cohort.at(3.0, lambda: cohort.kill(first))


def has_gone(cohort: Cohort, first: Trainee) -> None:
    cohort.kill(first)


def refuses(cohort: Cohort, first: Trainee) -> None:
    first.late_join.version = 0


def too_much(cohort: Cohort, first: Trainee) -> None:
    gives(first, bytes(whole(first) + 4))


def nothing(cohort: Cohort, first: Trainee) -> None:
    gives(first, b"")


def not_a_number(cohort: Cohort, first: Trainee) -> None:
    gives(first, with_a_nan(whole(first)))


def of_another_cohort(cohort: Cohort, first: Trainee) -> None:
    gives(first, bytes(whole(first)), cohort="d" * 16)


def no_better(cohort: Cohort, first: Trainee) -> None:
    gives(first, bytes(whole(first)), version=0)


def behind_its_card(cohort: Cohort, first: Trainee) -> None:
    gives(first, bytes(whole(first)), version=999)


def incredible(cohort: Cohort, first: Trainee) -> None:
    gives(first, bytes(whole(first)), version=2**50)


FAULTS = {
    dies: "unreachable",
    has_gone: "unreachable",
    refuses: "early",
    too_much: "size",
    nothing: "size",
    not_a_number: "values",
    of_another_cohort: "cohort",
    no_better: "claim",
    behind_its_card: "claim",
    incredible: "claim",
}


@pytest.mark.parametrize(("fault", "reason"), FAULTS.items(), ids=[fault.__name__ for fault in FAULTS])
def test_if_the_first_fails_another_is_asked(fault: Callable[[Cohort, Trainee], None], reason: str) -> None:
    cohort = seekers(link=SLOW)
    members = {trainee.transport.peer_id: trainee for trainee in (member(cohort), member(cohort))}
    late = newcomer(cohort, trains=False)
    asked = asked_by(late, lambda peer: fault(cohort, members[peer]))
    cohort.run(2 * PERIOD_S + 60)
    assert sorted(asked) == sorted(members)
    assert late.averager.counts[f"skipped/{reason}"] == 1
    first, second = (members[peer] for peer in asked)
    assert [fetch.peer for fetch in late.fetched] == [asked[1]]
    assert torch.equal(late.flat, second.flat) and not torch.equal(late.flat, first.flat)
    if fault is dies:
        assert first.transport.bytes_out > 500 and cohort.network.faults["cut"]


def test_nothing_that_fails_changes_anything() -> None:
    cohort = seekers()
    liar, late = member(cohort), newcomer(cohort, trains=False)
    not_a_number(cohort, liar)
    asked = asked_by(late)
    cohort.run(2 * PERIOD_S + SEEK_S)
    assert asked == [liar.transport.peer_id], "not again"
    assert not late.flat.any() and not late.fetched
    assert late.updates > 100


def test_another_is_asked_after_a_slow_first() -> None:
    cohort = seekers(link=SLOW)
    member(cohort), member(cohort)
    late = newcomer(cohort)
    late.late_join.seek(2)
    by_name = {f"peer{i}": i for i in range(3)}
    asked = asked_by(late, lambda peer: cohort.at(5.0, lambda: cohort.network.kill(peer)))
    cohort.run(2 * PERIOD_S + 5 + PACE.grace_s)
    assert len(asked) == 2 and len(late.fetched) == 1 and set(asked) < set(by_name)


def test_one_is_given_them_at_a_time() -> None:
    cohort = seekers(link=SLOW)
    ahead = member(cohort)
    late = [newcomer(cohort, trains=False) for _ in range(3)]
    running, most = 0, 0
    accept = ahead.late_join.accept

    def watched(peer: str, head: bytes, size: int) -> Accepted:
        nonlocal running, most
        accepted = accept(peer, head, size)
        running += 1
        most = max(most, running)

        def over(error: Exception | None) -> None:
            nonlocal running
            running -= 1
            accepted.done(error)

        return Accepted(accepted.ours, accepted.sink, over)

    ahead.transport.accept(WEIGHTS_METHOD, watched)
    cohort.run(2 * PERIOD_S + 90)
    assert most == 1 and running == 0
    assert ahead.transport.rejected["busy"] >= 2
    assert all(torch.equal(trainee.flat, ahead.flat) for trainee in late), "each in its turn"


def test_a_member_that_failed_once_gives_again() -> None:
    cohort = seekers(link=SLOW)
    ahead, first = member(cohort), newcomer(cohort)
    asked_by(first, lambda peer: cohort.at(3.0, lambda: cohort.kill(first)))
    cohort.run(2 * PERIOD_S + 10)
    assert cohort.network.faults["cut"] and not first.fetched
    second = newcomer(cohort, trains=False)
    cohort.run(2 * PERIOD_S + 30)
    assert torch.equal(second.flat, ahead.flat)


def test_a_staller_blocks_others_only_for_a_while() -> None:
    cohort = seekers(fragments=3)
    ahead = member(cohort)
    staller = ask(ahead, "staller")
    assert isinstance(staller, Accepted)
    leaving = iter(staller.ours.pieces())
    assert next(leaving)
    assert ask(ahead, "other") == "busy"
    cohort.run(PACE.seconds(whole(ahead)) + 1.0)
    assert ask(ahead, "staller") == "busy", "not twice in a row"
    other = ask(ahead, "other")
    assert isinstance(other, Accepted)
    with pytest.raises(RemoteProtocolError, match="slow"):
        next(leaving)
    staller.done(RemoteProtocolError("slow"))
    assert ask(ahead, "third") == "busy", "the staller's end is not the other's"
    assert sum(len(piece) for piece in other.ours.pieces()) == whole(ahead)
    other.done(None)
    cohort.run(GIVE_PAUSE_S)
    assert isinstance(ask(ahead, "third"), Accepted)


def test_strangers_that_hang_up_cost_few_copies() -> None:
    """Each copy is of a whole model, and training waits for it."""
    cohort = seekers()
    ahead = member(cohort)
    made: list[float] = []
    copies = ahead.averager.copies

    def counted(fragments: Iterable[int]) -> list[Tensor]:
        made.append(cohort.clock.now())
        return copies(fragments)

    ahead.averager.copies = counted  # type: ignore[method-assign]

    def bother(names: Callable[[int], str], seconds: int) -> int:
        made.clear()
        for i in range(10 * seconds):
            accepted = ask(ahead, names(i))
            if isinstance(accepted, Accepted):
                accepted.done(RemoteProtocolError("torn"))
            cohort.run(0.1)
        return len(made)

    assert bother(lambda i: "stranger", 130) == 3, "at once, after a minute, after another"
    assert 8 <= bother(str, 50) <= 10, "every five seconds"
    assert len(ahead.late_join._slots._wait_until) <= 1 + SAME_PEER_PAUSE_S / GIVE_PAUSE_S, (
        "bounded, however many have asked"
    )


def test_a_slow_receiver_waits_as_long_again() -> None:
    cohort = seekers()
    ahead = member(cohort)
    cohort.run(PERIOD_S)
    slow = ask(ahead, "slow")
    assert isinstance(slow, Accepted)
    cohort.run(3 * SAME_PEER_PAUSE_S)
    slow.done(RemoteProtocolError("slow"))
    cohort.run(3 * SAME_PEER_PAUSE_S - 1.0)
    assert ask(ahead, "slow") == "busy"
    cohort.run(1.1)
    assert isinstance(ask(ahead, "slow"), Accepted)


def test_a_transfer_that_never_began_blocks_none() -> None:
    cohort = seekers()
    ahead = member(cohort)
    copies = ahead.averager.copies

    def changing(fragments: Iterable[int]) -> list[Tensor]:
        raise RemoteProtocolError("busy", "weights are changing")

    ahead.averager.copies = changing  # type: ignore[method-assign]
    assert ask(ahead, "somebody") == "busy"
    ahead.averager.copies = copies  # type: ignore[method-assign]
    assert isinstance(ask(ahead, "somebody"), Accepted)


@pytest.mark.parametrize(
    "error", [RemoteProtocolError("torn", "gone"), PeerUnreachable("busy"), RemoteProtocolError("busy")], ids=repr
)
def test_an_only_donor_is_asked_again_after_accidents(error: Exception) -> None:
    cohort = seekers()
    donor, late = member(cohort), newcomer(cohort, trains=False)
    fails_first(late, TRIES - 1, error)
    asked = asked_by(late)
    cohort.run(2 * PERIOD_S + SEEK_S)
    assert len(asked) == TRIES and torch.equal(late.flat, donor.flat) and late.flat.any()


@pytest.mark.parametrize(
    ("error", "tries"), [(RemoteProtocolError("torn"), TRIES), (RemoteProtocolError("cohort"), 1)], ids=repr
)
def test_but_not_for_ever(error: Exception, tries: int) -> None:
    cohort = seekers()
    _, late = member(cohort), newcomer(cohort, trains=False)
    fails_first(late, 10**6, error)
    asked = asked_by(late)
    cohort.run(2 * PERIOD_S + 3 * SEEK_S)
    assert len(asked) == tries and not late.fetched


def refuser(cohort: Cohort) -> Trainee:
    """A newcomer that answers worse with any weights of others than with its own."""
    late = newcomer(cohort, trains=False)
    late.averager.trial = lambda: lambda: True
    return late


def test_few_weights_are_tried() -> None:
    """Each trial takes a round's answers, and fresh names with a high version cost nothing."""
    cohort = seekers()
    for _ in range(2 * TRIALS):
        member(cohort)
    late = refuser(cohort)
    cohort.run(2 * PERIOD_S + SEEK_S)
    assert late.averager.counts["skipped/probe"] == TRIALS
    said = [line for line in late.said if "became less likely" in line]
    assert len(said) == 2 and said[0].endswith("it, or another, is asked again")
    assert said[1].endswith("this node keeps its own weights, and no further peer is asked")


def test_a_refusal_gives_no_more_time() -> None:
    cohort = seekers(link=SLOW)
    member(cohort), member(cohort)
    late = refuser(cohort)
    late.late_join.seek(2.0)
    cohort.run(2 * PERIOD_S + SEEK_S)
    assert late.averager.counts["skipped/probe"] == 1, "the other one was asked too late"


def test_a_torn_donor_gives_again_after_its_rest() -> None:
    """The peer's pause and the time to look for one end together."""
    cohort = seekers(link=SLOW)
    donor, late = member(cohort), newcomer(cohort, trains=False)
    late.late_join.seek(2.0)
    tear = [True]

    def torn(peer: str, head: bytes, size: int) -> Accepted:
        given = donor.late_join.accept(peer, head, size)

        def pieces() -> Iterator[memoryview]:
            for piece in given.ours.pieces():
                if tear.pop() if tear else False:
                    raise RemoteProtocolError("torn", "in the middle")
                yield piece

        return Accepted(Outgoing(given.ours.head, given.ours.size, pieces), given.sink, given.done)

    donor.transport.accept(WEIGHTS_METHOD, torn)
    cohort.run(2 * PERIOD_S + SAME_PEER_PAUSE_S + 60)
    assert not tear and donor.transport.rejected["busy"], "it was torn, and had its rest"
    assert len(late.fetched) == 1 and torch.equal(late.flat, donor.flat)


def test_muted_liars_are_not_asked() -> None:
    cohort = seekers()
    liar, late = member(cohort), newcomer(cohort, trains=False)
    not_a_number(cohort, liar)
    cohort.run(2 * PERIOD_S + 30)
    assert late.averager.counts["skipped/values"] == 1
    for _ in range(2):  # the third strike
        late.averager.skip("values", "", liar.transport.peer_id)
    late.late_join = LateJoin(late.averager, random.Random(0))  # which remembers nobody that it asked
    asked = asked_by(late)
    late.late_join.seek()
    cohort.run(SEEK_S)
    assert not asked


def test_looking_begins_with_the_first_step() -> None:
    cohort = seekers()
    ahead = member(cohort)
    late = cohort.join(dead=True)
    late.late_join.seek()
    cohort.run(3 * SEEK_S)
    late.dead = False
    cohort.tick(late)
    cohort.run(10)
    assert [fetch.peer for fetch in late.fetched] == [ahead.transport.peer_id]


@pytest.mark.parametrize(
    ("changes", "size", "reason"),
    [
        ({"protocol": 99}, 0, "version"),
        ({"swarm": "b" * 64}, 0, "cohort"),
        ({"cohort": "d" * 16}, 0, "cohort"),
        ({}, 100, "size"),
    ],
    ids=str,
)
def test_calls_that_do_not_fit_are_refused(changes: dict[str, Any], size: int, reason: str) -> None:
    cohort = seekers()
    ahead, caller = member(cohort), member(cohort)
    cohort.run(PERIOD_S)
    fields = {"protocol": PROTOCOL_VERSION, "swarm": SWARM, "cohort": COHORT, **changes}
    ours = Outgoing(msgspec.msgpack.encode(WeightsHead(**fields)), size, lambda: [bytes(size)])
    taken: list[int] = []
    called = [
        caller.transport.exchange(ahead.transport.peer_id, WEIGHTS_METHOD, half, lambda head, n: taken.append, 60.0)
        for half in (ours, Outgoing(encode_head(WeightsHead(PROTOCOL_VERSION, SWARM, COHORT))))
    ]
    cohort.run(20)
    error = called[0].exception()
    assert isinstance(error, RemoteProtocolError) and error.reason == reason
    assert called[1].exception() is None and taken, "a good one is answered all the same"


# --------------------------------------------------------------------- whom it asks


def choices(cohort: Cohort, late: Trainee, times: int = 200) -> Counter[int]:
    """Claimed versions of the peers that it asks, chosen at random."""
    asked: Counter[int] = Counter()

    def pretend(peer: str, least: int) -> WeightsFetch:
        asked[late.transport.members()[peer].policy_version] += 1
        return WeightsFetch(peer)

    for seed in range(times):
        late_join = LateJoin(late.averager, random.Random(seed))
        late_join.fetch = pretend  # type: ignore[method-assign]
        late_join.seek()
        late_join.step(late.version)
    return asked


def claiming(*versions: int) -> Counter[int]:
    cohort = seekers(every=5)
    for version in versions:
        member(cohort, version)
    late = cohort.join()
    cohort.run(PERIOD_S)
    return choices(cohort, late)


def test_impossible_versions_are_not_asked_for() -> None:
    for honest in ([100], [100, 101], [100, 110, 120]):
        asked = claiming(*honest, 2**50)
        assert 2**50 not in asked and sum(asked.values()) == 200, honest


def test_the_highest_version_is_not_preferred() -> None:
    """It asks at random among the peers that are not below the median."""
    two = claiming(100, 10**6)
    five = claiming(90, 100, 110, 120, 10**6)
    assert set(two) == {100, 10**6} and 70 <= two[10**6] <= 130
    assert set(five) == {110, 120, 10**6} and 40 <= five[10**6] <= 95


def test_only_those_a_round_ahead_are_asked() -> None:
    nobody = claiming(0, 4)  # every = 5
    newcomers = claiming(0, 0, 0, 5)
    assert not nobody and set(newcomers) == {5}


# --------------------------------------------------------------------- averaging beside it


@pytest.mark.parametrize("method", ["noloco", "diloco"])
def test_an_exchange_of_old_weights_spares_new_ones(method: str) -> None:
    cohort = Cohort(2, link=SLOW, every=1, method=method, timeout_s=30.0)
    late, partner = cohort.trainees
    late.trains = partner.trains = False
    for tensor in partner.weights.values():
        tensor.fill_(1.0)
    while not (late.transport.bytes_out > 500 and partner.transport.bytes_out > 500):
        assert cohort.clock.step(), "no exchange began"
    partner.dead = True  # begins nothing new
    late.averager.replace([torch.full((n,), 10.0) for n in late.averager.fragments.sizes])
    cohort.run(3 * PERIOD_S)
    assert (late.flat == 10.0).all()
    assert late.averager.counts["skipped/replaced"] == 1, late.averager.counts
    assert not late.averager.counts["exchanges"]


# --------------------------------------------------------------------- many at once


def collected(cohort: Cohort, members: list[Trainee], seconds: float, seed: int) -> tuple[list[str], list[str]]:
    """Peer ids in the order in which a visitor asked them, and those whose weights it got."""
    visitor = cohort.join(dead=True)
    cohort.run(2 * PERIOD_S)
    asked: list[str] = []
    got: list[str] = []
    exchange = visitor.transport.exchange

    def watched(peer: str, *arguments: Any) -> Any:
        asked.append(peer)
        return exchange(peer, *arguments)

    visitor.transport.exchange = watched  # type: ignore[method-assign]
    collect_weights(
        visitor.transport,
        (SWARM, COHORT),
        {trainee.transport.peer_id: 1000 for trainee in members},
        visitor.averager.fragments.sizes,
        lambda peer, version, values: got.append(peer),
        seconds,
        cohort.clock.now,
        cohort.run,
        random.Random(seed),
    )
    return asked, got


@pytest.mark.parametrize("seed", range(3))
def test_trickling_members_do_not_keep_others_out(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cohort_weights, "PACE", Pace(PACE.grace_s, 1.0))  # as if the model were large
    cohort = seekers(link=LinkModel(latency_s=0.02, bandwidth_bytes_s=0.5))
    slow = [member(cohort) for _ in range(2 * AT_ONCE)]
    cohort.link = LinkModel(latency_s=0.02, bandwidth_bytes_s=1e6)
    quick = [member(cohort) for _ in range(3)]
    asked, got = collected(cohort, [*slow, *quick], 900.0, seed)
    assert sorted(got) == sorted(trainee.transport.peer_id for trainee in quick)
    first = asked[: len(slow) + len(quick)]
    assert len(set(first)) == len(first), "who was slow comes after all others"
    assert len(asked) > len(first), "but is asked again"


def test_members_are_asked_in_random_order() -> None:
    cohort = seekers()
    members = [member(cohort) for _ in range(6)]
    asked = [collected(cohort, members, 600.0, seed)[0] for seed in (1, 2)]
    assert sorted(asked[0]) == sorted(asked[1]) and asked[0] != asked[1]
