"""Exchanges of bodies between two nodes of the network in memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from protocol.errors import PeerUnreachable, RemoteProtocolError
from protocol.limits import MAX_CHUNK_BYTES
from protocol.transports.base import Accepted, Outgoing, Sink
from protocol.transports.streams.exchanges import MAX_EXCHANGES, MAX_EXCHANGES_PER_PEER, body_pieces, check_call

if TYPE_CHECKING:
    from protocol.transports.memory.network import MemoryNetwork
    from protocol.transports.memory.transport import MemoryTransport


class MemoryExchange:
    """One exchange, from event to event. Each event first checks that both peers are still connected; if not, the
    exchange ends. Events that come after the end hold an emptied object, because bodies may be large."""

    def __init__(
        self,
        network: MemoryNetwork,
        caller: MemoryTransport,
        acceptor: MemoryTransport,
        method: str,
        ours: Outgoing,
        answered: Callable[[bytes, int], Sink],
        timeout: float,
    ) -> None:
        self.future: Future[None] = Future()
        self._network = network
        self._caller = caller
        self._acceptor = acceptor
        self._method = method
        self._ours = ours
        self._answered = answered
        self._theirs: Accepted | None = None
        self._sink: Sink | None = None  # where the caller's side puts the acceptor's body
        self._missing = 2  # number of bodies that have not arrived
        self._over = False
        self.future.set_running_or_notify_cancel()
        self._after(timeout, self._fail, PeerUnreachable(f"no answer within {timeout:g} s"))
        self._after(network.delay(caller, acceptor), self._ask)

    def _after(self, seconds: float, step: Callable[..., None], *arguments: Any) -> None:
        self._network.clock.call_in(seconds, self._go_on, step, *arguments)

    def _go_on(self, step: Callable[..., None], *arguments: Any) -> None:
        if self._over:
            return
        if not self._caller.can_reach(self._acceptor):
            self._network.faults["cut"] += 1
            step, arguments = self._fail, (PeerUnreachable("the connection broke"),)
        step(*arguments)

    def _ask(self) -> None:
        caller, acceptor, running = self._caller, self._acceptor, self._acceptor.exchanging
        self._count(caller, acceptor, len(self._ours.head))
        accept = acceptor.acceptors.get(self._method)
        if accept is None:
            acceptor.rejected["method"] += 1
            self._end(PeerUnreachable(f"{acceptor.peer_id} does not know the method {self._method!r}"))
            return
        if running.total() >= MAX_EXCHANGES or running[caller.peer_id] >= MAX_EXCHANGES_PER_PEER:
            acceptor.rejected["busy"] += 1
            self._end(PeerUnreachable("busy"))
            return
        try:
            self._theirs = accept(caller.peer_id, self._ours.head, self._ours.size)
        except RemoteProtocolError as error:
            acceptor.rejected[error.reason] += 1
            self._end(error)
            return
        check_call(self._method, self._theirs.ours)
        running[caller.peer_id] += 1
        self._after(self._network.delay(acceptor, caller), self._answer)

    def _answer(self) -> None:
        assert self._theirs is not None
        ours, theirs = self._ours, self._theirs.ours
        self._count(self._acceptor, self._caller, len(theirs.head))
        try:
            self._sink = self._answered(theirs.head, theirs.size)
        except RemoteProtocolError as error:
            self._caller.rejected[error.reason] += 1
            self._end(error, _torn(self._method))
            return
        self._leave(self._caller, self._acceptor, ours.size)
        self._leave(self._acceptor, self._caller, theirs.size)

    def _leave(self, sender: MemoryTransport, receiver: MemoryTransport, left: int) -> None:
        size, seconds = sender.uplink.send_turn(left, self._network.clock.now())
        if size < left:
            self._after(seconds, self._leave, sender, receiver, left - size)
        else:
            self._after(seconds + self._network.delay(sender, receiver), self._arrive)

    def _arrive(self) -> None:
        self._missing -= 1
        if self._missing:
            return
        assert self._theirs is not None and self._sink is not None
        caller, acceptor = self._caller, self._acceptor
        caller.bytes_in += self._theirs.ours.size
        acceptor.bytes_in += self._ours.size
        try:
            _pour(self._ours, self._theirs.sink)
        except RemoteProtocolError as error:
            acceptor.rejected[error.reason] += 1
            self._end(_torn(self._method), error)
            return
        try:
            _pour(self._theirs.ours, self._sink)
        except RemoteProtocolError as error:
            caller.rejected[error.reason] += 1
            self._end(error, _torn(self._method))
            return
        self._end(None)

    def _fail(self, error: Exception) -> None:
        self._end(error, error)

    def _end(self, for_caller: Exception | None, for_acceptor: Exception | None = None) -> None:
        """Tell both sides at once, and release their bodies and callbacks."""
        future, theirs = self.future, self._theirs
        self._over = True
        self.future, self._ours, self._answered = Future(), Outgoing(b""), _never_answered
        self._theirs = self._sink = None
        for error in (for_caller, for_acceptor):
            if error is not None:
                error.__traceback__ = None  # whose frames hold bodies
        if theirs is not None:
            self._acceptor.exchanging[self._caller.peer_id] -= 1
        if for_caller is None:
            future.set_result(None)
        else:
            future.set_exception(for_caller)
        if theirs is not None:
            theirs.done(for_acceptor)

    @staticmethod
    def _count(sender: MemoryTransport, receiver: MemoryTransport, size: int) -> None:
        sender.uplink.bytes_out += size
        receiver.bytes_in += size


def _never_answered(head: bytes, size: int) -> Sink:
    raise AssertionError("an exchange that is over")


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


def _torn(method: str) -> RemoteProtocolError:
    return RemoteProtocolError("torn", f"{method}: the other side ended it")
