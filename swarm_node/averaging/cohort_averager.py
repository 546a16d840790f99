"""DiLoCo over a real network: the whole cohort averages at once, and waits (arXiv 2311.08105). The baseline.

    after `every` updates, with N members in one view:
    reduce-scatter    part k of the weights from every member to member k, which averages them
    all-gather        the averages back to every member           -> outer step (SGD with Nesterov momentum)

A phase is one exchange with each other member, for which the lower peer id calls. So a node sends 2 (N - 1) / N of the
weights, as in a ring. `per_step` does the same after each round, with plain averaging.

Rounds are counted, not timed: a member that is behind hears so from the others and catches up. Each member gives up by
itself a round that is not complete within `timeout_s`: that is the price of a barrier. With a lossy codec, progress
since the last round travels instead of weights (Streaming DiLoCo). That keeps slow weights equal only among members
that missed nothing. After a round that a member gave up, or with a new member, the next round averages the weights
themselves, in float32, and all members begin anew from that mean. If only some members know of such a round, their
codecs differ: both sides give up, and know from then on.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from statistics import median_low
from typing import Any

import torch
from torch import Tensor

from swarm_node.averaging.averager import CONTENTS, Averager
from swarm_node.averaging.codecs import BLOCK, BodyDecoder, coded_bytes, lost, pieces
from swarm_node.averaging.outer_step import MEAN, DiLoCo
from swarm_node.averaging.reducers import clipped_mean
from swarm_node.averaging.robust import check_finite
from swarm_protocol.errors import ProtocolError, RemoteProtocolError
from swarm_protocol.tensors import AVERAGE_METHOD, AverageHead, WeightCodec
from swarm_protocol.transports.base import Accepted, Outgoing, Sink
from swarm_protocol.transports.transfer import reason_of

COHORT_CODECS: dict[str, WeightCodec] = {"float32": "float32", "8bit": "int8", "4bit": "e3m0"}
PARTS, AVERAGES = 1, 2
CALL_RETRY_S = 0.1  # pause before a member that is behind is called again
ABORT = frozenset({"group", "codec", "cohort", "version", "schema", "size", "fault"} | {*CONTENTS})
"""Reasons that end a round, as waiting longer would not help."""
MOST_BEHIND = 1000  # most rounds that a node believes to be behind. If it is further behind, it is told again.


@dataclass(eq=False)
class _Round:
    """One round, from the copy of our weights to the outer step."""

    number: int
    fragment: int
    members: list[str]
    group: str  # 16 hex digits: equal for equal members with the same outer step
    updates: int
    ends: float
    fast: Tensor
    sent: Tensor
    bounds: list[int]  # part k is `sent[bounds[k]:bounds[k + 1]]`
    codec: WeightCodec
    phase: int = PARTS
    mean: Tensor | None = None  # the mean of this node's part, as the others decode it
    under_way: set[str] = field(default_factory=set)  # members with whom an exchange of this phase is under way
    decoders: dict[str, BodyDecoder] = field(default_factory=dict)
    """Member -> what decodes the body that is on its way from it."""
    arrived: dict[int, dict[str, Tensor]] = field(default_factory=lambda: {PARTS: {}, AVERAGES: {}})
    call_at: dict[str, float] = field(default_factory=dict)
    failure: tuple[str, str, str] | None = None  # (reason, peer, detail)

    def part(self, member: str) -> Tensor:
        """The part of `sent` that `member` averages."""
        k = self.members.index(member)
        return self.sent[self.bounds[k] : self.bounds[k + 1]]


class CohortAverager(Averager):
    """Averages with the whole cohort in each round."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.config
        per_step = config.method == "per_step"
        self.outer = MEAN if per_step else DiLoCo(config.outer_learning_rate, config.outer_momentum)
        self._every = 1 if per_step else config.every
        self._codec = COHORT_CODECS[config.codec]
        self._in_step: list[list[str] | None] = [None for _ in self.slow]
        """Members of the last complete round of each fragment, whose slow weights are equal. None: the common start."""
        self._number = 0
        self._told: dict[str, int] = {}  # peer -> the number of its round, as it says
        self._guard = threading.Lock()  # guards the round: `accept` and ends of exchanges come on other threads
        self._round: _Round | None = None
        self.transport.accept(AVERAGE_METHOD, self.counted()(self.accept))

    def step(self, updates: int) -> None:
        self.roster.look(self._members(), self.now())
        try:
            if self._round is None and updates - self._exchanged_at[self._fragment()] >= self._every:
                self._begin(updates)
            if self._round is not None:
                self._go_on(self._round)
        except ProtocolError as error:  # weights are changing, cannot be sent, or are not taken
            reason, detail = reason_of(error)
            if self._round is None:
                self.skip(reason, detail)
            else:
                self._give_up(self._round, reason, "", detail)

    def restart(self) -> None:
        super().restart()
        self._in_step = [[] for _ in self.slow]
        if self._round is not None:
            self._give_up(self._round, "replaced", "", "this node went on with other weights meanwhile")

    def load_state_dict(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        super().load_state_dict(tensors, numbers)
        self._in_step = [[] for _ in self.slow]

    def waiting(self) -> bool:
        return self._round is not None and not self.config.overlap

    def under_way(self) -> bool:
        return self._round is not None

    def _fragment(self) -> int:
        return self._number % self.config.fragments

    def _begin(self, updates: int) -> None:
        self._number = max(self._number, self._others(max))
        fragment = self._fragment()
        members = sorted([*self._cohort(), self.place.peer_id])
        if len(members) == 1:
            self.skip("alone")
            self._exchanged_at[fragment] = updates
            return
        (fast,) = self.copies([fragment])
        in_step = self._in_step[fragment]
        first = self._number < self.config.fragments  # later, others have averaged before
        codec = self._codec if in_step == members or (in_step is None and first) else "float32"
        sent = fast if codec == "float32" else fast - self.slow[fragment]
        blocks = math.ceil(len(sent) / BLOCK)
        bounds = [min(len(sent), BLOCK * (blocks * k // len(members))) for k in range(len(members) + 1)]
        ends = self.now() + self.config.timeout_s
        text = f"{self.outer.learning_rate} {self.outer.momentum} {' '.join(members)}"
        group = hashlib.sha256(text.encode()).hexdigest()[:16]
        with self._guard:
            self._round = _Round(self._number, fragment, members, group, updates, ends, fast, sent, bounds, codec)

    def _go_on(self, round: _Round) -> None:
        now = self.now()
        with self._guard:
            failure = round.failure
            here = {self.place.peer_id, *round.arrived[round.phase]}
            complete = len(here) == len(round.members) and not round.under_way
        soon = now < round.ends - self.config.timeout_s / 2
        if failure is None and (others := self._others(median_low if soon else max)) > round.number:
            failure = ("late", "", f"others are in round {others}")
        if failure is None and not complete and now > round.ends:
            failure = ("absent", "", self.roster.listed([peer for peer in round.members if peer not in here]))
        if failure is not None:
            self._give_up(round, *failure)
        elif complete and round.phase == PARTS:
            self._average(round)
        elif complete:
            self._finish(round)
            return
        for peer in round.members if self._round is round else []:
            if peer > self.place.peer_id and now >= round.call_at.get(peer, 0.0):
                self._call(round, peer, now)

    def _others(self, which: Callable[[list[int]], int]) -> int:
        """The round of the other members. The median, so that a few liars cannot end a round, or the greatest, so as
        not to wait for members that wait in a later one. Silent members count as in this node's round."""
        cohort = self._cohort()
        with self._guard:
            return which([self._told.get(peer, self._number) for peer in cohort] or [self._number])

    def _tell(self, peer: str, number: int) -> None:
        """`peer` says that it is in this round. The caller holds `_guard`."""
        self._told[peer] = min(number, self._number + MOST_BEHIND)

    def _call(self, round: _Round, peer: str, now: float) -> None:
        with self._guard:
            phase = round.phase
            if peer in round.under_way or peer in round.arrived[phase]:
                return
            round.under_way.add(peer)
        round.call_at[peer] = now + CALL_RETRY_S
        this = round, phase, peer
        self._call_peer(peer, self._half(*this), partial(self._answered, *this), partial(self._arrived, *this))

    def _answered(self, round: _Round, phase: int, peer: str, head: bytes, size: int) -> Sink:
        self._fits(round, phase, peer, self._head_of(peer, head), size)
        return self._sink(round, phase, peer)

    def _sink(self, round: _Round, phase: int, peer: str) -> Sink:
        round.decoders[peer] = BodyDecoder(round.codec, self._values(round, phase, peer))
        return round.decoders[peer].write

    def accept(self, peer: str, head: bytes, size: int) -> Accepted:
        """Take part in an exchange that a member calls for. Raises RemoteProtocolError unless its phase is ours."""
        theirs = self._head_of(peer, head)
        if peer not in self._cohort():
            raise RemoteProtocolError("group", "not of this node's cohort")
        if theirs.phase not in (PARTS, AVERAGES):
            raise RemoteProtocolError("schema", "not an exchange of a whole cohort")
        if theirs.fragment != theirs.round % self.config.fragments:
            raise RemoteProtocolError("fragment", f"{theirs.fragment} in round {theirs.round}")
        with self._guard:
            self._tell(peer, theirs.round)
            round, phase = self._round, theirs.phase
            if theirs.round < self._number:
                raise RemoteProtocolError("late", str(self._number))
            if round is None or theirs.round > round.number:
                raise RemoteProtocolError("early", "not there yet")
            try:
                self._fits(round, phase, peer, theirs, size)
            except RemoteProtocolError as error:
                if error.reason == "codec":  # neither can go on with this round
                    round.failure = round.failure or ("codec", peer, error.detail)
                    self.woken.set()
                raise
            if phase > round.phase:
                raise RemoteProtocolError("early", "not there yet")
            if peer in round.arrived[phase] or peer in round.under_way or phase < round.phase:
                raise RemoteProtocolError("busy", "that is done, or under way")
            round.under_way.add(peer)
        this = round, phase, peer
        return Accepted(self._half(*this), self._sink(*this), partial(self._arrived, *this))

    def _fits(self, round: _Round, phase: int, peer: str, head: AverageHead, size: int) -> None:
        """Raises RemoteProtocolError unless `head` is of this phase and round, and `size` that of its body."""
        if head.group != round.group or peer not in round.members:
            raise RemoteProtocolError("group", "other members")
        if (head.round, head.fragment, head.phase) != (round.number, round.fragment, phase):
            raise RemoteProtocolError("round", f"round {head.round} in round {round.number}")
        if head.codec != round.codec:
            raise RemoteProtocolError("codec", head.codec)
        expected = coded_bytes(head.codec, self._values(round, phase, peer))
        if size != expected:
            raise RemoteProtocolError("size", f"{size} bytes for {expected}")

    def _values(self, round: _Round, phase: int, peer: str) -> int:
        """Values that `peer` sends: this node's part, then the mean of its own."""
        return len(round.part(self.place.peer_id if phase == PARTS else peer))

    def _half(self, round: _Round, phase: int, peer: str) -> Outgoing:
        sent = round.part(peer) if phase == PARTS else round.mean
        assert sent is not None
        head = {"round": round.number, "fragment": round.fragment, "phase": phase, "group": round.group}
        size = coded_bytes(round.codec, len(sent))
        return self._outgoing(
            peer, round.codec, size, partial(pieces, round.codec, sent), version=round.updates, **head
        )

    def _arrived(self, round: _Round, phase: int, peer: str, error: BaseException | None) -> None:
        """An exchange has ended, on any thread."""
        self.woken.set()
        with self._guard:
            round.under_way.discard(peer)
            decoder = round.decoders.pop(peer, None)
            if error is None:
                assert decoder is not None
                round.arrived[phase][peer] = decoder.values()
                return
            reason, detail = reason_of(error)
            if reason == "late" and detail.isascii() and detail.isdecimal() and len(detail) < 16:
                self._tell(peer, int(detail))
            elif reason in ABORT:
                round.failure = round.failure or (reason, peer, detail)

    def _average(self, round: _Round) -> None:
        """Average this node's part, which has arrived from all members. Raises RemoteProtocolError: values."""
        mine = round.part(self.place.peer_id)
        others = list(round.arrived[PARTS].values())
        for vector in others:
            check_finite(vector)
        reduce = self._reducer
        mean = reduce(mine, torch.stack(others)) if reduce else clipped_mean([mine, *others], self.config.clip)
        mean -= lost(round.codec, mean)  # as the others decode it, otherwise slow weights drift apart
        with self._guard:
            round.mean, round.phase = mean, AVERAGES
            round.call_at.clear()

    def _finish(self, round: _Round) -> None:
        """Take the outer step: all averages have arrived. Raises RemoteProtocolError: values, probe."""
        fragment, fast = round.fragment, round.fast
        assert round.mean is not None
        means = round.arrived[AVERAGES] | {self.place.peer_id: round.mean}
        mean = torch.cat([means[peer] for peer in round.members])
        slow, velocity = self.slow[fragment].clone(), self.momentum[fragment].clone()
        delta = mean - slow if round.codec == "float32" else mean
        self.spread = float((delta - (fast - slow)).norm()) / math.sqrt(len(fast))
        if round.codec == self._codec:
            self.outer.step(slow, velocity, delta)
        else:
            MEAN.step(slow, velocity, delta)
            velocity.zero_()
        check_finite(slow)
        self._apply(fragment, slow - fast)
        self.slow[fragment], self.momentum[fragment] = slow, velocity
        self._in_step[fragment] = round.members
        self._exchanged_at[fragment] = round.updates
        self._went_well(*round.members)
        self._over(round)

    def _give_up(self, round: _Round, reason: str, peer: str, detail: str) -> None:
        self._in_step[round.fragment] = []
        self.skip(reason, detail, peer)
        if reason not in ("late", "codec"):  # after these the next round begins at once
            self._exchanged_at[round.fragment] = round.updates
        self._over(round)

    def _over(self, round: _Round) -> None:
        with self._guard:
            self._round = None
            self._number = max(self._number, round.number + 1)
            self._told = {peer: number for peer, number in self._told.items() if peer in round.members}
