"""Outer rounds in pairs: which one is now, when its partner is called, and which calls of peers are accepted.

    round = floor(Unix time / period)

Nobody negotiates a round, and clocks differ, so the rounds next to the present one are remembered too. A peer that is
leaving may call any node of its cohort: a node accepts one leaving peer in each round, and each fragment of it once an
hour. Otherwise peers could give their weights more influence by saying that they leave.
"""

from __future__ import annotations

import math
from collections import Counter

from protocol.errors import RemoteProtocolError
from protocol.tensors import AverageHead

CLOCKS_DIFFER_S = 5.0
"""Difference between two peers' clocks that is tolerated, or a quarter of the period if that is less."""
ATTEMPTS = 3  # calls of one peer that are accepted in one round, if they fail. Each costs a copy of the weights.
DRAINED_PAUSE_S = 3600.0  # least time between two exchanges of one fragment with the same leaving peer
CALL_RETRY = 0.05  # part of a round before a partner is called again that was busy or could not be reached
EARLY_RETRY = 0.25  # part of a round before a partner is called again that was not due: it will call by itself
FINAL = frozenset(
    "partner cohort version schema size late round fragment codec diverged fault replaced "
    "values gates probe hash".split()
)
"""Reasons after which calling again in the same round would not help."""


class OuterRounds:
    """This node's record of recent rounds. `settle` and `fail` are for the training thread, all else needs a lock."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._call_at = 0.0
        self._settled: set[int] = set()  # rounds in which an exchange succeeded, or need not be tried again
        self._failures: dict[int, tuple[str, str]] = {}
        """Round -> reason and peer of the last failure, until it is settled."""
        self._waits: dict[int, float] = {}  # round -> until when training waits for its exchanges
        self._calls: Counter[tuple[int, str, int]] = Counter()
        """Accepted calls by round, peer and, for a leaving peer, fragment (otherwise -1)."""
        self._drained: dict[int, str] = {}  # round -> the leaving peer that was averaged with
        self._drained_at: dict[tuple[str, int], float] = {}  # leaving peer and fragment -> when they were averaged

    def at(self, now: float) -> int:
        return math.floor(now / self._period_s)

    def may_call(self, round: int, now: float) -> bool:
        """Whether this node may call its partner of this round now."""
        return round not in self._settled and now >= self._call_at

    def call(self, now: float) -> None:
        """This node calls its partner. If that fails, it calls again a little later."""
        self._call_at = now + CALL_RETRY * self._period_s

    def begin(self, round: int, ends: float) -> None:
        """An exchange with the partner begins. Training waits until the round's first exchange would have ended."""
        self._waits.setdefault(round, ends)

    def waits(self, round: int, now: float) -> bool:
        """Whether training waits for an exchange of this round."""
        return now < self._waits.get(round, 0.0)

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

    def check_present(self, round: int, now: float) -> None:
        """Raises RemoteProtocolError unless this is the present round, by a clock that differs little: early, round."""
        differ = min(CLOCKS_DIFFER_S, self._period_s / 4)
        if not self.at(now - differ) <= round <= self.at(now + differ):
            if round == self.at(now) + 1:
                raise RemoteProtocolError("early", f"round {round} has not begun")
            raise RemoteProtocolError("round", f"round {round} is not now")

    def check_open(self, call: AverageHead, peer: str, now: float) -> None:
        """Raises RemoteProtocolError `late` if no such call of `peer` is accepted in its round any more."""
        round = call.round
        if self._calls[_kind(call, peer)] >= ATTEMPTS or (round in self._settled and not call.draining):
            raise RemoteProtocolError("late", f"round {round} is over")
        if call.draining and self._drained.get(round, peer) != peer:
            raise RemoteProtocolError("late", "another leaving peer was averaged with in this round")
        if call.draining and now - self._drained_at.get((peer, call.fragment), -math.inf) < DRAINED_PAUSE_S:
            raise RemoteProtocolError("late", "this peer has left within the last hour")

    def accept(self, call: AverageHead, peer: str) -> None:
        """Count a call that was accepted."""
        self._calls[_kind(call, peer)] += 1

    def drained(self, round: int, fragment: int, peer: str, now: float) -> None:
        """This node averaged with a leaving `peer`."""
        self._drained[round] = peer
        self._drained_at[peer, fragment] = now

    def forget(self, now: float) -> list[tuple[str, str]]:
        """Forget what is past. Returns reason and peer of each past round that failed for good."""
        round = self.at(now)
        failed = [self._failures.pop(r) for r in sorted(self._failures) if r < round]
        self._settled = {r for r in self._settled if r >= round - 1}
        self._waits = {r: end for r, end in self._waits.items() if r >= round - 1 or now < end}
        self._calls = Counter({kind: n for kind, n in self._calls.items() if kind[0] >= round - 1})
        self._drained = {r: peer for r, peer in self._drained.items() if r >= round - 1}
        self._drained_at = {key: at for key, at in self._drained_at.items() if now - at < DRAINED_PAUSE_S}
        return failed


def _kind(call: AverageHead, peer: str) -> tuple[int, str, int]:
    return call.round, peer, call.fragment if call.draining else -1
