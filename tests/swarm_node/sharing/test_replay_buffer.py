"""The pool: bounds, shares, uses, ages, choices and what is recorded of them."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from swarm_node.config import SharingConfig
from swarm_node.errors import UserError
from swarm_node.sharing import ReplayBuffer
from swarm_node.sharing.replay_buffer import ROUNDS, draw
from tests.support.foreign_groups import NOW, group


class Clock:
    time = NOW

    def __call__(self) -> float:
        return self.time


def make(record=None, **options) -> tuple[ReplayBuffer, Clock]:
    clock = Clock()
    return ReplayBuffer(SharingConfig(**{"foreign": 4, "answers": 0} | options), clock, record), clock


def fill(pool: ReplayBuffer, n: int, peers: int = 1, **options) -> None:
    for i in range(n):
        assert pool.add(group(peer=f"peer{i % peers}", **options)) is None


def test_a_group_is_used_as_often_as_allowed():
    pool, clock = make(reuse=2)
    fill(pool, 1)
    clock.time += 5
    for _ in range(2):
        (chosen,) = pool.choose(4, random.Random(0))
        assert chosen.advantages == pytest.approx([0.7071, -0.7071], abs=1e-3)
        assert pool.metrics()["swarm/groups_used"] == 1 and pool.metrics()["swarm/staleness_mean"] == 5
    assert pool.choose(4, random.Random(0)) == [] and pool.available() == 0
    assert pool.metrics() == {"swarm/groups_used": 0.0, "swarm/groups_waiting": 0.0, "swarm/bytes_waiting": 0.0}
    assert pool.used_by_peer() == {"peer0": 2}


def test_known_own_success_sets_the_advantage():
    pool, _ = make()
    pool.observe([group([1.0] + [0.0] * 7, peer=None)] * 8)
    fill(pool, 1)
    assert pool.choose(1, random.Random(0))[0].advantages == pytest.approx([2.0, -0.125 / 0.3307], abs=1e-3)
    pool, _ = make(baseline="group")
    pool.observe([group([1.0] + [0.0] * 7, peer=None)] * 8)
    fill(pool, 1)
    assert pool.choose(1, random.Random(0))[0].advantages == pytest.approx([0.7071, -0.7071], abs=1e-3)


@pytest.mark.parametrize(("answers", "kept"), [(1, [1.0]), (2, [1.0, 0.0])])
@pytest.mark.parametrize(("known", "advantages"), [(True, {1.0: 0.5, 0.0: -0.5 / 3}), (False, {1.0: 1.5, 0.0: -0.5})])
def test_few_answers_keep_the_whole_groups_advantages(answers, kept, known, advantages):
    """By hand, of one right answer among three wrong ones: own success 0.8, or the group's mean 0.25 and spread 0.5."""
    pool, _ = make(answers=answers)
    if known:
        pool.observe([group([1.0, 1.0, 0.0, 1.0, 1.0], peer=None)] * 16)
    pool.add(group([1.0, 0.0, 0.0, 0.0]))
    (chosen,) = pool.choose(1, random.Random(0))
    assert [r.reward for r in chosen.rollouts] == kept
    assert chosen.advantages == pytest.approx([advantages[reward] for reward in kept], abs=1e-3)


def test_a_group_that_teaches_nothing_is_never_chosen():
    pool, _ = make()
    fill(pool, 2, peers=5, label="gcd")
    fill(pool, 3, peers=5, label="lcm")
    assert pool.available() == 5
    pool.observe([group([1.0] * 8, peer=None, label="gcd")] * 4)
    assert pool.available() == 3
    assert {g.task.label for g in pool.choose(9, random.Random(0))} == {"lcm"}


def test_old_groups_are_gone():
    pool, clock = make(max_age_s=60)
    fill(pool, 2)
    clock.time += 40
    fill(pool, 1, created=clock.time)
    assert pool.available() == 3
    clock.time += 30
    assert pool.available() == 1 and len(pool.choose(9, random.Random(0))) == 1
    assert pool.add(group(created=clock.time - 61)) == "age"


def test_a_flood_stays_within_bytes_and_share():
    pool, _ = make(max_bytes=2**20, peer_share=0.25)
    for i in range(20_000):
        pool.add(group(peer="flood" if i % 4 else f"peer{i % 32}", tokens=i % 50))
        metrics = pool.metrics()
        assert metrics["swarm/bytes_waiting"] <= 2**20
    waiting = Counter(g.peer for g in pool.choose(10_000, random.Random(0)))
    assert waiting["flood"] == 4 and waiting.total() == 16
    assert pool.metrics()["swarm/bytes_waiting"] == 0
    assert pool.add(group(tokens=2**14)) == "bytes"


def test_of_one_peers_large_groups_fewer_wait():
    pool, _ = make(max_bytes=2**20, peer_share=0.25)
    fill(pool, 12, tokens=2000)
    assert pool.metrics()["swarm/bytes_waiting"] <= 2**18 and 1 <= pool.available() < 4
    fill(pool, 4, peers=4, tokens=2000)
    assert pool.metrics()["swarm/bytes_waiting"] > 2**18


def test_only_the_newest_few_wait_however_they_arrive():
    pool, _ = make(foreign=3)
    for age in random.Random(0).sample(range(60), 60):
        pool.add(group(peer=f"peer{age % 10}", created=NOW - age))
    assert sorted(NOW - g.created for g in pool.choose(99, random.Random(0))) == list(range(3 * ROUNDS))


