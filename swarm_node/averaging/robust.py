"""How far another peer's weights are trusted when they are averaged with this node's own.

    clip    theta_j <- theta_i + (theta_j - theta_i) min(1, tau / |theta_j - theta_i|)
            tau = clip * usual;  usual = max(median of the last 8 accepted distances, |theta_i - phi_i|, floor)
    gates   direction: cos(theta_j - phi_i, e) and the share of equal signs of the two are both much below the usual
            values; e = mean of own progress theta_i - phi_i, lately. Refused if direction fails, and either
            |theta_j - phi_i| > 3 * usual size, or the cosine is below the usual one by twice the margin
            size alone: |theta_j - phi_i| > 6 max(usual size, |theta_i - phi_i|)
    probe   refused if loss(averaged) - loss(own) > max(1, median + 6 MAD of the last such differences)
    costs   what partners may cost in sum, by a finer probe: see `costs`

theta are fast and phi slow weights, of this node i and its partner j. Norms are over the whole fragment.

Source of the clip: ClippedGossip (arXiv 2202.01545), in the form that it has in NoLoCo with gamma = beta. There a node
compares several neighbours; a pair has one, so its past takes their place. Gates and probe are our own.

All limits follow the median of the last 8 exchanges, so most partners must be honest. No peer is excluded for ever,
so that the halves of a split swarm, or peers of very different speed, can find together:

- The clip shortens a difference, it never refuses one.
- A distance is remembered unclipped, but as 1.5 times the usual one at most. So the limit grows by half every five
  exchanges at most: honest growth is followed, and a majority of liars stretches it no faster. No partner can stretch
  own progress. It is the only scale before the first exchange, and later for a node that was alone for long.
- Direction fails only if it is unusual among the last partners, refused ones included: peers with different goals pull
  against each other honestly. Cosine and signs nearly always fail together, so they have one vote.
- The past includes only exchanges that ended well: a partner that withholds the end of its body teaches nothing. Usual
  distances are those of partners that cost no more than is usual; where nothing tells costs, none above own progress.

Limits: a partner within tau is believed, up to what it may cost. In simulations of eight nodes, one or two liars cost a
bounded loss; three that agreed on a direction were too many (docs/averaging.md).
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from statistics import median, median_low
from typing import Any

import torch
from torch import Tensor

from swarm_node.averaging.codecs import bounded
from swarm_node.averaging.costs import NOTHING, PartnerCosts
from swarm_protocol.errors import RemoteProtocolError

WINDOW = 8  # exchanges remembered
GROWTH = 1.5  # a distance is remembered as at most so many times the usual one, a loss as so many times the allowed one
FLOOR = 1e-6
"""Root mean square distance that is always allowed: one step of Adam at the smallest usual learning rate. A node that
has not moved still learns from others, and tau can grow from here."""
SIZE, SIZE_ALONE = 3.0, 6.0
COSINE, COSINE_MARGIN = -0.1, 0.4
SIGNS, SIGNS_MARGIN = 0.45, 0.13
"""Direction fails below the fixed values if it is also below the usual ones by the margins. Of 900 honest partners in
three kinds of runs, none was more than 5.2 times as far as usual."""
FAR = 2.0  # a cosine that is below the usual one by so many margins is refused whatever the size
MIN_SEEN = 3  # partners seen before a gate refuses any
OWN_DECAY = 0.5  # weight of the past in the mean of own progress, which covers about the last two exchanges
PROBE_FLOOR = 1.0
"""Nats per token. A node has just been trained on the answers that it probes with, and averaging always takes some of
that back. Only weights that break the policy are to be refused."""
PROBE_SPREAD = 6.0  # median absolute deviations: four standard deviations of normally distributed differences
FLOAT32_MAX = torch.finfo(torch.float32).max
CHUNK = 2**16  # values worked on at a time: temporaries of 256 KiB, or 512 in float64, fit in a processor's cache


@dataclass(frozen=True)
class Measures:
    """A partner's fragment compared with this node's own. NaN: there was nothing to compare with."""

    distance: float  # |theta_j - theta_i|
    size: float  # |theta_j - phi_i|
    progress: float  # |theta_i - phi_i|
    cosine: float  # cosine of theta_j - phi_i and the mean of own progress
    signs: float  # share of the values that moved the same way, among those that moved in both


@dataclass
class PartnerHistory:
    """Measures of the last partners, for one fragment."""

    distances: list[float] = field(default_factory=list)  # accepted partners only
    sizes: list[float] = field(default_factory=list)
    cosines: list[float] = field(default_factory=list)
    signs: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Judged:
    """The result of `Robust.check`. It is remembered only by `Robust.remember` and `Robust.accept`."""

    refused: str = ""  # figures that the gates refuse; empty if the fragment passes
    measures: Measures | None = None  # None if gates are off
    distance: float = math.nan  # distance to remember if the partner is accepted; NaN: none
    own: float = math.nan  # likewise where nothing tells what the partner cost: within own progress


class Robust:
    """What this node has learned about partners, per fragment, and whom it accepts. For any thread."""

    def __init__(self, clip: float, gates: bool) -> None:
        """`clip`: factor of the usual distance, 0 = never clip. `gates`: whether to refuse."""
        self.clip, self.gates = clip, gates
        self._seen: defaultdict[int, PartnerHistory] = defaultdict(PartnerHistory)
        self._own: dict[int, Tensor] = {}
        """Fragment -> mean of own progress, if gates are on. bfloat16, as directions need few digits."""
        self.costs = PartnerCosts()
        self._probed: list[float] = []  # the last differences loss(averaged) - loss(own)
        self._guard = threading.Lock()  # guards what is remembered, except own progress
        self._checking = threading.Lock()
        """Guards own progress: a `check` of an exchange that was given up may still be running."""

    def check(
        self, fragment: int, fast: Tensor, slow: Tensor, partner_fast: Tensor, partner_slow: Tensor | None = None
    ) -> Judged:
        """Judge a partner's fragment, and clip it in place. A fragment that needs no clipping, or is refused, stays as
        it was. `partner_slow`, if it travels, is clipped to the same distance from `slow`.

        All are flat float32 vectors of equal length, on the CPU; this node's own are finite. Raises
        RemoteProtocolError `values` if the partner's are not finite, whatever the settings.
        """
        check_finite(partner_fast)
        if partner_slow is not None:
            check_finite(partner_slow)
        if not self.clip and not self.gates:
            return Judged()
        with self._checking:
            measures = measure(fast, slow, partner_fast, self._own.get(fragment))
            if self.gates:
                self._remember_own(fragment, fast, slow)
        with self._guard:
            seen = self._seen[fragment]
            refused = _refused(measures, seen) if self.gates else ""
            own = max(measures.progress, FLOOR * math.sqrt(len(fast)))
            usual = max(median_low(seen.distances or [0.0]), own)
        if self.clip and not refused:
            _clip(partner_fast, fast, measures.distance, self.clip * usual)
            if partner_slow is not None:
                _clip(partner_slow, slow, distance(partner_slow, slow), self.clip * usual)
        distances = (min(measures.distance, most) for most in (GROWTH * usual, own))
        return Judged(refused, measures if self.gates else None, *distances)

    def remember(self, fragment: int, verdict: Judged) -> None:
        """The exchange ended well, whether the partner was refused or not."""
        if verdict.measures is not None:
            with self._guard:
                seen, measures = self._seen[fragment], verdict.measures
                _push(seen.sizes, measures.size)
                _push(seen.cosines, measures.cosine)
                _push(seen.signs, measures.signs)

    def accept(self, fragment: int, verdict: Judged, cheap: bool | None) -> None:
        """The partner was averaged with: its distance is a usual one, unless it was found to cost more than is usual
        (not `cheap`). None = nothing tells what it cost."""
        known = verdict.own if cheap is None else verdict.distance
        if cheap is not False and math.isfinite(known):
            with self._guard:
                _push(self._seen[fragment].distances, known)

    def broken(self, own_loss: float, merged_loss: float) -> bool:
        """Whether averaged weights do this node's own job much worse. Both are losses in nats per token on the same
        right answers of its own, which it may just have been trained on. The difference is remembered, as GROWTH times
        the allowed one at most."""
        allowed = PROBE_FLOOR
        if len(self._probed) >= MIN_SEEN:
            middle = median(self._probed)
            allowed = max(allowed, middle + PROBE_SPREAD * median(abs(d - middle) for d in self._probed))
        difference = merged_loss - own_loss
        _push(self._probed, min(difference, GROWTH * allowed))
        return not difference <= allowed

    def state(self) -> dict[str, Any]:
        """For a checkpoint, as JSON. It lacks the mean of own progress, so direction is not judged at once."""
        with self._guard:
            seen = {str(i): asdict(seen) for i, seen in self._seen.items()}
            return {"probed": list(self._probed), "seen": seen, "costs": self.costs.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from the `state()` of a node with the same fragments."""
        self._probed = list(state["probed"])
        self._seen = defaultdict(PartnerHistory, {int(i): PartnerHistory(**seen) for i, seen in state["seen"].items()})
        self.costs.load(state.get("costs", NOTHING))  # older checkpoints have none

    def _remember_own(self, fragment: int, fast: Tensor, slow: Tensor) -> None:
        """mean <- OWN_DECAY mean + (1 - OWN_DECAY) progress; at first the progress itself."""
        known = self._own.get(fragment)
        own = torch.empty(len(fast), dtype=torch.bfloat16) if known is None else known
        for mean, end, start in cache_parts(own, fast, slow):
            progress = end - start
            mean.copy_(progress if known is None else progress.lerp(mean.float(), OWN_DECAY))
        self._own[fragment] = own


