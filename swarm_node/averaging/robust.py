"""How far another peer's weights are believed, when they are averaged with this node's own.

    clip    theta_j <- theta_i + (theta_j - theta_i) min(1, tau / |theta_j - theta_i|)
            tau = clip * usual;  usual = max(median of the last 8 accepted distances, |theta_i - phi_i|, floor)
    gates   direction: cos(theta_j - phi_i, e) and the share of equal signs of the two both much below the usual ones;
            e = mean of own progress theta_i - phi_i, lately. Refused if it fails, and |theta_j - phi_i| > 3 * usual
            size as well, or the cosine is below the usual one by twice as much as would do
            size alone: |theta_j - phi_i| > 6 max(usual size, |theta_i - phi_i|)
    group   v <- v + mean_j (x_j - v) min(1, tau / |x_j - v|), up to 20 times, from the median of each coordinate
    probe   refused if loss(averaged) - loss(own) > max(1, median + 6 MAD of such differences lately)

theta = fast weights, phi = slow weights, of this node i and its partner j; norms are over the whole fragment.

Sources: the clip is ClippedGossip (He, Karimireddy, Jaggi, arXiv 2202.01545) in the form that NoLoCo takes if gamma =
beta; theirs has several neighbours to compare, a pair has one, so here the past takes their place. Group: CenteredClip
(Karimireddy, He, Jaggi, arXiv 2012.10333), as BTARD uses it (arXiv 2106.11257). Gates and probe: our own.

Everything is compared with the median of the last 8: what most partners are like is right. Nobody is shut out for
ever, so that a swarm that was split, or peers of very different speed, find together:

- The clip shortens, it never refuses.
- A distance is remembered unclipped, but as 1.5 times the usual one at most. So honest growth is followed, by half
  every five exchanges (the lower median must move), and no faster do liars stretch it if they are the majority.
  Own progress is the one scale that no partner can stretch: it is all there is before the first exchange, and later
  it lets a node that was alone for long, and so went far, meet others who did.
- Directions fail only if they are unusual among those seen lately, refused ones included: peers with different goals
  pull against each other honestly (in a pair of opposite goals the cosine is -1). Against fixed bounds of -0.1 and
  0.45 a third to four fifths of honest partners failed in simulations. Cosine and signs nearly always fail together,
  so they have one vote: of 24 honest partners that failed both, or one and size, in runs of reinforcement learning, 7
  would be refused.
- Where peers pull against each other, so do honest ones, and only size tells who lies: of 900 honest partners in three
  kinds of runs none was more than 5.2 times as far as usual.
- All this is remembered of exchanges that ended well, with both bodies whole: who withholds the end teaches nothing.

What this cannot do: a partner within tau is believed, and the bound is for one exchange, not for their sum. Liars pull
honest nodes apart and so stretch what is usual: in simulations of eight, one liar cost a bounded loss, and so did two;
three of them who agreed on a direction were too many.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median, median_low
from typing import Any

import torch
from torch import Tensor

from protocol.errors import RemoteProtocolError
from swarm_node.averaging.codecs import bounded

WINDOW = 8
"""Exchanges remembered."""
GROWTH = 1.5
"""A distance (or a loss) is remembered as at most so many times what was usual (or allowed)."""
FLOOR = 1e-6
"""Root mean square distance always allowed: one step of Adam at the least usual learning rate. A node that has not
moved at all still learns from others, and from here on tau can grow."""
SIZE, SIZE_ALONE = 3.0, 6.0
COSINE, COSINE_MARGIN = -0.1, 0.4
SIGNS, SIGNS_MARGIN = 0.45, 0.13
"""Gates. Each fails below the fixed value, if it is also less than the usual one by the margin."""
FAR = 2.0
"""A cosine less than the usual one by so many margins needs no size that fails."""
MIN_SEEN = 3
"""Partners seen before a gate judges."""
OWN_DECAY = 0.5
"""Of the mean of own progress: about the last two exchanges."""
PROBE_FLOOR = 1.0
"""Nats per token. A node has just been trained on the answers that it probes with, so averaging always takes some of
that back; what is meant to be refused is what breaks the policy."""
PROBE_SPREAD = 6.0
"""In MADs, that is four standard deviations if differences are normal."""
ITERATIONS = 20
FLOAT32_MAX = torch.finfo(torch.float32).max
STILL = 1e-4
"""A centre that moved by less than this part of tau has been found."""
CHUNK = 2**16
"""Values worked on at a time: 256 KiB for each temporary, or 512 in float64, which a processor's cache can hold."""


@dataclass(frozen=True)
class Measures:
    """One partner's fragment beside this node's own. NaN = there was nothing to compare with."""

    distance: float
    """|theta_j - theta_i|."""
    size: float
    """|theta_j - phi_i|."""
    progress: float
    """|theta_i - phi_i|."""
    cosine: float
    """Of theta_j - phi_i and the mean of own progress."""
    signs: float
    """Share of the values moved the same way, among those that both moved."""


