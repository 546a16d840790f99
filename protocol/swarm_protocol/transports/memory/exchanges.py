"""Exchanges of bodies between two nodes of the network in memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from swarm_protocol.errors import PeerUnreachable, RemoteProtocolError, in_seconds
from swarm_protocol.limits import MAX_CHUNK_BYTES
from swarm_protocol.transports.base import Accepted, Outgoing, Sink
from swarm_protocol.transports.memory.station import Air, Station
from swarm_protocol.transports.streams.exchanges import MAX_EXCHANGES, MAX_EXCHANGES_PER_PEER, body_pieces, check_call


@dataclass(eq=False)
class MemoryExchange:
    """One exchange, from event to event. Each event first checks that both peers are still connected; if not, the
    exchange ends. Events that come after the end hold an emptied object, because bodies may be large."""

    network: Air
    caller: Station
    acceptor: Station
    method: str
    ours: Outgoing
    answered: Callable[[bytes, int], Sink]
    future: Future[None] = field(default_factory=Future)
    _theirs: Accepted | None = None
    _sink: Sink | None = None  # where the caller's side puts the acceptor's body
    _missing: int = 2  # number of bodies that have not arrived
    _over: bool = False

    def begin(self, timeout: float) -> Future[None]:
        """The future is done when the exchange is over."""
        self.future.set_running_or_notify_cancel()
        self._after(timeout, self._fail, PeerUnreachable(f"no answer within {in_seconds(timeout)}"))
        self._after(self.network.delay(self.caller, self.acceptor), self._ask)
        return self.future

    def _after(self, seconds: float, step: Callable[..., None], *arguments: Any) -> None:
        self.network.clock.call_in(seconds, self._go_on, step, *arguments)

    def _go_on(self, step: Callable[..., None], *arguments: Any) -> None:
        if self._over:
            return
        if not self.caller.can_reach(self.acceptor):
            self.network.faults["cut"] += 1
            step, arguments = self._fail, (PeerUnreachable("the connection broke"),)
        step(*arguments)

    def _ask(self) -> None:
        caller, acceptor, running = self.caller, self.acceptor, self.acceptor.exchanging
        self._count(caller, acceptor, len(self.ours.head))
        accept = acceptor.acceptors.get(self.method)
        if accept is None:
            acceptor.rejected["method"] += 1
            return self._end(PeerUnreachable(f"{acceptor.peer_id} does not know the method {self.method!r}"))
        if running.total() >= MAX_EXCHANGES or running[caller.peer_id] >= MAX_EXCHANGES_PER_PEER:
            acceptor.rejected["busy"] += 1
            return self._end(PeerUnreachable("busy"))
        try:
            self._theirs = accept(caller.peer_id, self.ours.head, self.ours.size)
        except RemoteProtocolError as error:
            acceptor.rejected[error.reason] += 1
            return self._end(error)
        check_call(self.method, self._theirs.ours)
        running[caller.peer_id] += 1
        self._after(self.network.delay(acceptor, caller), self._answer)

    def _answer(self) -> None:
        assert self._theirs is not None
        ours, theirs = self.ours, self._theirs.ours
        self._count(self.acceptor, self.caller, len(theirs.head))
        try:
            self._sink = self.answered(theirs.head, theirs.size)
        except RemoteProtocolError as error:
            self.caller.rejected[error.reason] += 1
            return self._end(error, self._torn())
        self._leave(self.caller, self.acceptor, ours.size)
        self._leave(self.acceptor, self.caller, theirs.size)

    def _leave(self, sender: Station, receiver: Station, left: int) -> None:
        size, seconds = sender.uplink.send_turn(left, self.network.clock.now())
        if size < left:
            self._after(seconds, self._leave, sender, receiver, left - size)
        else:
            self._after(seconds + self.network.delay(sender, receiver), self._arrive)

    def _arrive(self) -> None:
        self._missing -= 1
        if self._missing:
            return
        assert self._theirs is not None and self._sink is not None
        self.caller.bytes_in += self._theirs.ours.size
        self.acceptor.bytes_in += self.ours.size
        try:
            _pour(self.ours, self._theirs.sink)
        except RemoteProtocolError as error:
            self.acceptor.rejected[error.reason] += 1
            return self._end(self._torn(), error)
        try:
            _pour(self._theirs.ours, self._sink)
        except RemoteProtocolError as error:
            self.caller.rejected[error.reason] += 1
            return self._end(error, self._torn())
        self._end(None)

    def _fail(self, error: Exception) -> None:
        self._end(error, error)

    def _end(self, for_caller: Exception | None, for_acceptor: Exception | None = None) -> None:
        """Tell both sides at once, and release their bodies and callbacks."""
        future, theirs = self.future, self._theirs
        self._over = True
        del self.future, self.ours, self.answered, self._theirs, self._sink
        for error in (for_caller, for_acceptor):
            if error is not None:
                error.__traceback__ = None  # whose frames hold bodies
        if theirs is not None:
            self.acceptor.exchanging[self.caller.peer_id] -= 1
        if for_caller is None:
            future.set_result(None)
        else:
            future.set_exception(for_caller)
        if theirs is not None:
            theirs.done(for_acceptor)

    def _torn(self) -> RemoteProtocolError:
        return RemoteProtocolError("torn", f"{self.method}: the other side ended it")

    @staticmethod
    def _count(sender: Station, receiver: Station, size: int) -> None:
        sender.uplink.bytes_out += size
        receiver.bytes_in += size


def _pour(ours: Outgoing, sink: Sink) -> None:
    """Give a body to a sink, in the same pieces as over a real stream."""
    piece = bytearray()
    for made in body_pieces(ours):
        piece += made
        if len(piece) >= MAX_CHUNK_BYTES:
            sink(memoryview(piece[:MAX_CHUNK_BYTES]))
            piece = piece[MAX_CHUNK_BYTES:]
    if piece:
        sink(memoryview(piece))
