"""Stage messages that have come and wait for the main thread.

    thread of a channel   expect(link, ...) -> (body is read) -> arrived(link, body)        ended(link)
    main thread           take()

Every channel has a link of its own, so two channels of one peer never mix.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from swarm_node.pipeline.membership.actions import PeerLink
from swarm_node.pipeline.messages import Limits, StageMessage
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.pipeline import Envelope

MAX_WAITING = 1024  # messages that may wait here: the schedule lets far fewer be on their way
MAX_WAITING_BYTES = 2**30  # bytes of their bodies, and of those on their way, together


@dataclass(frozen=True)
class Expected:
    """A message on a channel; its head has been decoded."""

    link: PeerLink
    envelope: Envelope
    size: int  # bytes of its body
    limits: Limits


@dataclass(frozen=True)
class Waiting:
    """A message that has come."""

    plan: int  # number of the plan that its sender goes by
    at: float  # when it came
    content: StageMessage | tuple[Expected, bytearray]
    """A message from this peer itself, or one from a channel and its body."""


class Inbox:
    """Bounds what waits here, in number and in bytes."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._waiting: deque[Waiting] = deque()
        self._coming: dict[PeerLink, Expected] = {}  # the message whose body is on its way, by channel
        self._kept = 0  # bytes of bodies that wait

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def oldest(self) -> float | None:
        """When the first message that waits came."""
        try:
            return self._waiting[0].at
        except IndexError:
            return None

    def put(self, plan: int, message: StageMessage) -> None:
        """A message from this peer itself."""
        self._waiting.append(Waiting(plan, self._now(), message))

    def expect(self, expected: Expected) -> None:
        """The body of this message is next on its channel. Raises RemoteProtocolError (flood) if there is no room."""
        if len(self._waiting) >= MAX_WAITING:
            raise RemoteProtocolError("flood", f"{MAX_WAITING} messages wait already")
        with self._lock:
            taken = self._kept + sum(other.size for other in self._coming.values())
            if taken + expected.size > MAX_WAITING_BYTES:
                raise RemoteProtocolError("flood", f"{expected.size} bytes more than {MAX_WAITING_BYTES} would wait")
            self._coming[expected.link] = expected

    def arrived(self, link: PeerLink, body: bytearray) -> None:
        """The body of the message that was expected on this channel."""
        with self._lock:
            expected = self._coming.pop(link, None)
            if expected is None:  # this peer has closed the channel
                return
            self._kept += len(body)
        self._waiting.append(Waiting(expected.limits.plan, self._now(), (expected, body)))

    def ended(self, link: PeerLink) -> None:
        """The channel is no more."""
        with self._lock:
            self._coming.pop(link, None)

    def take(self) -> Waiting | None:
        """The message that came first; `None` if none waits."""
        if not self._waiting:
            return None
        waiting = self._waiting.popleft()
        if not isinstance(waiting.content, StageMessage):
            with self._lock:
                self._kept -= len(waiting.content[1])
        return waiting
