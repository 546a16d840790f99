"""Which stage is given up where work fails again and again, though no stage is lost.

    nothing arrives    all stages answer, but one keeps what it was to pass on, or passes on what is of no use
    refused            a stage refuses what it is sent: either it lies, or a neighbour does

Who it is cannot be seen, unless only one stage is at another peer. So one after the other is given up, until work is
done: a stage that holds all others up for ever costs more than an honest one that has to come back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Literal

TRIES = 3  # failures, none of which is followed by work that is done, before a stage is given up

Failure = Literal["nothing arrives", "refused"]


class Hindrances:
    """Failures since work was last done, and the stages that were given up for them."""

    def __init__(self) -> None:
        self._failed: Counter[Failure] = Counter()
        self._given_up: Counter[int] = Counter()

    def blamed(self, failure: Failure, suspects: Collection[int], first: int, tries: int = TRIES) -> int | None:
        """Work has failed. The stage of `suspects`, which are those at other peers, that is to be given up: `first`, if
        none of them was given up before. None if that were less than `tries` times, or there are no suspects."""
        self._failed[failure] += 1
        if self._failed[failure] < tries or not suspects:
            return None
        self._failed.clear()
        stage = min(suspects, key=lambda stage: (self._given_up[stage], stage != first, -stage))
        self._given_up[stage] += 1
        return stage

    def done(self, *failures: Failure) -> None:
        """Work is done in which these failures would have shown."""
        for failure in failures:
            del self._failed[failure]
