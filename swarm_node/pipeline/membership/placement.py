"""Which peer takes which stage: pure functions over the holders of stages and the peers that may take one.

    holders   list by stage: peer id, "" = nobody
    costs     list by stage: bytes that it takes

    vacant stages <- peers that still have them in memory <- peers that want them <- all others, so that as many stages
    as possible are held: augmenting paths over (peer, stage it can take)

Peers are given in order of arrival: the one that came first is served first.

No peer that holds a stage loses it to another one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf


@dataclass(frozen=True)
class Claim:
    """A peer that may take a stage."""

    peer: str
    wanted: int | None = None  # stage that it asks for
    live: Mapping[int, int] = field(default_factory=dict)  # stages in memory -> their updates
    stored: Mapping[int, int] = field(default_factory=dict)  # stages on disk -> their updates
    room: float = inf  # bytes that it can take besides the stages that it holds; inf = not known
    unable: Collection[int] = ()  # stages that it has failed to build

    def fits(self, stage: int, costs: Sequence[int]) -> bool:
        """Whether the peer can take the stage."""
        return stage not in self.unable and self.room >= costs[stage]


def fill(vacant: Collection[int], claims: Collection[Claim], costs: Sequence[int]) -> dict[int, str]:
    """Vacant stage -> the peer that gets it; stages that no peer can take are left out."""
    holders: dict[int, str] = {}
    for stage in sorted(vacant):
        live = [claim for claim in claims if stage in claim.live and stage not in claim.unable]
        if live:
            holders[stage] = max(live, key=lambda claim: claim.live[stage]).peer  # of equals, the first
    for claim in claims:
        if claim.wanted in vacant and claim.wanted not in holders and claim.peer not in holders.values():
            assert claim.wanted is not None
            if claim.fits(claim.wanted, costs):
                holders[claim.wanted] = claim.peer
    rest = {claim.peer: claim for claim in claims if claim.peer not in holders.values()}

    def place(claim: Claim, tried: set[int]) -> bool:
        free = [stage for stage in vacant if claim.fits(stage, costs)]
        for stage in sorted(free, key=lambda stage: (-claim.stored.get(stage, -1), stage)):
            if stage in tried:
                continue
            tried.add(stage)
            holder = holders.get(stage)
            if holder is None or (holder in rest and place(rest[holder], tried)):
                holders[stage] = claim.peer
                return True
        return False

    for claim in rest.values():
        place(claim, set())
    return holders


def adjacent(holders: Sequence[str], me: str, reach: int) -> dict[str, bool]:
    """Peers with stages at most `reach` from those of `me` -> whether `me` opens the channel to them.

    The holder of the higher stage does. The leader is left out, since it has channels with all."""
    highest = {peer: stage for stage, peer in enumerate(holders)}
    mine = [stage for stage, peer in enumerate(holders) if peer == me]
    if 0 in mine:
        return {}
    near = {holders[stage] for own in mine for stage in range(max(0, own - reach), min(len(holders), own + reach + 1))}
    return {peer: highest[me] > highest[peer] for peer in sorted(near - {me, holders[0]})}


def neighbour(stage: int, holders: Sequence[str], rooms: Mapping[str, float], cost: int) -> str | None:
    """The neighbour that takes on a lost stage: the one with more room, or the lower one if that is not known.

    `None` if neither can. `rooms`: bytes that each peer can take besides its stages; inf = not known."""
    around = [holders[s] for s in (stage - 1, stage + 1) if 0 <= s < len(holders)]
    able = {peer: rooms[peer] for peer in around if peer in rooms and rooms[peer] >= cost}
    if inf in able.values():
        return next(iter(able))
    return max(able, key=lambda peer: able[peer], default=None)


def relief(holders: Sequence[str], spares: Collection[Claim], costs: Sequence[int]) -> tuple[int, str] | None:
    """The next stage that a spare takes from a peer that holds several, and the spare; `None` if there is none.

    The peer with most stages gives one, of equals the one with the lowest id. It gives the stage that the spare wants,
    else the highest that the spare can take. The leader keeps stage 0."""
    held: dict[str, list[int]] = {}
    for stage, peer in enumerate(holders):
        held.setdefault(peer, []).append(stage)
    crowded = sorted((peer for peer in held if peer and len(held[peer]) > 1), key=lambda p: (-len(held[p]), p))
    for spare in spares:
        for giver in crowded:
            stages = [stage for stage in held[giver] if stage > 0 and spare.fits(stage, costs)]
            if stages:
                return max(stages, key=lambda stage: (stage == spare.wanted, stage)), spare.peer
    return None
