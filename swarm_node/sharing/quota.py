"""What one peer may publish: `Quota` is the sender's side of it, `Minutes` the receivers'.

sender     in second s of a minute of the clock at most limit * (1/2 + s / 120) of that minute: half of it at once, so
           that slow rounds fit, and the rest evenly, so that a fast node is never silent for long
receiver   at most `limit` of what was made in one minute of the sender's clock, whenever it arrives
"""

from __future__ import annotations

MINUTE_S = 60.0
MAX_MINUTES = 32
"""Minutes of a peer that are remembered: three times what is not too old by default, in 5 kB."""


class Quota:
    """What a sender may publish, of groups or of bytes, by the minute of its clock."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._minute = -1
        self._used = 0.0

    def level(self, now: float) -> float:
        """What could be taken at `now` (Unix seconds)."""
        minute, second = divmod(now, MINUTE_S)
        if int(minute) != self._minute:
            self._minute, self._used = int(minute), 0.0
        so_far = max(1.0, self._limit * (0.5 + second / (2 * MINUTE_S)))  # 1: a limit of one group is one at any time
        return max(0.0, min(self._limit, so_far) - self._used)

    def take(self, cost: float) -> None:
        """Take `cost`, which `level` has covered."""
        self._used += cost


class Minutes:
    """What a peer's groups took of its limits, by the minute in which they were made.

    The minute of arrival does not count: an old message that somebody says again uses up an old minute.
    """

    def __init__(self, groups: int, size: int) -> None:
        """`groups` and `size` (bytes) are what a minute allows."""
        self._groups = groups
        self._bytes = size
        self._used: dict[int, tuple[int, float]] = {}  # minute -> (groups, bytes)

    def take(self, created: float, size: float) -> bool:
        """Count a group of `size` bytes made at `created` (Unix seconds); false if its minute has no room for it, or
        is older than all that are remembered."""
        minute = int(created // MINUTE_S)
        if minute not in self._used and len(self._used) >= MAX_MINUTES:
            oldest = min(self._used)
            if minute < oldest:
                return False
            del self._used[oldest]
        groups, used = self._used.get(minute, (0, 0.0))
        fits = groups + 1 <= self._groups and used + size <= self._bytes
        self._used[minute] = (groups + 1, used + size) if fits else (groups, used)
        return fits
