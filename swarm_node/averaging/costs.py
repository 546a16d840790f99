"""What averaging with others has cost this node lately, and what a partner may still cost it.

    cost      = loss(averaged) - loss(own), on own right answers that nobody was trained on
    allowed   = max(FLOOR, SHARE loss(own))
    usual     = median of the last costs, whoever's they were, within 0 and USUAL allowed
    spent_j  <- max(0, KEPT spent_j + cost - usual), after an exchange with partner j; spent, likewise, after every one
    refused if  KEPT spent_j + cost - usual > allowed,  or the same with spent > TOGETHER allowed

So a sum is bounded, not one exchange: a partner that costs a little each time has soon spent what it may, and from then
on only exchanges with it are applied that cost no more than is usual. So nobody is shut out, and what was spent is
slowly forgotten. Help given earlier is no credit. What many identities may cost together is bounded by `spent`, which
honest partners lower. Most exchanges must be with honest partners, or what is usual is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

FLOOR = 0.1
"""Nats per token that a partner may cost, in all, lately."""
SHARE = 0.1  # the same, as part of this node's own loss, if that is more
USUAL = 0.5  # most that counts as usual, as part of what is allowed
TOGETHER = 2.0  # times as much for all partners together
KEPT = 0.98  # part of what was spent that is still counted after the next exchange
WINDOW, MIN_SEEN = 32, 8  # costs remembered; what is usual is not known from fewer
MOST_PARTNERS = 64  # partners remembered: the latest
EVERYBODY = ""  # key of the sum over all partners, and the partner in an exchange of the whole cohort
NOTHING: dict[str, Any] = {"last": [], "spent": {}}  # the state of a node that has not averaged yet


class PartnerCosts:
    """What each partner has cost lately. For the training thread."""

    def __init__(self) -> None:
        self._last: list[float] = []
        self._spent: dict[str, float] = {}  # partner -> nats per token, the latest partner last

    def usual(self, allowed: float) -> float:
        """What an exchange usually costs, where a partner may cost `allowed` in all."""
        middle = median(self._last) if len(self._last) >= MIN_SEEN else 0.0
        return min(max(0.0, middle), USUAL * allowed)

    def judge(self, partner: str, own: float, averaged: float) -> tuple[bool, bool]:
        """(whether an exchange with `partner` costs too much, whether it costs no more than is usual), from the losses
        before and after it. It is remembered: one that costs too much must not be applied, any other must be."""
        allowed, cost = max(FLOOR, SHARE * own), averaged - own
        excess = cost - self.usual(allowed)
        limits = {partner: allowed} | {EVERYBODY: TOGETHER * allowed}
        kept = {key: KEPT * self._spent.pop(key, 0.0) for key in limits}
        too_much = not all(kept[key] + excess <= limit for key, limit in limits.items())
        self._spent |= {key: spent if too_much else max(0.0, spent + excess) for key, spent in kept.items()}
        if len(self._spent) > MOST_PARTNERS:
            del self._spent[next(iter(self._spent))]
        self._last = [*self._last, cost if cost <= allowed else allowed][-WINDOW:]  # NaN is as much
        return too_much, excess <= 0

    def state(self) -> dict[str, Any]:
        """For a checkpoint, as JSON."""
        return {"last": list(self._last), "spent": dict(self._spent)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state()`."""
        self._last = [float(cost) for cost in state["last"]]
        self._spent = {str(partner): float(spent) for partner, spent in state["spent"].items()}
