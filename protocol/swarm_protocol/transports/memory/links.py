"""Virtual time, and the links over which nodes of the network in memory send."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

UPLINK_TURN_S = 0.25
"""A body occupies its uplink for at most this long at a time, so that other traffic waits no longer than that."""


class VirtualClock:
    """Time that passes only from event to event. Events at the same time happen in the order of their registration."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._asked = 0

    def now(self) -> float:
        """Seconds since an origin that the caller chose with `start`."""
        return self._now

    def call_at(self, t: float, fn: Callable[..., None], *args: Any) -> None:
        """Call `fn(*args)` at time `t`, or as the next event if `t` has passed."""
        self._asked += 1
        heapq.heappush(self._events, (max(t, self._now), self._asked, fn, args))

    def call_in(self, seconds: float, fn: Callable[..., None], *args: Any) -> None:
        self.call_at(self._now + seconds, fn, *args)

    def step(self, until: float = math.inf) -> bool:
        """Run the next event. Returns False, and changes nothing, if there is none up to `until`."""
        if not self._events or self._events[0][0] > until:
            return False
        self._now, _, fn, args = heapq.heappop(self._events)
        fn(*args)
        return True

    def run_until(self, t: float) -> None:
        """Run all events up to and including time `t`."""
        while self.step(t):
            pass
        self._now = max(self._now, t)


@dataclass(frozen=True)
class LinkModel:
    """A node's connection to the rest of the world. A message passes the sender's link and the receiver's link: their
    delays add up, and either link may lose the message."""

    latency_s: float = 0.02
    jitter_s: float = 0.0  # largest random delay in addition to the latency
    bandwidth_bytes_s: float = math.inf  # bandwidth of the uplink. Messages leave one after the other.
    loss: float = 0.0  # probability that a message is lost. Requests are never lost: they run over streams.
    duplicate: float = 0.0  # probability that a message arrives twice


class Uplink:
    """The sending half of one node's link."""

    def __init__(self, model: LinkModel) -> None:
        self.model = model
        self.bytes_out = 0
        self.free_at = 0.0  # time at which everything queued so far has left

    def send(self, size: int, now: float) -> float:
        """Queue `size` bytes. Returns the time at which they have left."""
        self.bytes_out += size
        self.free_at = max(self.free_at, now) + size / self.model.bandwidth_bytes_s
        return self.free_at

    def send_turn(self, left: int, now: float) -> tuple[int, float]:
        """Queue one turn of a body of which `left` bytes are left. Returns its size and the seconds until it has left:
        then other traffic may use the uplink."""
        bandwidth = self.model.bandwidth_bytes_s
        size = min(left, max(1, int(bandwidth * UPLINK_TURN_S))) if bandwidth < math.inf else left
        return size, self.send(size, now) - now
