"""Who gets which stage."""

from __future__ import annotations

import random
from itertools import permutations
from math import inf

import pytest

from swarm_node.pipeline.membership.following import adjacent
from swarm_node.pipeline.membership.planning import Claim, fill, neighbour, relief

COSTS = [3, 1, 2, 2]


def test_explicit_wishes_come_before_those_who_take_any():
    claims = [Claim("a"), Claim("b", wanted=1), Claim("c", wanted=2), Claim("d")]
    assert fill([1, 2, 3], claims, COSTS) == {1: "b", 2: "c", 3: "a"}


def test_the_earlier_of_two_equal_wishes_counts():
    assert fill([1, 2], [Claim("b", wanted=1), Claim("a", wanted=1)], COSTS) == {1: "b", 2: "a"}


def test_a_holder_comes_first_and_may_keep_several():
    claims = [Claim("a", wanted=1), Claim("b", live={1: 40, 2: 40}), Claim("c", live={1: 41})]
    assert fill([1, 2], claims, COSTS) == {1: "c", 2: "b"}
    assert fill([1, 2], claims[:2], COSTS) == {1: "b", 2: "b"}


def test_a_checkpoint_draws_its_owner():
    claims = [Claim("a", stored={3: 10}), Claim("b", stored={1: 10, 2: 20}), Claim("c")]
    assert fill([1, 2, 3], claims, COSTS) == {3: "a", 2: "b", 1: "c"}


def test_stages_nobody_has_room_for_stay_vacant():
    assert fill([0, 1], [Claim("a", room=2), Claim("b", room=0)], COSTS) == {1: "a"}
    assert fill([1], [Claim("a", unable={1})], COSTS) == {}
    assert fill([1], [], COSTS) == {}


def test_the_first_comer_moves_to_make_room():
    claims = [Claim("large", room=3), Claim("small", room=1)]
    assert fill([0, 1], claims, COSTS) == {0: "large", 1: "small"}


@pytest.mark.parametrize("seed", range(20))
def test_as_many_stages_are_held_as_can_be(seed):
    """Against all ways to deal peers to stages."""
    rng = random.Random(seed)
    costs = [rng.randint(1, 5) for _ in range(5)]
    claims = [Claim(f"p{i}", room=rng.randint(0, 5)) for i in range(5)]
    seats = fill(range(5), claims, costs)
    assert len(set(seats.values())) == len(seats)
    by_name = {claim.peer: claim for claim in claims}
    assert all(by_name[peer].fits(stage, costs) for stage, peer in seats.items())
    best = max(
        sum(claim.fits(stage, costs) for claim, stage in zip(claims, way, strict=True))
        for way in permutations(range(5))
    )
    assert len(seats) == best


def test_higher_stages_open_the_channels_to_neighbours():
    seats = ["a", "b", "c", "d", "e"]
    assert adjacent(seats, "c", 1) == {"b": True, "d": False}
    assert adjacent(seats, "c", 2) == {"b": True, "d": False, "e": False}  # the lead has channels with all
    assert adjacent(seats, "a", 1) == adjacent(seats, "spare", 1) == {}
    assert adjacent(["a", "b", "c", "b", "e"], "b", 1) == {"c": True, "e": False}
    assert adjacent(["a", "b", "c", "b", "e"], "c", 1) == {"b": False}


def test_the_neighbour_with_more_room_takes_a_stage():
    seats = ["a", "", "c"]
    assert neighbour(1, seats, {"a": 5, "c": 6}, 2) == "c"
    assert neighbour(1, seats, {"a": 6, "c": 6}, 2) == "a"
    assert neighbour(1, seats, {"a": inf, "c": 6}, 2) == "a"
    assert neighbour(1, seats, {"a": 1, "c": inf}, 2) == "c"
    assert neighbour(1, seats, {"a": 1, "c": 1}, 2) is None
    assert neighbour(2, ["a", "b", ""], {"a": 9, "b": 2}, 2) == "b"
    assert neighbour(1, ["a", "", "", "d"], {"a": 0, "d": 9}, 1) is None  # d is no neighbour of it


def test_a_newcomer_relieves_the_busiest_of_later_stages():
    spare = [Claim("s")]
    assert relief(["a", "b", "b", "a", "a"], spare, [1] * 5) == (4, "s")
    assert relief(["a", "b", "b", "a", "a"], [Claim("s", wanted=3)], [1] * 5) == (3, "s")
    assert relief(["a", "a", "b"], spare, [1] * 3) == (1, "s")
    assert relief(["a", "b", "c"], spare, [1] * 3) is None
    assert relief(["a", "a"], [Claim("s", room=0)], [1, 1]) is None
    assert relief(["a", "a"], [], [1, 1]) is None
