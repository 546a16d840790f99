"""The order of work of each stage: 1F1B (PipeDream-Flush, arXiv 2006.09503) as data.

    stage 0   F0 F1 F2 F3 F4             B0 F5 B1 F6 B2 ...
    stage 1      F0 F1 F2 F3          B0 F4 B1 F5 ...          time ->
    stage 2         F0 F1 F2       B0 F3 B1 F4 ...
    stage 3            F0 F1    B0 F2 B1 F3 ...

One microbatch more than in the paper is under way. The loss is computed at the leader, so backward at the last stage
waits for a message to the leader and back; meanwhile that stage goes on with the next forward.

A microbatch visits stages along its route. At each place of the route, a stage computes forward once and backward once.
The order is taken from a simulated execution in ticks, one tick for the loss. In a tick every stage does one operation
that is ready: forward before backward, the oldest microbatch first. For the place that is d-th from the end of a route,
at most d microbatches may be between forward and backward; and no more are under way than a route has places. This
bounds what a stage holds. It also excludes deadlock: a microbatch at the last place can always go back, which makes
room at the place before, and so on. So the lists can be executed in any order of arrival of messages.

CheckFree+ (arXiv 2506.15461) swaps the first two and the last two stages for odd microbatches, so that their layers
learn each other's work. The embedding still comes first and the head last, so such routes have one more place at each
swapped end. With three stages the middle one is in both pairs: odd microbatches swap the first and the last pair in
turn.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class Visit:
    """The work of a stage at one place of a route."""

    stage: int
    embed: bool = False
    layers: bool = True
    head: bool = False


class Operation(NamedTuple):
    """Forward or backward of a microbatch at a place of its route."""

    kind: Literal["F", "B"]
    microbatch: int
    place: int


Route = tuple[Visit, ...]


def route(stages: int, microbatch: int = 0, swapped: bool = False) -> Route:
    """The places that a microbatch visits. `swapped`: odd microbatches take another order (CheckFree+)."""
    order = list(range(stages))
    if swapped and microbatch % 2 and stages > 1:
        first, last = (True, True) if stages != 3 else (microbatch % 4 == 1, microbatch % 4 == 3)
        if first:
            order[:2] = 1, 0
        if last and stages > 2:
            order[-2:] = stages - 1, stages - 2
    places = [Visit(s, embed=i == 0 and s == 0, head=i == stages - 1 and s == stages - 1) for i, s in enumerate(order)]
    if not places[0].embed:
        places.insert(0, Visit(0, embed=True, layers=False))
    if not places[-1].head:
        places.append(Visit(stages - 1, layers=False, head=True))
    return tuple(places)


@lru_cache(maxsize=64)
def schedule(stages: int, microbatches: int, swapped: bool = False) -> tuple[tuple[Operation, ...], ...]:
    """The operations of each stage, in order."""
    ways = [route(stages, i, swapped) for i in range(microbatches)]
    done: list[list[Operation]] = [[] for _ in range(stages)]
    ready: list[set[Operation]] = [set() for _ in range(stages)]
    ready[0].add(Operation("F", 0, 0))  # every route begins with the embedding
    held: dict[int, int] = defaultdict(int)  # microbatches, by places to the end of the route
    begun = 0  # microbatches under way
    elsewhere = stages > 1  # the last stage waits for the loss
    scored: list[tuple[int, Operation]] = []  # operations that have their loss a tick later

    def possible(operation: Operation) -> bool:
        left = len(ways[operation.microbatch]) - operation.place + elsewhere
        return operation.kind == "B" or (held[left] < left and (operation.place > 0 or begun < left))

    while any(ready) or scored:
        arrived, scored = scored, []
        for stage, waiting in enumerate(ready):
            candidates = [operation for operation in waiting if possible(operation)]
            if not candidates:
                continue
            operation = max(candidates, key=lambda one: (one.kind, -one.microbatch))  # "F" > "B", then the oldest
            waiting.remove(operation)
            done[stage].append(operation)
            kind, i, place = operation
            way = ways[i]
            change = 1 if kind == "F" else -1
            held[len(way) - place + elsewhere] += change
            begun += change if place == 0 else 0
            if kind == "F" and place == 0 and i + 1 < microbatches:
                arrived.append((0, Operation("F", i + 1, 0)))
            if kind == "F" and place + 1 < len(way):
                arrived.append((way[place + 1].stage, Operation("F", i, place + 1)))
            elif kind == "F":
                (scored if elsewhere else arrived).append((stage, Operation("B", i, place)))
            elif place > 0:
                arrived.append((way[place - 1].stage, Operation("B", i, place - 1)))
        for stage, operation in arrived:
            ready[stage].add(operation)
    return tuple(tuple(operations) for operations in done)
