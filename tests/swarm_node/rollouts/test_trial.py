"""Which weights a newcomer goes on with."""

from __future__ import annotations

import math

import pytest

from swarm_node.rollouts.trial import Standing


def of(right: int, loss: float | None, answers: int = 32) -> Standing:
    return Standing([1.0] * right + [0.0] * (answers - right), loss)


@pytest.mark.parametrize(
    ("theirs", "own", "worse"),
    [
        (of(20, 4.0), of(7, 1.0), False),  # a cohort that has learned to write another form
        (of(7, 1.05), of(7, 1.0), False),
        (of(6, 1.0), of(7, 1.0), False),  # chance
        (of(7, 1.2), of(7, 1.0), True),
        (of(0, 1.0), of(7, 1.0), True),  # no answer of it ends, for example
        (of(0, 11.7), of(7, 4.0), True),  # flattened: a little better than chance in a vocabulary of 151,000
        (of(0, 11.7), of(0, 4.0), True),  # a newcomer without a right answer
        (of(1, 11.7), of(0, 4.0), True),  # one by luck
        (of(3, 11.7), of(0, 4.0), False),
        (of(0, 4.3), of(0, 4.0), False),  # a tenth of a large loss, where nobody earns anything
        (of(0, math.nan), of(0, 4.0), True),
        (of(20, None), of(7, None), False),
        (of(8, None), of(7, None), True),  # without references nothing else speaks for it
        (of(0, None), of(0, None), True),
        (Standing([], 1.0), Standing([], 1.0), False),
        (Standing([], None), Standing([], None), True),
    ],
)
def test_what_earns_more_or_no_less_is_taken_over(theirs: Standing, own: Standing, worse: bool) -> None:
    assert theirs.worse_than(own) is worse
