"""Outer rounds in pairs: which one is now, when its partner is called, and which calls of peers are accepted.

    round = floor(Unix time / period)

Nobody negotiates a round, and clocks differ, so the rounds next to the present one are remembered too. A peer that is
leaving may call any node of its cohort: a node accepts one leaving peer in each round, and each fragment of it once an
hour. Otherwise peers could give their weights more influence by saying that they leave. So that what it learned is not
lost, the leaving node asks one peer of its cohort after the other, its partner of the round first.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.tensors import AverageHead

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
MOST_ASKED = 8  # a node leaves without an exchange after so many peers were asked in vain
BUSY_RETRY_S = 0.25  # pause after a busy peer, before the next one is asked
ANSWER_S = 1.0, 10.0  # shortest and longest wait for a peer's answer; in between, a third of the time that the node has


@dataclass
class _Round:
    settled: bool = False  # an exchange succeeded, or need not be tried again
    failure: tuple[str, str] | None = None  # reason and peer of the last failure, until the round is settled
    waits_until: float = 0.0  # training waits for the round's exchanges until then
    calls: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Accepted calls by peer and, for a leaving peer, fragment (otherwise -1)."""
    drained: str | None = None  # the leaving peer that was averaged with
    seen: set[tuple[str, int]] = field(default_factory=set)
    """Peer and fragment of exchanges that are not whole, of which this node's promised body has begun to leave."""


class OuterRounds:
    """This node's record of recent rounds. `settle`, `average` and `fail` are for training; all else needs a lock."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._call_at = 0.0
        self._rounds: defaultdict[int, _Round] = defaultdict(_Round)
        self._drained_at: dict[tuple[str, int], float] = {}  # leaving peer and fragment -> when they were averaged

    def at(self, now: float) -> int:
        return math.floor(now / self._period_s)

    def may_call(self, round: int, now: float) -> bool:
        """Whether this node may call its partner of this round now."""
        return not self._rounds[round].settled and now >= self._call_at

    def call(self, now: float) -> None:
        """This node calls its partner. If that fails, it calls again a little later."""
        self._call_at = now + CALL_RETRY * self._period_s

    def begin(self, round: int, ends: float) -> None:
        """An exchange with the partner begins. Training waits until the round's first exchange would have ended."""
        self._rounds[round].waits_until = self._rounds[round].waits_until or ends

    def waits(self, round: int, now: float) -> bool:
        return now < self._rounds[round].waits_until

    def settle(self, round: int) -> None:
        """Nothing more is tried in this round."""
        self._rounds[round].settled, self._rounds[round].failure = True, None

    def show(self, round: int, fragment: int, peer: str) -> None:
        """A promised body begins to leave for `peer`, which could make another for these weights. For any thread."""
        self._rounds.get(round, _Round()).seen.add((peer, fragment))

    def average(self, round: int, fragment: int, peer: str) -> None:
        """This node averaged with its partner."""
        self.settle(round)
        self._rounds[round].seen.discard((peer, fragment))

    def fail(self, round: int, fragment: int, reason: str, peer: str, now: float) -> bool:
        """An exchange with the partner failed. True if nothing more is tried in this round."""
        if reason in FINAL or (peer, fragment) in self._rounds[round].seen:
            self.settle(round)
            return True
        self._rounds[round].failure = reason, peer
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
        round = self._rounds.get(call.round, _Round())
        if round.calls[_kind(call, peer)] >= ATTEMPTS or (round.settled and not call.draining):
            raise RemoteProtocolError("late", f"round {call.round} is over")
        if (peer, call.fragment) in round.seen:
            raise RemoteProtocolError("late", "this peer has seen the weights of this round")
        if call.draining and round.drained not in (None, peer):
            raise RemoteProtocolError("late", "another leaving peer was averaged with in this round")
        if call.draining and now - self._drained_at.get((peer, call.fragment), -math.inf) < DRAINED_PAUSE_S:
            raise RemoteProtocolError("late", "this peer has left within the last hour")

    def accept(self, call: AverageHead, peer: str) -> None:
        """Count a call that was accepted."""
        self._rounds[call.round].calls[_kind(call, peer)] += 1

    def drained(self, round: int, fragment: int, peer: str, now: float) -> None:
        """This node averaged with a leaving `peer`."""
        self._rounds[round].drained = peer
        self._rounds[round].seen.discard((peer, fragment))
        self._drained_at[peer, fragment] = now

    def forget(self, now: float) -> list[tuple[str, str]]:
        """Forget what is past. Returns reason and peer of each past round that failed for good."""
        present, failed = self.at(now), []
        for number, round in sorted(self._rounds.items()):
            if number < present and round.failure is not None:
                failed.append(round.failure)
                round.failure = None
            if number < present - 1 and now >= round.waits_until:
                del self._rounds[number]
        self._drained_at = {key: at for key, at in self._drained_at.items() if now - at < DRAINED_PAUSE_S}
        return failed


def _kind(call: AverageHead, peer: str) -> tuple[str, int]:
    return peer, call.fragment if call.draining else -1


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

    def then(self, cohort: Sequence[str]) -> str:
        """What comes after a peer was asked in vain, in words."""
        return "another peer is asked" if self.candidates(cohort) else "nobody else is here to ask"

    def ready(self, now: float) -> bool:
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
