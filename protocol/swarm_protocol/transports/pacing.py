"""Limits on the bytes a second that a node sends and receives.

    half of each limit    the streams: exchanges, requests, channels         `streams.stream`, before p2pd
    the other half        gossip                                             at its TCP connections, in its process

DHT traffic is counted against the streams' half and never delayed. Streams that p2pd relays for others (`--relay`) do
not pass through here, so the limits do not include them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from swarm_protocol.budgets import TokenBucket

BANDWIDTH_BURST_S = 0.25  # unused bandwidth of this time may be made up for
OVERHEAD = 1.08  # bytes on the wire for one of ours: libp2p's encryption and multiplexing, TCP and IP


def bytes_s(mbit: float) -> float:
    """Bytes a second of half of a limit in Mbit/s, in bytes of ours."""
    return mbit * 125_000 / 2 / OVERHEAD


class Bandwidth:
    """A limit in bytes a second that streams share; 0 = no limit. All calls come from one thread."""

    def __init__(self, bytes_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.bytes_s = bytes_s
        self._clock = clock
        self._bucket = TokenBucket(bytes_s, BANDWIDTH_BURST_S * bytes_s, clock(), level=0.0)

    def take(self, size: int) -> float:
        """Count `size` bytes. Returns the seconds until the next may follow."""
        return self._bucket.take(size, self._clock()) if self.bytes_s else 0.0
