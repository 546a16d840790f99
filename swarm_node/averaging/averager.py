"""What all ways of averaging share: whose weights are averaged, how they change, and what is counted.

    weights (live)  --copy of one fragment-->  codec  ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~>  peer
    weights (live)  <--  + (1 - mixing) (averaged - copy)  <-- outer step, at a step boundary

A difference is added, never a value copied: what training did since the copy was made stays. Nothing is applied unless
an exchange was whole for both peers and passed every check. All else is counted by reason, and training goes on.

Public methods are for the training thread unless they say otherwise. The transport's workers make copies under the lock
that training holds while it changes weights (`changing`).
"""

from __future__ import annotations

import hashlib
import math
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swarm_node.averaging.costs import EVERYBODY
from swarm_node.averaging.fragments import Fragments
from swarm_node.averaging.probing import Judgement, Probes
from swarm_node.averaging.reducers import find_reducer
from swarm_node.averaging.robust import Robust
from swarm_node.averaging.roster import CohortRoster
from swarm_node.averaging.skipping import WORDS, happened, skipped
from swarm_node.config import AveragingConfig
from swarm_node.errors import CheckpointError
from swarm_node.say import Once, Say, Warned
from swarm_protocol.codec import version_for
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.messages import PeerCard
from swarm_protocol.tensors import AVERAGE_METHOD, AverageHead, WeightCodec, decode_head, encode_head
from swarm_protocol.transports.base import Outgoing, Sink, Transport

COPY_S = 2.0  # a peer's call waits so long for weights that are changing. Then it is refused as busy.
MUTED_AFTER = 3  # a peer is muted after so many exchanges in a row with data that no honest peer sends
MUTED_S = 3600.0
LONELY_ROUNDS = 2  # a node says that it is alone after so many outer rounds without a peer of its cohort
CONTENTS = frozenset({"values", "gates", "probe", "hash"})  # reasons that lie in the weights that a peer sent
PROVEN = frozenset({"values", "hash"})
"""Reasons that no honest peer causes. Gates and probe judge by what is usual, so they are wrong now and then."""
REASONS = frozenset(WORDS)
"""Reasons that are counted by their own name."""


@dataclass(frozen=True)
class CohortPlace:
    """Whose weights are averaged with whose, and when."""

    swarm: str
    cohort: str
    peer_id: str
    period_s: float = 60.0  # length of an outer round in pairs


def cohort_id(layout: str, start_digest: str, swarm: str, config: AveragingConfig) -> str:
    """16 hex digits: equal for peers whose weights can be averaged.

    layout        names, shapes and fragments of the weights (`Fragments.layout`)
    start_digest  digest of the model, adapter included, that all peers began with
    """
    settings = config.gamma != config.beta if config.method == "noloco" else config.codec
    text = f"{swarm} {start_digest} {layout} {config.method} {settings}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def rhythm(config: AveragingConfig, period_s: float) -> str:
    """How often peers average, in words."""
    if config.method == "per_step":
        return "the whole cohort after every round"
    if config.method == "diloco":
        return f"the whole cohort every {config.every} updates"
    return f"in pairs every {period_s:g} s, after {config.every} updates or more"


