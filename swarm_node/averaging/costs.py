"""What averaging with others has cost this node lately, and what a partner may still cost it.

    cost      = loss(averaged) - loss(own), on right answers that nobody was trained on
    allowed   = max(FLOOR, SHARE loss(own))
    usual     = median of the last costs, whoever's they were, within 0 and USUAL allowed
    spent_j  <- max(0, KEPT spent_j + cost - usual), after an exchange with partner j
    share_j  <- max(0, KEPT share_j + cost - usual), after an exchange with partner j
    share_k  <- KEPT share_k, of all others, after every exchange
    refused   if cost > usual, and KEPT spent_j + cost - usual > allowed
    halved    if cost > usual, and KEPT sum(share) + cost - usual > TOGETHER allowed: at most three times, then refused

So a sum is bounded, not one exchange: a partner that costs a little each time has soon spent what it may, and from then
on only exchanges with it are applied that cost no more than is usual. So nobody is shut out, and what was spent is
slowly forgotten. Help given earlier is no credit.

What many identities may cost together is bounded by the sum of all shares. A partner's help lowers its own share alone,
so honest partners give nobody room, yet their noise does not add up, since it has both signs. Where the sum is used up,
every partner's share is made smaller, since nobody knows who spent it: an exchange is halved, with its cost. So beyond
the usual cost, liars with ever new identities take TOGETHER allowed, and then a part 1 - KEPT of that for each exchange
that this node makes. Most exchanges must be with honest partners, or what is usual is not.

A whole cohort is one partner, which may cost as much as all together, and is refused, never halved. Nobody can tell
whose help it was. So a liar in it may take as much and, besides, what averaging with the others gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

FLOOR = 0.1
"""Nats per token that a partner may cost, in all, lately."""
SHARE = 0.1  # the same, as part of this node's own loss, if that is more
USUAL = 0.5  # most that counts as usual, as part of what is allowed
TOGETHER = 1.5  # times as much for all partners together
KEPT = 0.98  # part of what was spent that is still counted after the next exchange
LEAST = 0.125  # least part of an exchange that is applied
WINDOW, MIN_SEEN = 32, 8  # costs remembered; what is usual is not known from fewer
MOST_PARTNERS = 64  # partners remembered: the latest
EVERYBODY = ""  # the partner in an exchange of the whole cohort; it has the shares of partners no longer remembered
NOTHING: dict[str, Any] = {"last": [], "spent": {}, "shares": {}}  # the state of a node that has not averaged yet


def allowance(own: float) -> float:
    """Nats per token that a partner may cost a node with the loss `own`."""
    return max(FLOOR, SHARE * own)


class PartnerCosts:
    """What each partner has cost lately. For the training thread."""

    def __init__(self) -> None:
        self._last: list[float] = []
        self._spent: dict[str, float] = {}  # partner -> nats per token, the latest partner last
        self._shares: dict[str, float] = {}  # the same of what all have spent together

    def usual(self, allowed: float) -> float:
        """What an exchange usually costs, where a partner may cost `allowed` in all."""
        middle = median(self._last) if len(self._last) >= MIN_SEEN else 0.0
        return min(max(0.0, middle), USUAL * allowed)

    def rooms(self, partner: str, allowed: float) -> tuple[float, float]:
        """What an exchange with `partner` may cost beyond what is usual: all of it, and the part that stays."""
        together = max(0.0, TOGETHER * allowed - KEPT * sum(self._shares.values()))
        alone = max(0.0, allowed - KEPT * self._spent.get(partner, 0.0))
        return (together if partner == EVERYBODY else alone), together

    def judge(self, partner: str, own: float, averaged: float, halve: Callable[[], float]) -> tuple[float, bool]:
        """(the part of an exchange with `partner` that may stay, 0 = nothing; whether the whole of it costs no more
        than is usual), from the losses before and after it. `halve` takes half of it back, and gives the loss then.
        It is remembered: just that part must stay. Exchanges of the whole cohort are not halved."""
        allowed, cost = allowance(own), averaged - own
        usual, (room, together) = self.usual(allowed), self.rooms(partner, allowed)
        excess = cost - usual
        part = float(excess <= room)  # NaN is more
        while part and not excess <= together:
            part = part / 2 if part > LEAST else 0.0
            excess = halve() - own - part * usual if part else excess
        self._remember(partner, excess if part else 0.0)
        self._last = [*self._last, cost if cost <= allowed else allowed][-WINDOW:]  # NaN is as much
        return part, cost <= usual

    def _remember(self, partner: str, excess: float) -> None:
        """What stays of an exchange with `partner` costs so much beyond what is usual."""
        self._shares = {key: KEPT * share for key, share in self._shares.items()}
        self._shares[partner] = max(0.0, self._shares.get(partner, 0.0) + excess)
        self._spent[partner] = max(0.0, KEPT * self._spent.pop(partner, 0.0) + excess)
        if len(self._spent) > MOST_PARTNERS:
            forgotten = next(iter(self._spent))
            del self._spent[forgotten]
            share = self._shares.pop(forgotten, 0.0)
            self._shares[EVERYBODY] = self._shares.get(EVERYBODY, 0.0) + share

    def state(self) -> dict[str, Any]:
        """For a checkpoint, as JSON."""
        return {"last": list(self._last), "spent": dict(self._spent), "shares": dict(self._shares)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state()`; an older one has one sum of all partners in place of their shares."""
        self._last = [float(cost) for cost in state["last"]]
        self._spent = {str(partner): float(spent) for partner, spent in state["spent"].items()}
        older = {EVERYBODY: self._spent.get(EVERYBODY, 0.0)}
        self._shares = {str(partner): float(share) for partner, share in state.get("shares", older).items()}
