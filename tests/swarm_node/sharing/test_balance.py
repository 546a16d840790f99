"""Right answers that do harm: which questions they answer, and how long they are."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from statistics import fmean

import msgspec
import pytest

from swarm_node.config import SharingConfig
from swarm_node.sharing import Balance, ReplayBuffer
from swarm_node.sharing.balance import LEAST, PLACES, SPARE
from swarm_node.types import Group
from tests.support.foreign_groups import NOW, group

ANSWERS = ["1"] * 12 + ["2"] * 10 + ["3"] * 10 + [str(i) for i in range(4, 72)]  # of a hundred tasks
LENGTHS = [2] * 60 + [3] * 25 + [4] * 10 + [5] * 5  # of a hundred right answers, in tokens
HONEST, LIARS = 7, 3  # of ten groups that come
Lie = Callable[[random.Random], Group]


def one(answer: str | None, length: int, kind: str = "gcd", rewards: Sequence[float] = (1.0, 0.0)) -> Group:
    made = group(rewards, tokens=length, label=kind)
    return msgspec.structs.replace(made, task=msgspec.structs.replace(made.task, answer=answer))


def honest(rng: random.Random, n: int, lengths: Sequence[int] = LENGTHS) -> list[Group]:
    return [one(rng.choice(ANSWERS), rng.choice(lengths)) for _ in range(n)]


def make(own: Sequence[Group] | None = None) -> Balance:
    balance = Balance(lambda text: 1)
    balance.observe(honest(random.Random(0), 600) if own is None else own)
    return balance


def admitted(lie: Lie, part: float = LIARS / (HONEST + LIARS), n: int = 4000) -> list[Group]:
    """What is admitted of `n` groups, of which `part` are lies."""
    rng, balance = random.Random(1), make()
    came = [lie(rng) if rng.random() < part else honest(rng, 1)[0] for _ in range(n)]
    return [each for each in came if balance.admits(each)]


def share(groups: Sequence[Group], of: Callable[[Group], bool]) -> float:
    return fmean(of(each) for each in groups)


def length(made: Group) -> int:
    return len(made.rollouts[0].token_ids)


@pytest.mark.parametrize("part", [0.3, 0.8])
@pytest.mark.parametrize("answers", [["3"], ["2", "3"], ["1", "2", "3"], ["70", "71"]])
def test_an_answer_has_no_more_room_than_among_own_tasks(answers: list[str], part: float) -> None:
    """Liars send one answer, or several; they may send far more than all others, with as many keys as they like."""
    own = share([one(answer, 2) for answer in ANSWERS], lambda made: made.task.answer in answers)
    keys = count()
    found = admitted(
        lambda rng: msgspec.structs.replace(one(rng.choice(answers), rng.choice(LENGTHS)), peer=f"key {next(keys)}"),
        part,
    )
    assert share(found, lambda made: made.task.answer in answers) < own + 0.04 * len(answers)


@pytest.mark.parametrize("part", [0.3, 0.8])
@pytest.mark.parametrize("long", [3, 4, 5, 6, 14])
def test_a_length_has_no_more_room_than_among_own_right_answers(long: int, part: float) -> None:
    """Also lengths at and just below the longest, of liars who know own lengths."""
    own = fmean(n >= long for n in LENGTHS)
    found = admitted(lambda rng: one(rng.choice(ANSWERS), long), part)
    assert share(found, lambda made: length(made) >= long) < own + 0.08


@pytest.mark.parametrize("peers", [["flood"], [f"fresh {i}" for i in range(10)]])
def test_no_number_of_groups_or_keys_makes_room(peers: list[str]) -> None:
    """One key with 80 % of all groups, or ten new ones, each with no more than an honest peer: long right answers to
    questions with one answer."""
    rng, balance = random.Random(2), make()
    lies = [msgspec.structs.replace(one("3", 40), peer=rng.choice(peers)) for _ in range(1600)]
    came = [*honest(rng, 400), *lies]
    found = [each for each in rng.sample(came, len(came)) if balance.admits(each)]
    assert sum(each.peer in peers for each in found) < 10 < 350 < len(found)


def test_honest_groups_are_admitted_as_before() -> None:
    found = admitted(lambda rng: honest(rng, 1)[0], n=2000)
    assert len(found) > 0.93 * 2000
    assert fmean(map(length, found)) == pytest.approx(fmean(LENGTHS), rel=0.03)


def test_where_nothing_is_known_all_are_admitted() -> None:
    balance = Balance(lambda text: 1)
    came = [one("3", 9) if n % 2 else each for n, each in enumerate(honest(random.Random(1), 200))]
    balance.observe(honest(random.Random(0), LEAST - 1))
    assert all(map(balance.admits, came))
    balance.observe(honest(random.Random(0), 1))
    assert sum(balance.admits(each) for each in came[1::2]) <= PLACES + 1


def test_tasks_without_a_reference_answer_differ_in_length_only() -> None:
    balance = make([one(None, length(each)) for each in honest(random.Random(0), 300)])
    assert all(balance.admits(one(None, 2)) for _ in range(100))
    assert sum(balance.admits(one(None, 9)) for _ in range(40)) <= PLACES + 1


@pytest.mark.parametrize("others", [0, 8])
def test_a_specialist_hears_the_other_kinds_a_little(others: int) -> None:
    """Also one whose kind nobody else draws."""
    balance, rng, heard = make(), random.Random(3), 0
    for _ in range(100):
        balance.observe(honest(rng, 8))
        choices = [one(rng.choice("ABCD"), rng.choice([9, 40]), "choice") for _ in range(8)]
        came = honest(rng, others) + choices
        heard += sum(balance.admits(each) and each.task.label == "choice" for each in rng.sample(came, len(came)))
    assert 0.9 * 800 / SPARE < heard < 800 / SPARE + 4 + 6 * others
    assert sum(balance.admits(one("3", 2)) for _ in range(200)) < 40, "own kinds have the room they had"


def rare(answer: str, length: int, kind: str = "riddle") -> Group:
    return one(answer, length, kind)


RARE_LIES: dict[str, Lie] = {
    "one answer": lambda rng: rare("3", 2),
    "at length": lambda rng: rare(rng.choice(ANSWERS), 40),
    "like honest ones": lambda rng: rare(rng.choice(ANSWERS), rng.choice(LENGTHS)),
    "many kinds": lambda rng: rare("3", 40, f"kind {rng.randrange(10)}"),
}


def of_two_kinds(rng: random.Random, n: int, part: float) -> list[Group]:
    """Honest groups, of which `part` are of the rare kind."""
    made = honest(rng, n)
    return [rare(each.task.answer or "", length(each)) if rng.random() < part else each for each in made]


@pytest.mark.parametrize("own", [0.0, 0.02])
@pytest.mark.parametrize("part", [0.3, 0.8])
@pytest.mark.parametrize("lie", RARE_LIES)
def test_a_kind_with_few_own_tasks_is_no_way_round(lie: str, part: float, own: float) -> None:
    """Senders choose the kind: liars send nothing but one that has 2 % of all tasks, or none of this node's."""
    rng = random.Random(9)
    balance = make(of_two_kinds(rng, 600, own))
    truth = of_two_kinds(rng, 700, own)
    lies = [msgspec.structs.replace(RARE_LIES[lie](rng), peer="liar") for _ in range(int(700 * part / (1 - part)))]
    came = rng.sample(truth + lies, len(truth) + len(lies))
    found = [each for each in came if balance.admits(each)]
    rest = [each for each in found if each.task.label != "gcd"]
    assert len(rest) < 0.06 * len(found)
    assert sum(each.task.answer == "3" for each in rest) < 0.015 * len(found)
    assert sum(length(each) == 40 for each in rest) < 0.006 * len(found)
    assert sum(each.peer != "liar" for each in found) > 0.9 * len(truth)


