"""Reports repeated sentences ever more rarely.

a sentence: at once -> again after FIRST_S at the earliest -> 2 FIRST_S -> ... -> LONGEST_S
A sentence that did not come up for LONGEST_S is forgotten, and so reported at once. Sentences do not affect each other.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

FIRST_S = 60.0
LONGEST_S = 3600.0
MAX_SENTENCES = 64  # Remembered; beyond, the one that came up longest ago is forgotten
_PASSING = re.compile(r"0x[0-9a-f]+|\d\d:\d\d:\d\d\S*")
"""Parts of a sentence that vary: addresses of objects, times of day."""


@dataclass
class _Told:
    next_at: float = -math.inf  # when the sentence may be reported again
    pause: float = FIRST_S
    came: float = 0.0  # when the sentence last came up


class Reports:
    """Passes sentences on to `report`, except those reported a short while ago."""

    def __init__(self, report: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._report = report
        self._clock = clock
        self._told: dict[str, _Told] = {}  # latest come up last

    def __call__(self, sentence: str) -> None:
        now, key = self._clock(), _PASSING.sub("", sentence)
        told = self._told.pop(key, None)
        if told is None or now - told.came > LONGEST_S:
            told = _Told()
        self._told[key] = told
        told.came = now
        if now < told.next_at:
            return
        told.next_at, told.pause = now + told.pause, min(2 * told.pause, LONGEST_S)
        if len(self._told) > MAX_SENTENCES:
            del self._told[next(iter(self._told))]
        self._report(sentence)
