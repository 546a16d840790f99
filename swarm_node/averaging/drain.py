"""A node that leaves the swarm passes on what it learned since its last exchange.

It asks one peer of its cohort after the other, its partner of the round first, until one of them takes part in an
exchange. `Drain` is the side of the node that leaves, `DrainedPeers` that of the nodes that stay. A node that stays
takes part for one leaving peer in each round, and once an hour for the same fragment of the same peer: otherwise a peer
could give its weights more influence by saying again and again that it leaves.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from protocol.errors import RemoteProtocolError

MOST_ASKED = 8
"""Peers that a leaving node asks in vain before it leaves without an exchange."""
BUSY_RETRY_S = 0.25
"""Pause after a busy peer, before the next one is asked."""
ANSWER_S = 1.0, 10.0
"""Shortest and longest wait for a peer's answer. In between it is a third of the time that the node has."""
DRAINED_PAUSE_S = 3600.0
"""Least time between two exchanges of one fragment with the same leaving peer."""


class Drain:
    """Which peer a leaving node asks next."""

    def __init__(self) -> None:
        self.active = False
        self.answer_s = 0.0
        """Longest wait for a peer's answer."""
        self.refused: set[str] = set()
        """Peers that were asked in vain."""
        self._busy: dict[str, float] = {}
        """Peer -> when it said that it was busy."""

    def begin(self, seconds: float) -> None:
        """The node leaves within `seconds`."""
        self.active = True
        self.answer_s = min(max(ANSWER_S[0], seconds / 3), ANSWER_S[1])

    def check_stays(self) -> None:
        """Raises RemoteProtocolError `late` if this node is leaving: it takes over no other's weights."""
        if self.active:
            raise RemoteProtocolError("late", "this node is leaving as well")

    def candidates(self, cohort: Sequence[str]) -> list[str]:
        """Peers that may still be asked."""
        if len(self.refused) >= MOST_ASKED:
            return []
        return [peer for peer in cohort if peer not in self.refused]

    def ready(self, now: float) -> bool:
        """Whether the next peer may be asked."""
        return self.active and now >= max(self._busy.values(), default=0.0) + BUSY_RETRY_S

    def choose(self, candidates: Sequence[str], me: str, partner: str | None, relayed: Collection[str]) -> str:
        """The peer to ask: one that was not busy, the partner, one that needs no relay. Ids above `me` come before
        those below, so that nodes that leave together ask different peers."""
        return min(
            candidates, key=lambda peer: (self._busy.get(peer, 0.0), peer != partner, peer in relayed, peer < me)
        )

    def failed(self, peer: str, reason: str, now: float) -> bool:
        """`peer` did not take part. False if it is asked again, because it was busy."""
        if reason == "busy":
            self._busy[peer] = now
            return False
        self.refused.add(peer)
        return True


class DrainedPeers:
    """Leaving peers with which this node averaged. The caller holds a lock."""

    def __init__(self) -> None:
        self._by_round: dict[int, str] = {}
        """Round -> the leaving peer of that round."""
        self._at: dict[tuple[str, int], float] = {}
        """Peer and fragment -> when they were averaged."""

    def check(self, round: int, fragment: int, peer: str, now: float) -> None:
        """Raises RemoteProtocolError `late` unless a leaving `peer` may have this fragment averaged."""
        if self._by_round.get(round, peer) != peer:
            raise RemoteProtocolError("late", "another leaving peer was averaged with in this round")
        if now - self._at.get((peer, fragment), -math.inf) < DRAINED_PAUSE_S:
            raise RemoteProtocolError("late", "this peer has left within the last hour")

    def add(self, round: int, fragment: int, peer: str, now: float) -> None:
        """This node averaged with a leaving `peer`."""
        self._by_round[round] = peer
        self._at[peer, fragment] = now

    def forget(self, round: int, now: float) -> None:
        """Forget what no later call is checked against."""
        self._by_round = {r: peer for r, peer in self._by_round.items() if r >= round - 1}
        self._at = {key: at for key, at in self._at.items() if now - at < DRAINED_PAUSE_S}
