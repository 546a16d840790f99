"""The page of a swarm, as one JSON document: what any holder of the join link may see, and no address but the link's.

cards of members -> figures over all, kinds of task, a row for each member
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from swarm_node.storage.rundir import PAGE
from swarm_node.swarm.declared import declared_table, pass_1_of, success_by_kind
from swarm_protocol.messages import PeerCard

HISTORY_S = 10.0  # first time between two points of a history; doubled whenever it is full
MAX_POINTS = 240
MAX_LISTED = 500  # members that a page lists: those that train first, the fastest first


class History:
    """Means over members, each by its own word, since the page is written. Bounded: old points grow rarer."""

    def __init__(self) -> None:
        self._points: list[tuple[float, float | None, float | None]] = []
        self._every_s = HISTORY_S

    def add(self, now: float, members: Mapping[str, PeerCard], kinds: Collection[str] | None) -> list[Any]:
        """All points (Unix time, success over kinds of task, held-out pass@1), oldest first, with one of `now` if that
        is due and members say anything."""
        success, held = (row["success"] for row in success_by_kind(members, kinds)), pass_1_of(members)
        point = now, _mean(list(success)), _mean(held)
        due = not self._points or now - self._points[-1][0] >= self._every_s
        if due and point[1:] != (None, None):
            self._points.append(point)
            if len(self._points) > MAX_POINTS:
                self._points = self._points[::2]
                self._every_s *= 2
        return list(self._points)


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def page_of(members: Mapping[str, PeerCard], link: str, kinds: Collection[str] | None) -> dict[str, Any]:
    """The page of a swarm with these `members`. `kinds` are its kinds of task (`kinds_of`); None = not known yet."""
    shown = sorted(members.items(), key=lambda item: ("trainer" not in item[1].roles, -item[1].speed, item[0]))
    return summary_of(members, link, kinds) | {"rows": [_row(peer, card, kinds) for peer, card in shown[:MAX_LISTED]]}


def summary_of(members: Mapping[str, PeerCard], link: str, kinds: Collection[str] | None) -> dict[str, Any]:
    """The page without its rows, for a member's own swarm.json, which lists the members anyway. `as_of` is the Unix
    time of the oldest card that it has figures from: members renew theirs every few seconds."""
    now = time.time()
    return {
        "as_of": min((min(card.created, now) for card in members.values() if "trainer" in card.roles), default=None),
        "link": link,
        "members": len(members),
        "training": sum("trainer" in card.roles for card in members.values()),
        "tokens_per_s": sum(card.speed for card in members.values()),
        "declaring": sum(card.declared is not None for card in members.values()),
        "kinds": success_by_kind(members, kinds),
    }


def page_status(swarm: str, name: str, page: Mapping[str, Any] | None, problem: str = "") -> dict[str, Any]:
    """The swarm.json of a directory that holds only the page; `page` is None while nothing was seen yet."""
    told = {"role": PAGE, "swarm": swarm, "swarm_name": name, "time": time.time(), "page": page}
    return told | ({"problem": problem} if problem else {})


def page_directory(parent: Path, name: str) -> Path:
    """Where below `parent` the page of the swarm of that name lies; strangers may have chosen the name."""
    return parent / (name.strip(". ") or "swarm")


def _row(peer: str, card: PeerCard, kinds: Collection[str] | None) -> dict[str, Any]:
    return {
        "peer": peer,
        "name": card.name,
        "roles": list(card.roles),
        "updates": card.policy_version,
        "tokens_per_s": card.speed,
        "family": card.family or None,
        "declared": declared_table(card.declared, kinds),
    }