def test_a_greedy_peer_makes_room_for_others():
    pool, _ = make(foreign=4, peer_share=0.25)
    for age in random.Random(0).sample(range(40), 40):
        pool.add(group(peer="greedy", created=NOW - age))
    assert pool.available() == 4 * ROUNDS  # nobody else wants the room
    for i in range(3):
        for age in range(4):
            pool.add(group(peer=f"other{i}", created=NOW - 100 - age))
    chosen = pool.choose(99, random.Random(0))
    assert Counter(g.peer for g in chosen) == {"greedy": 4, "other0": 4, "other1": 4, "other2": 4}
    assert sorted(NOW - g.created for g in chosen if g.peer == "greedy") == [0, 1, 2, 3]


def test_with_short_rounds_groups_last_between_messages():
    pool, clock = make(foreign=4)
    for _ in range(20):  # ten rounds a second
        clock.time += 0.1
        pool.choose(4, random.Random(0))
    for age in range(200):
        pool.add(group(created=clock.time - age))
    assert 4 * 18 <= pool.available() <= 4 * 20


def test_uniform_chooses_evenly_and_repeats_itself():
    counts: Counter[str | None] = Counter()
    for seed in range(3000):
        pool, _ = make()
        fill(pool, 6, peers=6)
        counts.update(g.peer for g in pool.choose(2, random.Random(seed)))
    assert all(n == pytest.approx(1000, rel=0.1) for n in counts.values())
    first, second = ([g.created for g in made.choose(4, random.Random(1))] for made in [_spread(), _spread()])
    assert first == second and len(set(first)) == 4


def _spread() -> ReplayBuffer:
    pool, _ = make()
    for i in range(9):
        pool.add(group(peer=f"p{i}", created=NOW - i))
    return pool


def test_a_custom_sampler_sees_own_failures():
    records = []
    pool, _ = make(records.append, sampler="benchmarks.samplers:aha", baseline="group")
    pool.observe([group([0.0] * 8, peer=None, label="hard")] * 8 + [group([1.0] * 8, peer=None, label="easy")] * 8)
    pool.add(group([1.0, 0.0], label="hard"))
    pool.add(group([0.0, -1.0], label="hard"))  # nothing that this node does not do itself
    pool.add(group([1.0, 0.0], label="easy"))
    pool.add(group([1.0, 0.0], label="new"))
    pool.choose(1, random.Random(0))
    hard, as_usual, easy, new = (offer["weight"] for offer in records[0]["offered"])
    assert hard > 10 * new > 50 * easy and as_usual == 1.0 and easy == pytest.approx(1.0, abs=0.1)


def test_draws_have_the_probabilities_they_report():
    weights = [1.0, 2.0, 0.0, 5.0]
    assert draw(weights, 9, random.Random(0)).__len__() == 3
    counts: Counter[tuple[int, ...]] = Counter()
    reported = {}
    for seed in range(8000):
        drawn = draw(weights, 2, random.Random(seed))
        counts[tuple(i for i, _ in drawn)] += 1
        reported[tuple(i for i, _ in drawn)] = drawn[0][1] * drawn[1][1]
    assert sum(reported.values()) == pytest.approx(1.0)
    assert reported[3, 1] == pytest.approx(5 / 8 * 2 / 3)
    for which, n in counts.items():
        assert n / 8000 == pytest.approx(reported[which], abs=0.02)


def test_offered_and_chosen_groups_are_recorded():
    records = []
    pool, clock = make(records.append)
    fill(pool, 3, peers=3)
    clock.time += 2
    chosen = pool.choose(2, random.Random(0))
    (record,) = records
    assert record["time"] == NOW + 2 and record["wanted"] == 2
    assert record["offered"][1] == {
        "id": 1,
        "peer": "peer1",
        "label": "gcd",
        "slot": (1, 2),
        "rollouts": 2,
        "best": 1.0,
        "age": 2.0,
        "uses": 0,
        "own_reward": None,
        "own_answers": 0.0,
        "weight": 1.0,
    }
    assert [f"peer{c['id']}" for c in record["chosen"]] == [g.peer for g in chosen]
    assert [c["probability"] for c in record["chosen"]] == pytest.approx([1 / 3, 1 / 2])


def test_a_sampler_of_the_users_own(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def largest(offers):\n"
        "    sizes = [len(offer.group.rollouts) for offer in offers]\n"
        "    return [float(size == max(sizes)) for size in sizes]\n"
        "def few(offers): return [1.0]\n"
        "def negative(offers): return [-1.0 for _ in offers]\n"
        "def broken(offers): return offers.nothing\n"
    )
    pool, _ = make(sampler=f"{tmp_path}/mine.py:largest")
    for n in (2, 5, 3):
        pool.add(group([1.0] + [0.0] * (n - 1)))
    assert [len(g.rollouts) for g in pool.choose(3, random.Random(0))] == [5]
    for name, message in (("few", "must give 2"), ("negative", "finite weights"), ("broken", "AttributeError")):
        pool, _ = make(sampler=f"{tmp_path}/mine.py:{name}")
        fill(pool, 2)
        with pytest.raises(UserError, match=message):
            pool.choose(1, random.Random(0))
    with pytest.raises(UserError, match="sharing.sampler .*no function 'nothing'"):
        make(sampler=f"{tmp_path}/mine.py:nothing")
