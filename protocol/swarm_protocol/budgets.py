"""Token buckets: how much may be taken in a time. Pure: `now` (seconds of any clock) comes in.

level(now) = min(most, level(then) + rate * (now - then))
"""

from __future__ import annotations

from collections import OrderedDict

MINUTE_S = 60.0


class TokenBucket:
    """One bucket: it holds at most `most` tokens and gains `rate` tokens a second."""

    __slots__ = ("_at", "_level", "_most", "_rate")

    def __init__(self, rate: float, most: float, now: float, level: float | None = None) -> None:
        """The bucket begins full, or at `level`."""
        self._rate, self._most = rate, most
        self._level, self._at = most if level is None else level, now

    def level(self, now: float) -> float:
        """Tokens that are left; below zero if more was taken than there was."""
        self._level = min(self._most, self._level + max(0.0, now - self._at) * self._rate)
        self._at = now
        return self._level

    def take(self, tokens: float, now: float) -> float:
        """Take `tokens`, even if too few are left. Returns the seconds until the level is back at zero."""
        self._level = self.level(now) - tokens
        return max(0.0, -self._level / self._rate)


class Budgets:
    """Named budgets, each of one or more token buckets that hold a minute's worth and fill in a minute. At most `names`
    are remembered; the name used longest ago is forgotten first."""

    def __init__(self, names: int, *most: float) -> None:
        self._names, self._most = names, most
        self._buckets: OrderedDict[str, tuple[TokenBucket, ...]] = OrderedDict()

    def __contains__(self, name: str) -> bool:
        return name in self._buckets

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, name: str, now: float, *costs: float) -> bool:
        """Take one cost from each bucket of `name`, whose buckets begin full. Returns False, and takes nothing, unless
        every bucket has enough."""
        buckets = self._buckets.get(name)
        if buckets is None:
            buckets = tuple(TokenBucket(most / MINUTE_S, most, now) for most in self._most)
            self._buckets[name] = buckets
        fits = all([bucket.level(now) >= cost for bucket, cost in zip(buckets, costs, strict=True)])
        if fits:
            for bucket, cost in zip(buckets, costs, strict=True):
                bucket.take(cost, now)
        self._buckets.move_to_end(name)
        if len(self._buckets) > self._names:
            self._buckets.popitem(last=False)
        return fits
