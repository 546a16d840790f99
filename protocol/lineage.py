"""Of which run weights are: runs branch, and their counts of updates overlap from there on.

    a begins ------------ 40 -- a goes on --- 70        ((a, 0),)
                            \\-- b begins --- 55         ((a, 0), (b, 40))
                                              \\-- c     ((a, 0), (b, 40), (c, 55))

Whoever begins to lead a crew begins a segment of its run, after the update that the crew goes on from. So two parts of
a crew that each go on alone have other runs from then on, and what one has made counts for the other only up to the
fork. What is of segments that were dropped since, because a lineage has only so many, does not count any more.
"""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from protocol.errors import RemoteProtocolError
from protocol.messages import Count, Hash16

MAX_SEGMENTS: Final = 16
"""Of a run, the last ones."""
AHEAD: Final = 1
"""What is in memory may be so many updates ahead of the crew: stages make an update one after the other."""

Lineage = Annotated[tuple[tuple[Hash16, Count], ...], Meta(max_length=MAX_SEGMENTS)]
"""Segments of a run, oldest first: an id, drawn at random, and the update after which it began."""
NO_RUN: Final[Lineage] = ()
"""Of peers that have yet to learn which run their crew's is."""


def shared(one: Lineage, other: Lineage) -> float:
    """Up to which update two runs are the same: all (inf) if they are one, none (-1) if they have no segment in
    common."""
    rests = _after_common(one, other)
    return -1 if rests is None else min((rest[0][1] for rest in rests if rest), default=math.inf)


def leads_to(one: Lineage, other: Lineage) -> bool:
    """Whether `other` is `one`, or goes on from it."""
    rests = _after_common(one, other)
    return rests is not None and not rests[0]


def branch(run: Lineage, segment: str, updates: int) -> Lineage:
    """The run that goes on from `run` after so many updates."""
    kept = tuple(one for one in run if one[1] <= updates)
    return (*kept[1 - MAX_SEGMENTS :], (segment, updates))


def check_lineage(run: Lineage) -> None:
    """Raises RemoteProtocolError `run` unless segments have ids of their own and none begins before an earlier one."""
    if len({segment for segment, _ in run}) < len(run) or any(a[1] > b[1] for a, b in pairwise(run)):
        raise RemoteProtocolError("run", f"segments {run}")


def read_lineage(value: object) -> Lineage:
    """As JSON gives it back; empty if it is none. A run of an older version was one segment, and just its id."""
    if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{16}", value):
        return ((value, 0),)
    try:
        run = msgspec.convert(value, Lineage)
        check_lineage(run)
    except (msgspec.ValidationError, RemoteProtocolError):
        return NO_RUN
    return run


def _after_common(one: Lineage, other: Lineage) -> tuple[Lineage, Lineage] | None:
    """What follows the segments that both have; `None` if there are none. Either may lack the oldest of the other's."""
    if one == other:
        return (), ()
    if not one or not other:
        return None
    if other[0] in one:
        one = one[one.index(other[0]) :]
    elif one[0] in other:
        other = other[other.index(one[0]) :]
    else:
        return None
    common = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[common:], other[common:]