def test_honest_groups_of_a_rare_kind_are_admitted() -> None:
    rng = random.Random(10)
    balance = make(of_two_kinds(rng, 1000, 0.02))
    came = of_two_kinds(rng, 1500, 0.02)
    found = [each for each in came if balance.admits(each)]
    assert len(found) > 0.93 * len(came)
    kinds = [Counter(each.task.label for each in groups)["riddle"] for groups in (came, found)]
    assert kinds[1] > 0.9 * kinds[0] > 20


def test_kinds_have_answers_and_lengths_of_their_own() -> None:
    """A node that draws two kinds hears specialists of one of them, whose answers are few and long."""
    rng = random.Random(4)
    balance = make([*honest(rng, 300), *(one(rng.choice(["yes", "no"]), 40, "riddle") for _ in range(300))])
    riddles = [one(rng.choice(["yes", "no"]), 40, "riddle") for _ in range(1000)]
    assert sum(map(balance.admits, riddles)) > 930
    assert sum(balance.admits(one(rng.choice(ANSWERS), 40)) for _ in range(200)) <= 8, "long in the other kind"
    assert sum(balance.admits(one("yes", 2)) for _ in range(50)) <= 4, "an answer of the other kind"


def test_an_answer_takes_no_room_from_one_kind_for_another() -> None:
    """The liars' answer is common over all; they answer it in the kind in which it is rare."""
    rng = random.Random(5)
    bits = [one(rng.choice("123456"), 2, "bits") for _ in range(600)]
    balance = make([*honest(rng, 300), *bits[:300]])
    came = [*honest(rng, 300), *bits[300:], *(one("3", 2) for _ in range(600))]
    found = [each for each in rng.sample(came, len(came)) if balance.admits(each)]
    threes = Counter(each.task.label for each in found if each.task.answer == "3")
    kinds = Counter(each.task.label for each in found)
    assert threes["gcd"] / kinds["gcd"] < 0.1 + 0.08
    assert threes.total() / kinds.total() < 0.14 + 0.04