def measure(fast: Tensor, slow: Tensor, partner_fast: Tensor, own: Tensor | None) -> Measures:
    """Compare three vectors [n]; `own` [n] is the mean of own progress, if known."""
    apart = size = progress = along = own_size = 0.0
    balance = moved = 0
    for mine, start, partner, *direction in cache_parts(fast, slow, partner_fast, *([] if own is None else [own])):
        step = partner - start
        apart += square(partner - mine)
        size += square(step)
        progress += square(mine - start)
        for mean in direction:
            along += float(torch.dot(step.double(), mean.double()))
            mean = mean.float()
            own_size += square(mean)
            agreement = step.sign_().mul_(mean.sign_())  # 1, -1, or 0 where one of them did not move
            balance += int(agreement.sum())
            moved += int(torch.dot(agreement, agreement))
    cosine = along / math.sqrt(size * own_size) if size and own_size else math.nan
    signs = (moved + balance) // 2 / moved if moved else math.nan
    return Measures(math.sqrt(apart), math.sqrt(size), math.sqrt(progress), cosine, signs)


def check_finite(vector: Tensor) -> None:
    """Raises RemoteProtocolError `values` unless all values are finite."""
    if not all(bounded(chunk, FLOAT32_MAX) for chunk in vector.split(CHUNK) if len(chunk)):
        raise RemoteProtocolError("values", "weights that are not finite")


