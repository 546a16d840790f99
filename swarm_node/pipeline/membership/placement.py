"""Who holds which stage: pure functions over a crew's seats and those who would take one.

    seats   list by stage: peer id of its holder, "" = nobody
    costs   list by stage: bytes that it takes

    vacant stages <- who still has them in memory <- who wants them <- everyone else, so that as many as possible are
    held: augmenting paths over (peer, stage it can take), peers in order of arrival

Nobody who holds a stage loses it to somebody else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True)
class Claim:
    """A peer that may take a stage."""

    peer: str
    arrived: int
    """Counts arrivals at the lead: who came first is served first."""
    wanted: int | None = None
    """Stage it asks for."""
    live: Mapping[int, int] = field(default_factory=dict)
    """Updates behind each stage that it has in memory."""
    stored: Mapping[int, int] = field(default_factory=dict)
    """Likewise on disk."""
    room: int | None = None
    """Bytes it can take in addition to the stages it holds; `None` = not known."""
    unable: Collection[int] = ()
    """Stages that it could not take, for a reason of its own."""

    def fits(self, stage: int, costs: Sequence[int]) -> bool:
        return stage not in self.unable and (self.room is None or self.room >= costs[stage])


def fill(vacant: Collection[int], claims: Collection[Claim], costs: Sequence[int]) -> dict[int, str]:
    """Who gets each of the vacant stages; those that nobody can take are left out."""
    seats: dict[int, str] = {}
    queue = sorted(claims, key=lambda claim: (claim.arrived, claim.peer))
    for stage in sorted(vacant):
        holders = [claim for claim in queue if stage in claim.live and stage not in claim.unable]
        if holders:
            seats[stage] = max(holders, key=lambda claim: claim.live[stage]).peer  # of equals, the first
    for claim in queue:
        if claim.wanted in vacant and claim.wanted not in seats and claim.peer not in seats.values():
            assert claim.wanted is not None
            if claim.fits(claim.wanted, costs):
                seats[claim.wanted] = claim.peer
    rest = {claim.peer: claim for claim in queue if claim.peer not in seats.values()}

    def sit(claim: Claim, tried: set[int]) -> bool:
        free = [stage for stage in vacant if claim.fits(stage, costs)]
        for stage in sorted(free, key=lambda stage: (-claim.stored.get(stage, -1), stage)):
            if stage in tried:
                continue
            tried.add(stage)
            holder = seats.get(stage)
            if holder is None or (holder in rest and sit(rest[holder], tried)):
                seats[stage] = claim.peer
                return True
        return False

    for claim in rest.values():
        sit(claim, set())
    return seats


def succession(seats: Sequence[str], spares: Sequence[str]) -> list[str]:
    """Who leads when the lead is lost, first in line first: spares as the plan lists them, then whoever holds stage 1,
    2, ..."""
    return [peer for peer in dict.fromkeys([*spares, *seats[1:]]) if peer and peer != seats[0]]


def adjacent(seats: Sequence[str], me: str, reach: int) -> dict[str, bool]:
    """Peers with stages at most `reach` from those of `me`, but for the lead -> whether `me` opens the channel to them:
    whoever holds the higher stage does. The lead has channels with all."""
    highest = {peer: stage for stage, peer in enumerate(seats)}
    mine = [stage for stage, peer in enumerate(seats) if peer == me]
    if 0 in mine:
        return {}
    near = {seats[stage] for own in mine for stage in range(max(0, own - reach), min(len(seats), own + reach + 1))}
    return {peer: highest[me] > highest[peer] for peer in sorted(near - {me, seats[0]})}


def neighbour(stage: int, seats: Sequence[str], rooms: Mapping[str, int | None], cost: int) -> str | None:
    """Which neighbour takes a lost stage on: the one with more room, or the lower if that is not known; `None` if
    neither can. `rooms` = bytes that each peer can take besides what it holds, `None` = not known."""
    around = [seats[s] for s in (stage - 1, stage + 1) if 0 <= s < len(seats)]
    able: dict[str, int | None] = {}
    for peer in around:
        if peer in rooms:
            room = rooms[peer]
            if room is None or room >= cost:
                able[peer] = room
    if None in able.values():
        return next(iter(able))
    return max(able, key=lambda peer: able[peer] or 0, default=None)


class Relief(NamedTuple):
    """A stage that changes hands."""

    stage: int
    giver: str
    taker: str


def relief(seats: Sequence[str], spares: Collection[Claim], costs: Sequence[int]) -> Relief | None:
    """The next stage that a spare takes from a peer that holds several: of those who hold most, the lowest peer id; the
    stage that the spare wants, else the highest it can take. The lead keeps the first."""
    held: dict[str, list[int]] = {}
    for stage, peer in enumerate(seats):
        held.setdefault(peer, []).append(stage)
    crowded = sorted((peer for peer in held if peer and len(held[peer]) > 1), key=lambda p: (-len(held[p]), p))
    for spare in sorted(spares, key=lambda claim: (claim.arrived, claim.peer)):
        for giver in crowded:
            stages = [stage for stage in held[giver] if stage > 0 and spare.fits(stage, costs)]
            if stages:
                return Relief(max(stages, key=lambda stage: (stage == spare.wanted, stage)), giver, spare.peer)
    return None


class Standing(NamedTuple):
    """What counts between two leads of one crew."""

    term: int
    """Of the last plan that all its stages were held in."""
    updates: int
    started: float
    """When the peer did, in seconds since the Unix epoch."""
    peer: str


def gives_way(a: Standing, b: Standing) -> str:
    """Which of two leads does: lower term, then fewer updates, then later start, then higher peer id."""
    return max(a, b, key=lambda lead: (-lead.term, -lead.updates, lead.started, lead.peer)).peer
