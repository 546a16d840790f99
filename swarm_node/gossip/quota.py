"""Token bucket: at most `limit` in any instant, and `limit` more in every minute after it.

level <- min(limit, level + limit * elapsed / 60);   a cost is taken if the level covers it
"""

from __future__ import annotations


class Quota:
    """What may pass in a minute, of groups or of bytes."""

    def __init__(self, limit: float, now: float) -> None:
        self._limit = limit
        self._level = limit
        self._since = now

    def level(self, now: float) -> float:
        """What could be taken at `now` (seconds)."""
        self._level = min(self._limit, self._level + self._limit * max(0.0, now - self._since) / 60)
        self._since = now
        return self._level

    def take(self, cost: float) -> None:
        """Take `cost`, which `level` has covered."""
        self._level -= cost