def _refused(measures: Measures, seen: PartnerHistory) -> str:
    """The figures for which the gates refuse, empty if they accept. NaN passes."""
    if min(len(seen.sizes), len(seen.cosines), len(seen.signs)) < MIN_SEEN:
        return ""
    size, cosine, signs = median(seen.sizes), median(seen.cosines), median(seen.signs)
    turned = measures.cosine < min(COSINE, cosine - COSINE_MARGIN) and measures.signs < min(SIGNS, signs - SIGNS_MARGIN)
    far = measures.size > SIZE_ALONE * max(size, measures.progress)
    if far or (turned and (measures.size > SIZE * size or measures.cosine < cosine - FAR * COSINE_MARGIN)):
        return f"size {measures.size:.3g}, cosine {measures.cosine:.2f}, equal signs {measures.signs:.2f}"
    return ""


def _push(history: list[float], value: float) -> None:
    """Append `value` if it is finite, and keep the last `WINDOW` values."""
    if math.isfinite(value):
        history.append(value)
        del history[:-WINDOW]


def _clip(partner: Tensor, own: Tensor, distance: float, tau: float) -> None:
    """partner <- own + (partner - own) tau / distance, in place, if that is shorter. It is computed in float64, because
    differences of float32 can overflow."""
    if distance > tau:
        for theirs, mine in cache_parts(partner, own):
            theirs.copy_(torch.lerp(mine.double(), theirs.double(), tau / distance))


def distance(a: Tensor, b: Tensor) -> float:
    """|a - b|; infinite if a difference exceeds float32."""
    return math.sqrt(sum(square(x - y) for x, y in cache_parts(a, b)))


def square(vector: Tensor) -> float:
    """|vector|^2, in float64 where float32 might overflow or underflow."""
    square = float(torch.dot(vector, vector))
    if 1e-20 < square < 1e30:
        return square
    vector = vector.double()
    return float(torch.dot(vector, vector))


def cache_parts(*vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The vectors cut into parts that fit a processor's cache: views of the same part of each."""
    return zip(*(vector.split(CHUNK) for vector in vectors), strict=True)
