"""Right answers that do harm: which questions they answer, and how long they are."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import fmean

import msgspec
import pytest

from swarm_node.config import SharingConfig
from swarm_node.sharing import Balance, ReplayBuffer
from swarm_node.sharing.balance import LEAST
from swarm_node.types import Group
from tests.support.foreign_groups import NOW, group

ANSWERS = ["1"] * 12 + ["2"] * 10 + ["3"] * 10 + [str(i) for i in range(4, 72)]  # of a hundred tasks
LENGTHS = [2] * 60 + [3] * 25 + [4] * 10 + [5] * 5  # of a hundred right answers, in tokens
HONEST, LIARS = 7, 3  # of ten groups that come
Lie = Callable[[random.Random], Group]


def one(answer: str | None, length: int, peer: str | None = "peer") -> Group:
    made = group(peer=peer, tokens=length)
    return msgspec.structs.replace(made, task=msgspec.structs.replace(made.task, answer=answer))


def honest(rng: random.Random, n: int, lengths: Sequence[int] = LENGTHS) -> list[Group]:
    return [one(rng.choice(ANSWERS), rng.choice(lengths)) for _ in range(n)]


def make() -> Balance:
    balance = Balance(lambda text: 1)
    balance.observe(honest(random.Random(0), 600))
    return balance


def admitted(lie: Lie, n: int = 2000) -> list[Group]:
    """What is admitted of `n` groups of honest peers and liars."""
    rng, balance = random.Random(1), make()
    came = [lie(rng) if rng.random() < LIARS / (HONEST + LIARS) else honest(rng, 1)[0] for _ in range(n)]
    return [each for each in came if balance.admits(each)]


def share(groups: Sequence[Group], of: Callable[[Group], bool]) -> float:
    return fmean(of(each) for each in groups)


def length(made: Group) -> int:
    return len(made.rollouts[0].token_ids)


@pytest.mark.parametrize("answers", [["3"], ["2", "3"], ["1", "2", "3"], ["70", "71"]])
def test_an_answer_has_no_more_room_than_among_own_tasks(answers: list[str]) -> None:
    """Liars send 30 % of all groups, all of them with one answer, or with several."""
    own = share([one(answer, 2) for answer in ANSWERS], lambda made: made.task.answer in answers)
    found = admitted(lambda rng: one(rng.choice(answers), rng.choice(LENGTHS)))
    assert share(found, lambda made: made.task.answer in answers) < own + 0.04 * len(answers)


@pytest.mark.parametrize("long", [3, 4, 5, 6, 14])
def test_a_length_has_no_more_room_than_among_own_right_answers(long: int) -> None:
    """Also lengths at and just below the longest, of liars who know own lengths."""
    own = fmean(n >= long for n in LENGTHS)
    found = admitted(lambda rng: one(rng.choice(ANSWERS), long))
    assert share(found, lambda made: length(made) >= long) < own + 0.06


def test_honest_groups_are_admitted_as_before() -> None:
    found = admitted(lambda rng: honest(rng, 1)[0])
    assert len(found) > 0.93 * 2000
    assert fmean(map(length, found)) == pytest.approx(fmean(LENGTHS), rel=0.02)


def test_where_nothing_is_known_all_are_admitted() -> None:
    balance = Balance(lambda text: 1)
    came = [one("3", 9) if n % 2 else each for n, each in enumerate(honest(random.Random(1), 200))]
    balance.observe(honest(random.Random(0), LEAST - 1))
    assert all(map(balance.admits, came))
    balance.observe(honest(random.Random(0), 1))
    assert not any(balance.admits(each) for each in came[1::2])


def test_tasks_without_a_reference_answer_differ_in_length_only() -> None:
    balance = Balance(lambda text: 1)
    balance.observe([one(None, length(each)) for each in honest(random.Random(0), 300)])
    assert all(balance.admits(one(None, 2)) for _ in range(100))
    assert sum(balance.admits(one(None, 9)) for _ in range(40)) < 3


def test_what_most_groups_have_is_heard() -> None:
    """A newcomer whose answers are short learns from a swarm of long ones."""
    balance, rng = make(), random.Random(0)
    assert sum(balance.admits(one(rng.choice(ANSWERS), 40)) for _ in range(1000)) > 900
    balance = make()
    came = [one(rng.choice(ANSWERS), 40) if rng.random() < 0.4 else honest(rng, 1)[0] for _ in range(1000)]
    assert share([each for each in came if balance.admits(each)], lambda made: length(made) == 40) < 0.02


def test_the_mean_of_the_right_answers_of_a_group_counts() -> None:
    balance = make()
    for each in honest(random.Random(1), 200):
        balance.admits(each)

    def admits(number: int, right: int, wrong: int) -> bool:
        made = group([1.0, 1.0, 0.0])
        made.rollouts[0].token_ids, made.rollouts[2].token_ids = [5] * right, [5] * wrong
        task = msgspec.structs.replace(made.task, answer=str(10 + number))
        return balance.admits(msgspec.structs.replace(made, task=task))

    assert all(admits(number, 2, 99) for number in range(5))
    assert sum(admits(number, 99, 2) for number in range(5, 20)) <= 1


def test_the_pool_says_why() -> None:
    pool = ReplayBuffer(SharingConfig(), lambda: NOW, balance=Balance(lambda text: 1))
    pool.observe(honest(random.Random(0), 300))
    said = [pool.add(each) for each in honest(random.Random(1), 60)]
    assert said.count(None) > 50 and set(said) <= {None, "balance"}
    assert {pool.add(one("30", 9)) for _ in range(2)} == {None, "balance"}
    assert pool.metrics()["swarm/groups_waiting"] == said.count(None) + 1


STEPS: dict[str, Callable[[Sequence[int]], int]] = {
    "two tokens beyond the longest": lambda lengths: max(lengths) + 2,
    "one token beyond the longest": lambda lengths: max(lengths) + 1,
    "just below the longest twentieth": lambda lengths: sorted(lengths)[int(0.95 * len(lengths)) - 1],
    "just above the median": lambda lengths: sorted(lengths)[len(lengths) // 2] + 1,
}


@pytest.mark.parametrize("step", STEPS)
def test_lengths_do_not_creep(step: str) -> None:
    """A policy that writes as it is taught, and has no reason of its own to be brief: its own answers are as long as
    those that it took up lately. For 90 rounds liars send what the policy's lengths of then allow."""

    def after(balance: Balance | None) -> float:
        rng, ours = random.Random(0), LENGTHS * 5
        for _ in range(90):
            if balance is not None:
                balance.observe(honest(rng, 8, ours))
            lies = [one(rng.choice(ANSWERS), STEPS[step](ours)) for _ in range(4 * LIARS)]
            came = honest(rng, 4 * HONEST, ours) + lies
            taken = [each for each in rng.sample(came, len(came)) if balance is None or balance.admits(each)]
            for each in taken[:24]:
                ours[rng.randrange(len(ours))] = length(each)
        return fmean(ours) / fmean(LENGTHS)

    assert after(make()) < 1.3 < after(None)
