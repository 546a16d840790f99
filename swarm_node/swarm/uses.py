"""How many groups of this node others say they trained on, over the whole run: members count from 0 at each start."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import msgspec

from swarm_protocol.messages import PeerCard
from swarm_protocol.topics import short_hash

MAX_KEPT = 1024  # members that are counted: the first ones that name this node


class Count(msgspec.Struct, array_like=True):
    """What one member says."""

    since: float  # Unix time at which it started, by its word
    groups: int


class UsesState(msgspec.Struct):
    """All counts."""

    over: int = 0  # of starts that are over
    latest: dict[str, Count] = {}  # peer -> its count since its last start that was seen

    @property
    def sum(self) -> int:
        return self.over + sum(count.groups for count in self.latest.values())


class Uses:
    """The sum over members and their starts; it never falls. For any thread."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._name = short_hash(me)
        self._state = UsesState()
        self._guard = threading.Lock()

    def look(self, cards: Mapping[str, PeerCard]) -> int:
        """The sum, with what the members' present cards say."""
        with self._guard:
            for peer, card in cards.items():
                told = card.declared
                if peer == self._me or told is None:
                    continue
                groups = min(sum(use.groups for use in told.used_of if use.peer == self._name), told.used)
                self._count(peer, Count(told.since, groups))
            return self._state.sum

    def _count(self, peer: str, now: Count) -> None:
        state = self._state
        before = state.latest.get(peer)
        if before is None:
            if not now.groups or len(state.latest) >= MAX_KEPT:
                return
        elif before.since != now.since:
            state.over += before.groups
        else:  # a member that uses many peers may leave this one out for a while
            now.groups = max(now.groups, before.groups)
        state.latest[peer] = now

    def state(self) -> Any:
        """What a checkpoint keeps, as JSON carries it."""
        with self._guard:
            return msgspec.to_builtins(self._state)

    def load(self, state: Any) -> None:
        """Go on from a state that was kept, unless a later one is known. Raises msgspec.ValidationError if it is of
        another version."""
        kept = msgspec.convert(state, UsesState)
        with self._guard:
            if kept.sum > self._state.sum:
                self._state = kept
