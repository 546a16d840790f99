"""The peers that a leaving node asks to take part in one more exchange, so that what it learned is not lost.

It asks one peer of its cohort after the other, its partner of the round first. `OuterRounds` has the limits of the
nodes that are asked.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

MOST_ASKED = 8  # a node leaves without an exchange after so many peers were asked in vain
BUSY_RETRY_S = 0.25  # pause after a busy peer, before the next one is asked
ANSWER_S = 1.0, 10.0  # shortest and longest wait for a peer's answer; in between, a third of the time that the node has


class Drain:
    """Which peer a leaving node asks next."""

    def __init__(self) -> None:
        self.active = False
        self.answer_s = 0.0  # longest wait for a peer's answer
        self.refused: set[str] = set()  # peers that were asked in vain
        self._busy: dict[str, float] = {}  # peer -> when it said that it was busy

    def begin(self, seconds: float) -> None:
        """The node leaves within `seconds`."""
        self.active = True
        self.answer_s = min(max(ANSWER_S[0], seconds / 3), ANSWER_S[1])

    def candidates(self, cohort: Sequence[str]) -> list[str]:
        """Peers that may still be asked."""
        return [peer for peer in cohort if peer not in self.refused] if len(self.refused) < MOST_ASKED else []

    def ready(self, now: float) -> bool:
        """Whether the next peer may be asked."""
        return self.active and now >= max(self._busy.values(), default=0.0) + BUSY_RETRY_S

    def choose(self, candidates: Sequence[str], me: str, partner: str | None, relayed: Collection[str]) -> str:
        """The candidate to ask: one that was not busy, then the partner, then one that needs no relay. Ids above `me`
        come first, so that nodes that leave together ask different peers."""
        busy = self._busy
        return min(candidates, key=lambda peer: (busy.get(peer, 0.0), peer != partner, peer in relayed, peer < me))

    def failed(self, peer: str, reason: str, now: float) -> bool:
        """`peer` did not take part. False if it is asked again, because it was busy."""
        if reason == "busy":
            self._busy[peer] = now
            return False
        self.refused.add(peer)
        return True
