"""Channels between two nodes of the network in memory."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.transports.base import Listener
from swarm_protocol.transports.memory.station import Air, Station
from swarm_protocol.transports.streams import channels


@dataclass(eq=False)
class MemoryChannel:
    """One end of a channel: the end of node `owner`."""

    peer: str
    other: Station
    owner: Station
    network: Air
    listener: Listener | None = None
    taken: bool = False  # whether the peer opened the channel, and `owner` accepted it
    _far: MemoryChannel | None = None
    _open: bool = False  # whether the channel is open, so that messages may leave
    _severed: bool = False  # whether a fault has cut the connection: nothing arrives any more
    _why: str = ""  # why the channel is closed; empty while it is not
    _queue: deque[tuple[bytes, list[memoryview], int]] = field(default_factory=deque)
    """Head, body, and bytes of both. The first message is leaving if the channel is open."""
    _queued: int = 0
    _arrival: float = 0.0  # when the message sent last arrives. No later message overtakes it.

    def send(self, head: bytes, *body: bytes | memoryview) -> bool:
        parts = channels.parts_of(head, body)
        size = len(head) + sum(map(len, parts))
        if self._why:
            return False
        if self._queued + size > channels.MAX_QUEUED_BYTES:
            self.owner.rejected[channels.SLOW] += 1
            self.stop(channels.SLOW)
            return False
        self._queue.append((head, parts, size))
        self._queued += size
        if self._open and len(self._queue) == 1:
            self._leave(size)
        return True

    def close(self) -> None:
        self.stop(channels.CLOSED)

    def ask(self, method: str) -> None:
        owner, other = self.owner, self.other
        if self._why:
            return
        if self._severed or not owner.can_reach(other):
            self.network.faults["cut"] += 1
            self.stop(f"{self.peer} cannot be reached")
            return
        taken = [channel.peer for channel in other.channels if channel.taken]
        opened = other.openings.get(method)
        refused = ""
        if len(taken) >= channels.MAX_CHANNELS or taken.count(owner.peer_id) >= channels.MAX_CHANNELS_PER_PEER:
            other.rejected["busy"] += 1
            refused = "busy"
        elif opened is None:
            other.rejected["method"] += 1
            refused = f"does not know the method {method!r}"
        else:
            far = MemoryChannel(owner.peer_id, owner, other, self.network)
            try:
                far.listener = opened(far)
            except RemoteProtocolError as error:
                other.rejected[error.reason] += 1
                refused = str(error)
            else:
                far.taken, far._far, self._far = True, self, far
                other.channels[far] = None
                far._begin()
        back = self.network.clock.now() + self.network.delay(other, owner)
        if refused:
            self.network.clock.call_at(back, self.stop, f"refused: {refused}")
        else:
            self.network.clock.call_at(back, self._begin)

    def _begin(self) -> None:
        if self._severed:
            self.network.faults["cut"] += 1
        elif not self._why:
            self._open = True
            if self._queue:
                self._leave(self._queue[0][2])

    def _leave(self, left: int) -> None:
        """Send the first message turn by turn, then the next one."""
        if not self._why:
            size, seconds = self.owner.uplink.send_turn(left, self.network.clock.now())
            self.network.clock.call_in(seconds, self._left, left - size)

    def _left(self, left: int) -> None:
        if left or self._why:
            return self._leave(left)
        assert self._far is not None
        head, parts, size = self._queue.popleft()
        self._queued -= size
        self.network.clock.call_at(self.next_arrival(), self._far._arrive, head, bytearray().join(parts))
        if self._queue:
            self._leave(self._queue[0][2])

    def _arrive(self, head: bytes, body: bytearray) -> None:
        if self._severed:
            self.network.faults["cut"] += 1
        if self._severed or self._why:
            return
        assert self.listener is not None
        self.owner.bytes_in += len(head) + len(body)
        try:
            self.listener.judge(head, len(body))
            self.listener.received(head, body)
        except RemoteProtocolError as error:  # anything else is a bug, and ends the simulation
            self.owner.rejected[error.reason] += 1
            self.stop(str(error))

    def next_arrival(self) -> float:
        arrival = self.network.clock.now() + self.network.delay(self.owner, self.other)
        self._arrival = max(self._arrival, arrival)
        return self._arrival

    def cut(self) -> None:
        """Cut the connection both ways. Both ends notice after `SILENCE_S`."""
        for end in (self, self._far):
            if end is not None and not end._severed:
                end._severed = True
                self.network.clock.call_in(channels.SILENCE_S, end._fall_silent)

    def _fall_silent(self) -> None:
        if not self._why:
            self.owner.rejected[channels.SILENT] += 1
            self.stop(channels.SILENT)

    def stop(self, why: str) -> None:
        """Say goodbye to the peer, and tell the listener in the next event."""
        if self._why:
            return
        self._why = why
        self._queue.clear()
        self.network.clock.call_at(self.network.clock.now(), self._tell)
        if self._far is not None and not self._severed:
            self.network.clock.call_at(self.next_arrival(), self._far._goodbye)

    def _goodbye(self) -> None:
        if not self._severed:
            self.stop(channels.CLOSED)

    def _tell(self) -> None:
        self.owner.channels.pop(self, None)
        if self.listener is not None:
            self.listener.closed(self._why)
