"""Who taught a node which kinds of task, and what became of its own success on them."""

from __future__ import annotations

import msgspec
import pytest

from swarm_node.observability.worth import WINDOW, Change, Worth, worth_in_brief, worth_lines, worth_metrics
from swarm_node.sharing.teaching import LATEST, Teaching
from swarm_node.types import Group, Rollout, Task, Turn
from swarm_protocol.messages import TaskName


def group(kind: str, right: int, wrong: int = 0, index: int = 0, peer: str | None = None) -> Group:
    task = Task(TaskName(kind, "0" * 16, "test 1", 0, index), kind, "?", "!")
    rollouts = [Rollout([Turn([1], [0.0], True)], reward=float(c), correct=c) for c in [True] * right + [False] * wrong]
    return Group(task, [1], rollouts, peer=peer)


def trained(right: tuple[int, int] = (0, 4)) -> Teaching:
    """A node that failed at `gcd` until others taught it, and got from 1 to 2 of 4 at `lcm` by itself."""
    teaching = Teaching()
    for i, now in enumerate([0] * (WINDOW // 2) + [1] * (WINDOW // 2)):
        own = [group("gcd", right[now], 4 - right[now]), group("lcm", 1 + now, 3 - now)]
        teaching.observe(own)
        teaching.learned_from([*own, group("gcd", 1, index=i, peer="bob")])
    return teaching


def test_success_is_told_by_who_taught_the_kind() -> None:
    by_others, by_itself = trained().changes()
    assert by_others is not None and by_itself is not None
    assert (by_others.kinds, by_others.first, by_others.now) == (["gcd"], 0.0, 1.0)
    assert (by_itself.kinds, by_itself.first, by_itself.now) == (["lcm"], 0.25, 0.5)


def test_a_kind_taught_more_by_its_own_answers_is_its_own() -> None:
    by_others, by_itself = trained(right=(1, 2)).changes()
    assert by_others is None and by_itself is not None and by_itself.kinds == ["gcd", "lcm"]


@pytest.mark.parametrize("right", [(0, 4), (1, 2)])
def test_success_is_silent_where_nobody_else_taught(right: tuple[int, int]) -> None:
    by_others, by_itself = trained(right).changes()
    lines = list(worth_lines(Worth(by_others=by_others, by_itself=by_itself)))
    assert len(lines) == (0 if by_others is None else 2)


def test_groups_learned_from_are_told_by_origin() -> None:
    teaching = trained()  # of gcd, all own groups are wrong at first and right later: nothing to learn
    own, others = teaching.learned
    assert (own, others) == (WINDOW, WINDOW)
    teaching.observe([group("gcd", 1, 1)])
    assert teaching.learned == (WINDOW, WINDOW), "no update was made of it"
    teaching.learned_from([group("gcd", 1, 1)])
    assert teaching.learned == (WINDOW + 1, WINDOW)
    worth = Worth(own_groups=10, others_groups=30)
    assert list(worth_lines(worth)) == ["others gave 30 of the 40 groups it learned from (75%)"]
    assert worth_metrics(worth) == {"swarm/learned_own": 10.0, "swarm/learned_others": 30.0}
    assert list(worth_lines(Worth(others_groups=30))) == ["others gave all of the 30 groups it learned from"]
    assert list(worth_lines(Worth(own_groups=10))) == []


def test_own_held_out_stands_beside_that_of_members() -> None:
    alone = Worth(pass_1=0.4, pass_1_before=0.2)
    assert list(worth_lines(alone)) == ["held-out pass@1 0.200 -> 0.400"]
    assert list(worth_lines(alone, summary=True)) == []
    beside = msgspec.structs.replace(alone, theirs=[0.3])
    assert list(worth_lines(beside, summary=True)) == [
        "held-out pass@1 0.200 -> 0.400; 1 member says 0.300 (self-declared)"
    ]


def test_what_the_swarm_gave_is_said_in_brief() -> None:
    others, itself = Change(["gcd"], 0.1, 0.6), Change(["lcm"], 0.2, 0.3)
    worth = Worth(own_groups=10, others_groups=30, by_others=others, by_itself=itself, unsolved=1, used_by_others=5)
    assert list(worth_in_brief(worth)) == [
        "others gave 30 of the 40 groups it learned from (75%); 1 question only others solved",
        "success where others taught it 0.100 -> 0.600, where it taught itself 0.200 -> 0.300",
        "others trained on at least 5 of its groups (self-declared)",
    ]


def test_what_others_used_is_said_after_they_left() -> None:
    assert list(worth_lines(Worth(used_by_others=674))) == [
        "others trained on at least 674 of its groups (self-declared)"
    ]
    of_two, of_many = (Worth(used_by_others=674, share_of_used=share, declaring=2) for share in (1.0, 0.5))
    assert list(worth_lines(of_two)) == list(worth_lines(Worth(used_by_others=674)))
    assert ", 50% of what 2 members took from others lately (self-declared)" in next(worth_lines(of_many))
    assert worth_metrics(Worth(used_by_others=674)) == {"swarm/declared_used": 674.0}


def test_few_groups_say_nothing_of_success() -> None:
    teaching = Teaching()
    teaching.observe([group("gcd", 1, 3)] * (2 * WINDOW - 1))
    assert teaching.changes() == (None, None)


@pytest.mark.parametrize(
    ("own", "foreign", "counts"),
    [
        ([("gcd", 0)], [("gcd", 1)], 1),
        ([("gcd", 1)], [("gcd", 1)], 0),
        ([("gcd", 0)], [("gcd", 0)], 0),
        ([("lcm", 0)], [("gcd", 1)], 0),
        ([("gcd", 1)] + [("gcd", 0)] * LATEST, [("gcd", 1)], 1),
        ([("gcd", 1)] + [("gcd", 0)] * (LATEST - 1), [("gcd", 1)], 0),
        ([("gcd", 0)], [("gcd", 1), ("gcd", 1)], 1),
    ],
    ids=["unsolved", "solved here", "wrong there", "never asked here", "forgotten", "remembered", "twice"],
)
def test_questions_that_only_others_solved(
    own: list[tuple[str, int]], foreign: list[tuple[str, int]], counts: int
) -> None:
    teaching = Teaching()
    teaching.observe([group(kind, right, 4 - right) for kind, right in own])
    teaching.learned_from([group(kind, right, 1, index=7, peer="bob") for kind, right in foreign])
    assert teaching.unsolved == counts


def test_a_checkpoint_keeps_the_counts() -> None:
    before, after = trained(), Teaching()
    after.load(msgspec.json.decode(msgspec.json.encode(before.state())))
    assert after.changes() == before.changes() and after.unsolved == before.unsolved > 0
    with pytest.raises(msgspec.ValidationError):
        after.load(None)
    assert after.changes() == before.changes()