def test_kinds_with_few_tasks_count_as_one() -> None:
    rng = random.Random(6)
    own = [one(rng.choice(ANSWERS), 2, f"kind {i % 100}") for i in range(1000)]
    balance = make(own)
    came = [one("3" if i % 2 else rng.choice(ANSWERS), 2, f"kind {rng.randrange(100)}") for i in range(1000)]
    assert share([each for each in came if balance.admits(each)], lambda made: made.task.answer == "3") < 0.15


def test_an_answer_that_no_task_had_is_rare_though_few_groups_teach() -> None:
    rng = random.Random(7)
    own = [one(str(rng.randrange(9999)), 2, rewards=(1.0, 0.0) if i < LEAST else (0.0, 0.0)) for i in range(1024)]
    balance = make(own)
    came = [one("rare" if i % 2 else str(rng.randrange(9999)), 2) for i in range(1800)]
    found = [each for each in came if balance.admits(each)]
    assert len(found) > 880 and sum(each.task.answer == "rare" for each in found) <= 4


def test_a_node_whose_groups_hardly_teach_knows_its_lengths() -> None:
    own = [
        msgspec.structs.replace(each, rollouts=[each.rollouts[0]] * 2) for each in honest(random.Random(0), 8 * LEAST)
    ]
    balance = make(own)
    assert sum(map(balance.admits, honest(random.Random(1), 400))) > 370
    assert sum(balance.admits(one(str(i), 40)) for i in range(4, 72)) <= PLACES + 1
    wrong = make([one(str(i), 40, rewards=(0.0, 0.0)) for i in range(4, 72)])
    assert all(wrong.admits(one(str(i), 9)) for i in range(4, 72)), "its own answers are all wrong"


def test_longer_answers_are_heard_a_little() -> None:
    """Four peers of ten answer at length, or all do: a node whose answers are short hears some of it as it trains."""
    for part in (0.4, 1.0):
        balance, rng = make(), random.Random(8)
        long = 0
        for _ in range(100):
            balance.observe(honest(rng, 8))
            came = [one(rng.choice(ANSWERS), 40) if rng.random() < part else honest(rng, 1)[0] for _ in range(24)]
            long += sum(balance.admits(each) and length(each) == 40 for each in came)
        assert 0.9 * 800 / SPARE < long < 800 / SPARE + 20


def test_a_resumed_node_knows_its_proportions() -> None:
    before, after = make(), Balance(lambda text: 1)
    after.load(json.loads(json.dumps(before.state())))
    assert after.state() == before.state() and len(json.dumps(before.state())) < 60_000
    assert sum(after.admits(one("3", 9)) for _ in range(50)) <= PLACES
    for wrong in ({"asked": [["gcd", 1, 256]]}, {"asked": [["gcd", "3"]]}, None):
        with pytest.raises(msgspec.ValidationError):
            Balance(lambda text: 1).load(wrong)


def test_the_mean_of_the_right_answers_of_a_group_counts() -> None:
    balance = make()
    for each in honest(random.Random(1), 200):
        balance.admits(each)

    def admits(number: int, right: int, wrong: int) -> bool:
        made = group([1.0, 1.0, 0.0])
        made.rollouts[0].turns[0].token_ids, made.rollouts[2].turns[0].token_ids = [5] * right, [5] * wrong
        task = msgspec.structs.replace(made.task, answer=str(10 + number))
        return balance.admits(msgspec.structs.replace(made, task=task))

    assert all(admits(number, 2, 99) for number in range(5))
    assert sum(admits(number, 99, 2) for number in range(5, 20)) <= PLACES + 1


def test_the_pool_says_why() -> None:
    pool = ReplayBuffer(SharingConfig(), lambda: NOW, balance=Balance(lambda text: 1))
    pool.observe(honest(random.Random(0), 300))
    said = [pool.add(each) for each in honest(random.Random(1), 60)]
    assert said.count(None) > 50 and set(said) <= {None, "balance"}
    longer = [pool.add(one(str(30 + i), 9)) for i in range(PLACES + 3)]
    assert 0 < longer.count(None) <= PLACES + 1 and set(longer) == {None, "balance"}
    assert pool.metrics()["swarm/groups_waiting"] == (said + longer).count(None)


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
