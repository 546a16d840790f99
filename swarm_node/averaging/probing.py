"""This node's own losses before and after averaging, and what they say about it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from swarm_node.averaging.robust import Robust

Losses = tuple[float | None, float | None]


class Judgement(NamedTuple):
    """What is to become of averaged weights."""

    part: float  # of the change that is to stay: 1, less where all partners together have cost much lately, 0 = none
    cheap: bool | None  # whether the whole of it costs no more than is usual; None = nothing tells
    why: str = ""  # what is said of part 0


@dataclass
class Probes:
    """Two losses of this node in nats per token, each None as long as there is nothing to compute it with."""

    trained: Callable[[], float | None]  # on its latest best answers, which it was trained on
    on: bool = True  # whether averaging is judged by them
    unseen: Callable[[], float | None] = lambda: None
    """On right answers that nobody was trained on. Small costs show there; answers that a node was just trained on
    become less likely with honest partners, too."""

    def losses(self) -> Losses:
        return (self.trained(), self.unseen()) if self.on else (None, None)

    def judge(self, robust: Robust, partner: str, before: Losses, halve: Callable[[], None]) -> Judgement:
        """Judge averaging with `partner` by the `losses` before it and now. `halve` takes half of it back."""
        (own, unseen), (own_now, unseen_now) = before, self.losses()
        if own is not None and own_now is not None and robust.broken(own, own_now):
            return Judgement(0.0, False, "much less, at once")
        if unseen is None or unseen_now is None:
            return Judgement(1.0, None if self.on else True)

        def halved() -> float:
            halve()
            loss = self.unseen()
            return math.nan if loss is None else loss

        part, cheap = robust.costs.judge(partner, unseen, unseen_now, halved)
        return Judgement(part, cheap, "in sum, with this partner or with all, lately")