class Averager(ABC):
    """Averages the weights `tensors` (name -> live tensor) with those of other peers."""

    def __init__(
        self,
        config: AveragingConfig,
        place: CohortPlace,
        tensors: Mapping[str, Tensor],
        transport: Transport,
        now: Callable[[], float],
        say: Say,
        changed: Callable[[], None] = lambda: None,
        probe: Callable[[], float | None] = lambda: None,
    ) -> None:
        """`tensors` hold the cohort's common start now, and stay in memory where they are. `changed` is called after
        each change of them. `probe` gives this node's loss on its own best answers, None if it has none."""
        self.config = config
        self.place = place
        self.transport = transport
        self.now = now
        self._say = say
        self._changed = changed
        self.probes = Probes(probe, config.probe)
        self.tensors = tensors
        self.fragments = Fragments(tensors, config.fragments)
        self.slow = self.fragments.gather_all()
        """The slow weights, which the outer optimiser changes: as of the last exchange."""
        self.momentum = [torch.zeros_like(slow) for slow in self.slow]
        self._exchanged_at = [0] * config.fragments
        """Own updates when each fragment was last copied for an exchange that succeeded."""
        self.replaced = 0  # how often all weights were replaced: an exchange that began before is of no use after
        self.robust = Robust(config.clip, config.gates)
        self._reducer = find_reducer(config.reducer)
        self._lock = threading.Lock()  # held while weights change or are on trial, and while copies of them are made
        self.woken = threading.Event()  # set when `step` has something to do
        self._counting = threading.Lock()  # guards the counts of bytes and of refusals, which several workers change
        self.counts: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()  # calls and answers of peers that this node refused, by reason
        self.roster = CohortRoster(place.cohort, LONELY_ROUNDS * place.period_s, say)
        self._last: tuple[float, tuple[str, ...]] | None = None  # time and peers of the last exchange
        self.began_with = ""  # the member whose weights replaced this node's when it joined
        self.spread = 0.0  # root mean square difference to the last partner
        self._strikes: Counter[str] = Counter()
        self._muted: dict[str, float] = {}
        self._say_once = Once(say)
        self.run = "RUN"  # the run directory as a command takes it, if that is known
        self.absent: Callable[[], Collection[str]] = tuple
        """Returns peers that are known to be gone, though their cards are still here."""
        self.before_change: Callable[[], None] = lambda: None
        """Called on the training thread before `step` or `replace` changes the weights."""
        self.trial: Callable[[], Callable[[], bool]] = lambda: lambda: False
        """Called under this node's own weights, it remembers how well these do. What it returns tells, once others'
        weights are in their place, whether these do worse."""

    @abstractmethod
    def step(self, updates: int) -> None:
        """At a step boundary, after `updates` optimiser updates in all: apply what has arrived, and begin an exchange
        that is due. Never waits."""

    @abstractmethod
    def waiting(self) -> bool:
        """Whether training is to wait before its next update, and call `step` again soon."""

    @abstractmethod
    def under_way(self) -> bool:
        """Whether an exchange is under way."""

    def drain(self, seconds: float) -> None:  # noqa: B027 - the whole cohort is asked in each round anyway
        """Prepare to leave within about `seconds`: `step` then exchanges what was learned since the last exchange with
        any peer of the cohort that accepts. `under_way` stays true until one did, or no peer is left to ask."""

    def changing(self) -> AbstractContextManager[object]:
        """Hold this while weights change."""
        return self._lock

    def metrics(self) -> dict[str, float]:
        """`averaging/*`: running totals, the partners here now, and `spread`."""
        return {
            **{f"averaging/{name}": float(n) for name, n in sorted(self.counts.items())},
            **{f"averaging/refused/{reason}": float(n) for reason, n in sorted(self.refused.copy().items())},
            "averaging/exchanges": float(self.counts["exchanges"]),
            "averaging/partners": float(len(self.roster.partners)),
            "averaging/spread": self.spread,
        }

    def status(self) -> dict[str, Any]:
        """What `swarm-node status` shows. For any thread."""
        last, counts = self._last, self.counts.copy()
        return {
            "cohort": self.place.cohort,
            "method": self.config.method,
            "codec": self.config.codec,
            "when": rhythm(self.config, self.place.period_s),
            "partners": dict(self.roster.partners),
            "exchanges": counts["exchanges"],
            "bytes": counts["bytes"],
            "spread": self.spread,
            "began_with": self.began_with,
            "last": last and {"time": last[0], "peers": list(last[1]), "with": self.roster.listed(last[1])},
            "skipped": {n.removeprefix("skipped/"): count for n, count in counts.items() if n.startswith("skipped/")},
            "refused": dict(self.refused.copy()),
        }

    def brief(self) -> str:
        """The status in a few words."""
        n, last = self.counts["exchanges"], self._last
        text = f"averaged {n} {'time' if n == 1 else 'times'}" if n else "not averaged"
        if last is not None:
            text += f", last with {self.roster.listed(last[1])}"
        if self.roster.partners:
            return text if n else f"{text} yet"
        return f"{text}, no partner here" if n else f"{text}: no partner yet"

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What a checkpoint needs: live tensors, and numbers."""
        tensors = {f"slow.{i}": slow for i, slow in enumerate(self.slow)}
        tensors |= {f"momentum.{i}": momentum for i, momentum in enumerate(self.momentum)}
        numbers = {
            "cohort": self.place.cohort,
            "robust": self.robust.state(),
            "counts": dict(self.counts),
            "exchanged_at": list(self._exchanged_at),
            "began_with": self.began_with,
        }
        return tensors, numbers

    def load_state_dict(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`. Raises CheckpointError, with nothing changed, if damaged or of another cohort."""
        mine, _ = self.state_dict()
        if numbers.get("cohort") != self.place.cohort:
            raise CheckpointError("the averaging state is of another cohort")
        if mine.keys() != tensors.keys() or any(mine[name].shape != tensors[name].shape for name in mine):
            raise CheckpointError("the averaging state does not have the shapes of this policy's fragments")
        robust = Robust(self.config.clip, self.config.gates)
        with readable():
            exchanged_at = [int(updates) for updates in numbers["exchanged_at"]]
            counts = Counter({str(name): int(n) for name, n in numbers["counts"].items()})
            robust.load(numbers["robust"])
        if len(exchanged_at) != self.config.fragments:
            raise CheckpointError("the averaging state is of another number of fragments")
        for name, tensor in mine.items():
            tensor.copy_(tensors[name])
        self.robust, self.counts, self._exchanged_at = robust, counts, exchanged_at
        self.began_with = str(numbers.get("began_with", ""))

    def copies(self, fragments: Iterable[int]) -> list[Tensor]:
        """Copies of `fragments` as of one moment, for any thread. Raises RemoteProtocolError: busy (they change)."""
        if not self._lock.acquire(timeout=COPY_S):
            raise RemoteProtocolError("busy", "weights are changing")
        try:
            return [self.fragments.gather(i) for i in fragments]
        finally:
            self._lock.release()

    def replace(self, values: Sequence[Tensor]) -> bool:
        """Go on with other weights, a vector for each fragment. False, and nothing changed, if nothing can be computed
        with them, or if they lose the `trial` against this node's own. What the trial raises leaves these in place."""
        self.before_change()
        with self.changing():  # nobody gets a copy of weights on trial
            kept, worse, better = self.fragments.gather_all(), self.trial(), False
            try:
                self._take(values)
                loss = self.probes.trained()
                better = (loss is None or math.isfinite(loss)) and not worse()
            finally:
                if not better:
                    self._take(kept)
        if better:
            self.restart()
        return better

    def _take(self, values: Sequence[Tensor]) -> None:
        for i, fragment in enumerate(values):
            self.fragments.scatter(i, fragment)
        self._changed()

    def restart(self) -> None:
        """All weights were replaced: the outer optimiser begins anew."""
        self.slow = self.fragments.gather_all()  # the old ones may be on their way to a peer
        for momentum in self.momentum:
            momentum.zero_()
        self.replaced += 1  # last: a thread that reads this number copies all of the above afterwards

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a RemoteProtocolError that is raised within, by its reason. It can decorate a function, too."""
        try:
            yield
        except RemoteProtocolError as error:
            with self._counting:
                self.refused[error.reason] += 1
            raise

    def _members(self) -> dict[str, PeerCard]:
        """Those whose cards are here, and that are not known to be gone."""
        absent = self.absent()
        return {peer: card for peer, card in self.transport.members().items() if peer not in absent}

    def _cohort(self) -> list[str]:
        """Ids of the peers here whose weights can be averaged with these, except muted ones."""
        now, cohort = self.now(), self.place.cohort
        return sorted(
            peer
            for peer, card in self._members().items()
            if card.cohort == cohort and self._muted.get(peer, 0.0) <= now
        )

    def _outgoing(
        self, peer: str, codec: WeightCodec, size: int, pieces: Callable[[], Iterator[memoryview]], **rest: Any
    ) -> Outgoing:
        """This node's half of an exchange with `peer`. `rest` are further fields of its head."""

        def counted() -> Iterator[memoryview]:
            for piece in pieces():
                with self._counting:
                    self.counts["bytes"] += len(piece)
                yield piece

        place = self.place
        version = version_for(peer, self.transport.members())
        head = AverageHead(version, place.swarm, place.cohort, place.peer_id, peer, codec=codec, **rest)
        return Outgoing(encode_head(head), size, counted)

    def _call_peer(
        self,
        peer: str,
        ours: Outgoing,
        answered: Callable[[bytes, int], Sink],
        ended: Callable[[BaseException | None], None],
    ) -> None:
        """Exchange halves with `peer`, in the background; `ended` is called with the error, if there was one."""
        judged = self.counted()(answered)
        future = self.transport.exchange(peer, AVERAGE_METHOD, ours, judged, self.config.timeout_s)
        future.add_done_callback(lambda done: ended(CancelledError() if done.cancelled() else done.exception()))

    def _head_of(self, peer: str, data: bytes) -> AverageHead:
        """The head that `peer` sent. Raises RemoteProtocolError unless it is to this node, and of this cohort."""
        head, place = decode_head(data, AverageHead), self.place
        if head.swarm != place.swarm or head.cohort != place.cohort:
            raise RemoteProtocolError("cohort", f"{head.cohort} of swarm {head.swarm[:16]}")
        if (head.sender, head.receiver) != (peer, place.peer_id):
            raise RemoteProtocolError("partner", f"from {head.sender[-8:]} to {head.receiver[-8:]}")
        if head.fragment >= self.config.fragments:
            raise RemoteProtocolError("fragment", f"{head.fragment} of {self.config.fragments}")
        return head

    def _apply(self, fragment: int, difference: Tensor, partner: str = EVERYBODY) -> Judgement:
        """Add (1 - mixing) of `difference`, which comes of averaging with `partner`, to the weights, or the part of
        that which the probes let stay. `difference` then has what the weights were.

        Raises RemoteProtocolError `probe`, with nothing changed, if they refuse the result."""
        self.before_change()
        before = self.probes.losses()
        if self.config.mixing:
            difference.mul_(1.0 - self.config.mixing)

        def halve() -> None:
            self.fragments.scatter(fragment, self.fragments.gather(fragment).lerp_(difference, 0.5))
            self._changed()

        with self.changing():
            self.fragments.add(fragment, difference)
            self._changed()
            judgement = self.probes.judge(self.robust, partner, before, halve)
            if not judgement.part:
                self.fragments.scatter(fragment, difference)
                self._changed()
                raise RemoteProtocolError("probe", judgement.why)
        return judgement

    def skip(self, reason: str, detail: str = "", peer: str = "", then: str = "the next round tries again") -> None:
        """Count an exchange, with `peer` if known, that did not succeed. Say so once for each reason and
        what comes `then`."""
        reason = reason if reason in REASONS else "refused"  # a peer may invent reasons
        self.counts[f"skipped/{reason}"] += 1
        if peer and reason in PROVEN:
            self._strikes[peer] += 1
            if self._strikes[peer] >= MUTED_AFTER:
                self._muted[peer] = self.now() + MUTED_S
                del self._strikes[peer]
                self._say(
                    Warned(f"not averaging with {self.roster.called(peer)} for an hour: {happened(reason)} ({detail})")
                )
        if reason not in ("alone", "odd"):
            called = self.roster.called(peer) if peer else ""
            self._say_once(f"{reason}, {then}", skipped(reason, detail, called, then, self.run))

    def _went_well(self, *peers: str) -> None:
        self.counts["exchanges"] += 1
        self._last = self.now(), tuple(peer for peer in peers if peer != self.place.peer_id)
        for peer in peers:
            self._strikes.pop(peer, None)


@contextmanager
def readable() -> Iterator[None]:
    """Turn what reading a damaged state raises into CheckpointError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"the averaging state is not one: {error!r}") from error
