"""Outer rounds in pairs: which one is now, which are settled, and which calls are still accepted in them.

    round = floor(Unix time / period)            fragment = round mod F

Nobody negotiates a round. A caller's clock may differ, so rounds next to the present one are remembered too.
"""

from __future__ import annotations

import math
from collections import Counter

from protocol.errors import RemoteProtocolError

CLOCKS_DIFFER_S = 5.0
"""Largest difference between two peers' clocks that is tolerated, or a quarter of the period if that is less."""
ATTEMPTS = 3
"""Calls of one peer that are accepted in one round, if they fail. Each costs a copy of the weights."""

CALL_RETRY = 0.05
"""Part of a round before a partner is called again that was busy or could not be reached."""
EARLY_RETRY = 0.25
"""Part of a round before a partner is called again that was not due. It will call when it is due, and each call costs
a copy of the weights."""
FINAL = frozenset(
    "partner cohort version schema size late round fragment codec diverged fault replaced "
    "values gates probe hash".split()
)
"""Reasons after which calling again in the same round would not help."""


class OuterRounds:
    """This node's record of the present outer round and of those next to it. The caller holds a lock."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._settled: set[int] = set()
        """Rounds in which an exchange succeeded, or need not be tried again."""
        self._failures: dict[int, tuple[str, str]] = {}
        """Round -> reason and peer of the last failure, until it is settled."""
        self._accepted: Counter[tuple[int, str, int]] = Counter()
        """Calls by round, peer and, for a leaving peer, fragment (otherwise -1)."""
        self._waits: dict[int, float] = {}
        """Round -> until when training waits for its exchanges."""
        self._call_at = 0.0

    def at(self, now: float) -> int:
        return math.floor(now / self._period_s)

    def may_call(self, round: int, now: float) -> bool:
        """Whether this node may call its partner of this round now."""
        return round not in self._settled and now >= self._call_at

    def call(self, now: float) -> None:
        """This node calls its partner. If that fails, it calls again a little later."""
        self._call_at = now + CALL_RETRY * self._period_s

    def settle(self, round: int) -> None:
        """Nothing more is tried in this round."""
        self._settled.add(round)
        self._failures.pop(round, None)

    def fail(self, round: int, reason: str, peer: str, now: float) -> bool:
        """An exchange with the partner failed. True if nothing more is tried in this round."""
        if reason in FINAL:
            self.settle(round)
            return True
        self._failures[round] = reason, peer
        if reason == "early":
            self._call_at = now + EARLY_RETRY * self._period_s
        return False

    def begin(self, round: int, ends: float) -> None:
        """An exchange begins: training waits for it until `ends`, or until the round's first exchange would have
        ended."""
        self._waits.setdefault(round, ends)

    def waits(self, round: int, now: float) -> bool:
        """Whether training waits for an exchange of this round."""
        return now < self._waits.get(round, 0.0)

    def check_present(self, round: int, now: float) -> None:
        """Raises RemoteProtocolError `early` for the next round, `round` for any other that is not the present one, by
        any clock that differs little from this one."""
        differ = min(CLOCKS_DIFFER_S, self._period_s / 4)
        if not self.at(now - differ) <= round <= self.at(now + differ):
            if round == self.at(now) + 1:
                raise RemoteProtocolError("early", f"round {round} has not begun")
            raise RemoteProtocolError("round", f"round {round} is not now")

    def check_open(self, round: int, peer: str, drained: int = -1) -> None:
        """Raises RemoteProtocolError `late` if this round accepts no more calls of `peer`. `drained` is the fragment
        of a leaving peer."""
        if self._accepted[round, peer, drained] >= ATTEMPTS or (drained < 0 and round in self._settled):
            raise RemoteProtocolError("late", f"round {round} is over")

    def accept(self, round: int, peer: str, drained: int = -1) -> None:
        """Count a call that was accepted."""
        self._accepted[round, peer, drained] += 1

    def forget(self, now: float) -> list[tuple[str, str]]:
        """Forget what is past; the reason and peer of each past round that failed for good."""
        round = self.at(now)
        failed = [self._failures.pop(r) for r in sorted(self._failures) if r < round]
        self._settled = {r for r in self._settled if r >= round - 1}
        self._accepted = Counter({call: n for call, n in self._accepted.items() if call[0] >= round - 1})
        self._waits = {r: end for r, end in self._waits.items() if r >= round - 1 or now < end}
        return failed
