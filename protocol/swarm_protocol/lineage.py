"""The run that weights belong to. Runs branch, and from there on their counts of updates overlap.

    a begins ------------ 40 -- a goes on --- 70        ((a, 0),)
                            \\-- b begins --- 55         ((a, 0), (b, 40))
                                              \\-- c     ((a, 0), (b, 40), (c, 55))

A peer that becomes leader of a crew begins a new segment of the run, after the crew's last update. If a crew splits and
both parts go on, their runs differ from then on, and each part's updates count for the other only up to the fork. A
lineage keeps a limited number of segments; weights of segments that were dropped no longer count.
"""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.messages import Count, Hash16

MAX_SEGMENTS: Final = 16  # number of a run's latest segments that are kept
AHEAD: Final = 1
"""Weights in memory may be this many updates ahead of the crew, because stages update one after the other."""

Lineage = Annotated[tuple[tuple[Hash16, Count], ...], Meta(max_length=MAX_SEGMENTS)]
"""Segments of a run, oldest first: an id, drawn at random, and the update after which it began."""
NO_RUN: Final[Lineage] = ()  # the run of a peer that does not know its crew's run yet


def shared(one: Lineage, other: Lineage) -> float:
    """The update up to which two runs are the same: inf if they are one run, -1 if they have no segment in common."""
    rests = _after_common(one, other)
    return -1 if rests is None else min((rest[0][1] for rest in rests if rest), default=math.inf)


def leads_to(one: Lineage, other: Lineage) -> bool:
    """Whether `other` is `one`, or continues it."""
    rests = _after_common(one, other)
    return rests is not None and not rests[0]


def branch(run: Lineage, segment: str, updates: int) -> Lineage:
    """The run that goes on from `run` after so many updates."""
    kept = tuple(one for one in run if one[1] <= updates)
    return (*kept[1 - MAX_SEGMENTS :], (segment, updates))


def check_lineage(run: Lineage) -> None:
    """Raises RemoteProtocolError `run` if a segment's id repeats or a segment begins before an earlier one."""
    if len({segment for segment, _ in run}) < len(run) or any(a[1] > b[1] for a, b in pairwise(run)):
        raise RemoteProtocolError("run", f"segments {run}")


def read_lineage(value: object) -> Lineage:
    """The run in a decoded JSON value; empty if the value is none. An older version wrote a run as the id of its only
    segment."""
    if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{16}", value):
        return ((value, 0),)
    try:
        run = msgspec.convert(value, Lineage)
        check_lineage(run)
    except (msgspec.ValidationError, RemoteProtocolError):
        return NO_RUN
    return run


def _after_common(one: Lineage, other: Lineage) -> tuple[Lineage, Lineage] | None:
    """The segments of each run after those that both have; `None` if they have none in common. Either run may lack the
    other's oldest segments."""
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