@dataclass
class Seen:
    """What partners were like lately, for one fragment."""

    distances: list[float] = field(default_factory=list)
    """Of those accepted."""
    sizes: list[float] = field(default_factory=list)
    cosines: list[float] = field(default_factory=list)
    signs: list[float] = field(default_factory=list)

    def remember(self, measures: Measures) -> None:
        """For the gates, whether they let these through or not."""
        _push(self.sizes, measures.size)
        _push(self.cosines, measures.cosine)
        _push(self.signs, measures.signs)


@dataclass(frozen=True)
class Verdict:
    """On one partner's fragment: nothing of it is remembered before `Robust.remember` and `Robust.accept`."""

    refused: str = ""
    """The gates that failed, if they refuse."""
    measures: Measures | None = None
    """If gates are on."""
    distance: float = math.nan
    """As it is remembered of those accepted; NaN = it says nothing."""


class Robust:
    """What this node has learned about partners, per fragment, and what it lets through. For any thread."""

    def __init__(self, clip: float, gates: bool) -> None:
        """`clip`: factor of the usual distance, 0 = never clip; `gates`: whether to refuse."""
        self.clip, self.gates = clip, gates
        self._seen: defaultdict[int, Seen] = defaultdict(Seen)
        self._own: dict[int, Tensor] = {}
        """Mean of own progress, if gates are on. bfloat16: two bytes a value, and directions need no more digits."""
        self._probed: list[float] = []
        """loss(averaged) - loss(own), lately."""
        self._guard = threading.Lock()
        """Of what is remembered, but for own progress."""
        self._checking = threading.Lock()
        """Of own progress: one `check` at a time, for one of an exchange that was given up may still be at work."""

    def check(
        self, fragment: int, fast: Tensor, slow: Tensor, partner_fast: Tensor, partner_slow: Tensor | None = None
    ) -> Verdict:
        """Change `partner_fast` in place to what is believed of it, if it is clipped; else it stays bit for bit as it
        was, as it does if it is refused. `partner_slow`, where it is sent too, is clipped to the same distance from
        `slow`.

        All are flat float32 vectors of equal length, on the CPU; this node's own are finite. Raises
        RemoteProtocolError: values (not finite, whatever the settings).
        """
        for vector in (partner_fast, *([] if partner_slow is None else [partner_slow])):
            check_finite(vector)
        if not self.clip and not self.gates:
            return Verdict()
        with self._checking:
            measures = measure(fast, slow, partner_fast, self._own.get(fragment))
            if self.gates:
                self._remember_own(fragment, fast, slow)
        with self._guard:
            seen = self._seen[fragment]
            refused = _refused(measures, seen) if self.gates else ""
            usual = max(median_low(seen.distances or [0.0]), measures.progress, FLOOR * math.sqrt(len(fast)))
        if self.clip and not refused:
            _clip(partner_fast, fast, measures.distance, self.clip * usual)
            if partner_slow is not None:
                _clip(partner_slow, slow, distance(partner_slow, slow), self.clip * usual)
        return Verdict(refused, measures if self.gates else None, min(measures.distance, GROWTH * usual))

    def remember(self, fragment: int, verdict: Verdict) -> None:
        """The exchange in which it was reached has ended well, whether it was refused or not."""
        if verdict.measures is not None:
            with self._guard:
                self._seen[fragment].remember(verdict.measures)

    def accept(self, fragment: int, verdict: Verdict) -> None:
        """The partner was averaged with: its distance counts as usual from now on."""
        if math.isfinite(verdict.distance):
            with self._guard:
                _push(self._seen[fragment].distances, verdict.distance)

    def vetoed(self, own_loss: float, merged_loss: float) -> bool:
        """Whether averaged weights do this node's own job much worse: losses, in nats per token, on the same few right
        answers of its own. The difference is remembered in any case, if vetoed as GROWTH times what was allowed."""
        allowed = PROBE_FLOOR
        if len(self._probed) >= MIN_SEEN:
            middle = median(self._probed)
            allowed = max(allowed, middle + PROBE_SPREAD * median(abs(d - middle) for d in self._probed))
        difference = merged_loss - own_loss
        _push(self._probed, min(difference, GROWTH * allowed))
        return not difference <= allowed

    def state(self) -> dict[str, Any]:
        """For a checkpoint, as JSON. Without the mean of own progress: direction is judged again one exchange later."""
        with self._guard:
            return {"probed": list(self._probed), "seen": {str(i): asdict(seen) for i, seen in self._seen.items()}}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from the `state()` of a node that cuts its weights into the same fragments."""
        self._probed = list(state["probed"])
        self._seen = defaultdict(Seen, {int(i): Seen(**seen) for i, seen in state["seen"].items()})

    def _remember_own(self, fragment: int, fast: Tensor, slow: Tensor) -> None:
        """mean <- OWN_DECAY mean + (1 - OWN_DECAY) progress; the first time, the progress itself."""
        known = self._own.get(fragment)
        own = torch.empty(len(fast), dtype=torch.bfloat16) if known is None else known
        for mean, end, start in chunks(own, fast, slow):
            progress = end - start
            mean.copy_(progress if known is None else progress.lerp(mean.float(), OWN_DECAY))
        self._own[fragment] = own


def measure(fast: Tensor, slow: Tensor, partner_fast: Tensor, own: Tensor | None) -> Measures:
    """Compare three vectors [n]; `own` [n] is the mean of own progress, if known."""
    apart = size = progress = along = own_size = 0.0
    balance = moved = 0
    for mine, start, partner, *direction in chunks(fast, slow, partner_fast, *([] if own is None else [own])):
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
    equal = (moved + balance) // 2
    return Measures(
        math.sqrt(apart),
        math.sqrt(size),
        math.sqrt(progress),
        along / math.sqrt(size * own_size) if size and own_size else math.nan,
        equal / moved if moved else math.nan,
    )


def check_finite(vector: Tensor) -> None:
    """Raises RemoteProtocolError: values."""
    if not all(bounded(chunk, FLOAT32_MAX) for chunk in vector.split(CHUNK) if len(chunk)):
        raise RemoteProtocolError("values", "weights that are not finite")


def clipped_mean(vectors: Sequence[Tensor], clip: float) -> Tensor:
    """Mean of what several peers sent of one part of the weights, [n] each and finite: `centred_clip` with tau = `clip`
    times the median distance from the middle; with clip = 0 the plain mean. Two vectors have nobody to outvote them."""
    if not clip:
        return torch.stack(tuple(vectors)).mean(0)
    middle = _coordinate_median(vectors)
    return _centred(vectors, clip * median(distance(x, middle) for x in vectors), middle)


def centred_clip(vectors: Sequence[Tensor], tau: float) -> Tensor:
    """Robust mean [n] of several vectors [n], finite: none pulls by more than `tau`."""
    return _centred(vectors, tau, _coordinate_median(vectors))


def _centred(vectors: Sequence[Tensor], tau: float, middle: Tensor) -> Tensor:
    """The iteration from `middle`, in place, until it hardly moves: two rounds if nobody is clipped."""
    for _ in range(ITERATIONS):
        pulls = [min(1.0, tau / max(distance(x, middle), 1e-300)) / len(vectors) for x in vectors]
        moved = 0.0
        for v, *parts in chunks(middle, *vectors):
            move = torch.zeros_like(v, dtype=torch.float64)
            for pull, x in zip(pulls, parts, strict=True):
                move += pull * (x.double() - v)
            v.copy_(v + move)
            moved += square(move)
        if moved <= (STILL * tau) ** 2:
            break
    return middle


def _coordinate_median(vectors: Sequence[Tensor]) -> Tensor:
    middle = torch.empty_like(vectors[0])
    below, above = (len(vectors) - 1) // 2, len(vectors) // 2
    for v, *parts in chunks(middle, *vectors):
        ordered = torch.stack(parts).sort(0).values
        v.copy_(0.5 * ordered[below] + 0.5 * ordered[above])
    return middle


def _refused(measures: Measures, seen: Seen) -> str:
    """What the gates refuse these for, "" if they let them through. What is NaN passes."""
    if min(len(seen.sizes), len(seen.cosines), len(seen.signs)) < MIN_SEEN:
        return ""
    size, cosine, signs = median(seen.sizes), median(seen.cosines), median(seen.signs)
    turned = measures.cosine < min(COSINE, cosine - COSINE_MARGIN) and measures.signs < min(SIGNS, signs - SIGNS_MARGIN)
    far = measures.size > SIZE_ALONE * max(size, measures.progress)
    if far or (turned and (measures.size > SIZE * size or measures.cosine < cosine - FAR * COSINE_MARGIN)):
        return f"size {measures.size:.3g}, cosine {measures.cosine:.2f}, equal signs {measures.signs:.2f}"
    return ""


def _push(history: list[float], value: float) -> None:
    """Append, and forget what is too old; what is not finite says nothing."""
    if math.isfinite(value):
        history.append(value)
        del history[:-WINDOW]


def _clip(partner: Tensor, own: Tensor, distance: float, tau: float) -> None:
    """partner <- own + (partner - own) tau / distance, in place, if that is less than 1. In float64, because
    differences of float32 can overflow."""
    if distance > tau:
        for theirs, mine in chunks(partner, own):
            theirs.copy_(torch.lerp(mine.double(), theirs.double(), tau / distance))


def distance(a: Tensor, b: Tensor) -> float:
    """|a - b|; infinite if a difference is more than float32 can hold."""
    return math.sqrt(sum(square(x - y) for x, y in chunks(a, b)))


def square(vector: Tensor) -> float:
    """Of its norm; in float64 where float32, which holds differences, might not hold their squares."""
    square = float(torch.dot(vector, vector))
    if 1e-20 < square < 1e30:
        return square
    vector = vector.double()
    return float(torch.dot(vector, vector))


def chunks(*vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of the same part of each, part after part."""
    return zip(*(vector.split(CHUNK) for vector in vectors), strict=True)
