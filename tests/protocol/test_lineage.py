"""Up to which update two runs are one."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.lineage import (
    MAX_SEGMENTS,
    NO_RUN,
    Lineage,
    branch,
    check_lineage,
    leads_to,
    read_lineage,
    shared,
)


def run(*segments: tuple[str, int]) -> Lineage:
    return tuple((name.rjust(16, "0"), updates) for name, updates in segments)


A, B, C = ("a", 0), ("b", 40), ("c", 55)


@pytest.mark.parametrize(
    ("one", "other", "upto"),
    [
        (run(A), run(A), math.inf),
        (run(A, B, C), run(A, B, C), math.inf),
        (run(A), run(A, B), 40),  # one went on from the other
        (run(A), run(A, B, C), 40),
        (run(A, B), run(A, ("d", 50)), 40),  # two went on from one
        (run(A, B, C), run(A, B, ("d", 70)), 55),
        (run(A, B), run(A, ("d", 40)), 40),
        (run(A), run(("d", 0)), -1),
        (run(A), NO_RUN, -1),
        (NO_RUN, NO_RUN, math.inf),
        (run(B, C), run(A, B), 55),  # one has dropped what is too old
        (run(B, C), run(A, B, C), math.inf),
        (run(C, ("d", 60)), run(A, B), -1),  # and nothing that is left of it is known
        (run(A, ("b", 41)), run(A, B), 40),  # a lie
    ],
)
def test_runs_are_one_up_to_where_they_fork(one: Lineage, other: Lineage, upto: float) -> None:
    assert shared(one, other) == shared(other, one) == upto


def test_a_run_leads_to_its_continuations() -> None:
    assert leads_to(run(A), run(A, B)) and leads_to(run(A), run(A)) and leads_to(run(A, B), run(B, C))
    for one, other in ((run(A, B), run(A)), (run(A, B), run(A, C)), (run(A), run(("d", 0))), (NO_RUN, run(A))):
        assert not leads_to(one, other)


def test_going_back_leaves_later_branches() -> None:
    assert branch(NO_RUN, "d", 0) == (("d", 0),)
    assert branch(run(A, B, C), "d", 60) == (*run(A, B, C), ("d", 60))
    assert branch(run(A, B, C), "d", 40) == (*run(A, B), ("d", 40))
    assert branch(run(B, C), "d", 10) == (("d", 10),)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[Lineage, Lineage]]:
    """Runs that branch from one another: each with all its segments, and as it is told."""
    whole: list[Lineage] = [run(("0", 0))]
    told = list(whole)
    for number in range(1, draw(st.integers(1, 40))):
        parent = draw(st.integers(0, len(whole) - 1)) if draw(st.booleans()) else len(whole) - 1
        segment, updates = f"{number:016x}", whole[parent][-1][1] + draw(st.integers(0, 9))
        whole.append((*whole[parent], (segment, updates)))
        told.append(branch(told[parent], segment, updates))
    return list(zip(whole, told, strict=True))


@given(family=histories(), data=st.data())
def test_any_two_of_a_family(family: list[tuple[Lineage, Lineage]], data: st.DataObject) -> None:
    (one, told), (other, others) = (data.draw(st.sampled_from(family)) for _ in range(2))
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    rests = one[same:], other[same:]
    fork = min((updates for rest in rests for _, updates in rest[:1]), default=math.inf)
    assert shared(told, others) == shared(others, told)
    known = max(len(one), len(other)) - MAX_SEGMENTS < same  # both still tell a segment that they have in common
    assert shared(told, others) == (fork if known else -1)
    assert leads_to(told, others) == (known and not rests[0])
    assert len(told) <= MAX_SEGMENTS and told == one[-MAX_SEGMENTS:]
    check_lineage(told)


LINEAGES = st.lists(
    st.tuples(st.sampled_from([f"{number:016x}" for number in range(6)]), st.integers(0, 4)),
    max_size=6,
    unique_by=lambda segment: segment[0],
).map(lambda segments: tuple(sorted(segments, key=lambda segment: segment[1])))


@given(one=LINEAGES, other=LINEAGES)
def test_made_up_lineages_compare_alike_both_ways(one: Lineage, other: Lineage) -> None:
    check_lineage(one)
    assert shared(one, other) == shared(other, one)
    assert (leads_to(one, other) and leads_to(other, one)) == (shared(one, other) == math.inf)


@pytest.mark.parametrize("segments", [(B, A), (A, B, A), (A, ("a", 3)), (A, C, ("d", 54))])
def test_segments_are_in_order_and_each_is_another(segments: tuple[tuple[str, int], ...]) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        check_lineage(run(*segments))
    assert caught.value.reason == "run"


def test_lineages_are_read_from_json_alone() -> None:
    whole = tuple((f"{number:016x}", number) for number in range(MAX_SEGMENTS))
    for lineage in (run(A, B, C), whole, NO_RUN):
        assert read_lineage(msgspec.json.decode(msgspec.json.encode(lineage))) == lineage
    assert read_lineage("0123456789abcdef") == (("0123456789abcdef", 0),)
    bad: list[Any] = [None, 7, "red", "0" * 17, {}, [["red", 0]], [["a".rjust(16, "0"), -1]], [["a".rjust(16, "0")]]]
    for value in [*bad, [list(one) for one in run(B, A)], [*map(list, whole), ["f" * 16, 99]]]:
        assert read_lineage(value) == NO_RUN
