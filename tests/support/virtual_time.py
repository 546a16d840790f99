"""Time that passes only where a test says so."""

from __future__ import annotations


class VirtualTime:
    """Stands in for the module `time`, and for a clock (it can be called). Seconds."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self.used = 0.0
        """CPU time."""
        self.naps: list[float] = []
        """What was slept, each time."""

    def __call__(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.used

    def work(self, seconds: float) -> None:
        """With one core."""
        self.now += seconds
        self.used += seconds

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 0.001)  # no sleep takes no time at all
        self.naps.append(seconds)
