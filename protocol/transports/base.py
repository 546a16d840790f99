"""The port between a node and its peers, whatever carries it.

All methods may be called from any thread and, but for `request`, return at once. Handlers run on the transport's own
thread: they must be quick, and what they raise is counted and dropped.

`request` is a question and its answer, whole in memory. `exchange` is for what is large: both peers send a body of
known size at the same time, made and taken piece by piece, and either both are told that both arrived, or it failed.
A `Channel` is for what goes on: messages both ways for as long as both live, in order, and the first to hear that the
other does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from protocol.messages import PeerCard
from protocol.transports.refusals import Refused

Handler = Callable[[bytes], None]
"""Told the bytes of each message on a topic, as its sender sealed them; whoever forwarded them is not known."""
Server = Callable[[str, bytes], bytes]
"""(caller's peer id, payload) -> response. Raises `RemoteProtocolError` to refuse."""

Sink = Callable[[memoryview], None]
"""Takes the next piece of a body, at most `MAX_CHUNK_BYTES`; the memory is lent for the call. Raises
`RemoteProtocolError` to end the exchange. What it was given is worth nothing before the exchange is done."""


@dataclass(frozen=True)
class Outgoing:
    """What one side of an exchange sends."""

    head: bytes
    """At most `MAX_HEAD_BYTES`."""
    size: int = 0
    """Bytes of the body."""
    pieces: Callable[[], Iterable[bytes | memoryview]] = tuple
    """Makes the body, on a worker thread, as it leaves: pieces of at most `MAX_CHUNK_BYTES`, `size` bytes together."""


@dataclass(frozen=True)
class Accepted:
    """What a peer that was asked to exchange has to say to it."""

    ours: Outgoing
    sink: Sink
    done: Callable[[Exception | None], None]
    """Called once, on a worker thread, whatever happens: `None` = both bodies have arrived whole, and both peers know.
    If the very last byte is lost, one of the two has been told of success and the other has not."""


Acceptor = Callable[[str, bytes, int], Accepted]
"""(caller's peer id, its head, the size of its body) -> what to send it and where its body goes. Runs on a worker
thread, before anything of the body is read. Raises `RemoteProtocolError` to refuse."""


class Channel(Protocol):
    """A lasting connection with one peer: messages both ways, in order, each whole or not at all."""

    @property
    def peer(self) -> str:
        """Who is at the other end."""

    def send(self, head: bytes, *body: bytes | memoryview) -> bool:
        """Queue a message; the parts of the body must stay as they are until it has left. Never waits. False if the
        channel is closed. A channel whose peer takes too little for too long is closed."""

    def close(self) -> None:
        """What is queued may be lost. `closed` is called, if it has not been."""


@dataclass(frozen=True)
class Listener:
    """What is done with a channel's messages; called on the transport's own thread, so quickly."""

    judge: Callable[[bytes, int], None]
    """Told the head of a message and the size of its body before anything of that is read or allocated. Raises
    `RemoteProtocolError`: counted, and the channel is closed."""
    received: Callable[[bytes, bytearray], None]
    """Told head and body of a message."""
    closed: Callable[[str], None]
    """Called once, when nothing more will come, and why: the peer has closed it, is gone, or was silent."""


class Transport(Protocol):
    """What the rest of a node may do to the network."""

    @property
    def peer_id(self) -> str:
        """This node's peer id."""

    @property
    def addresses(self) -> list[str]:
        """Where this node listens for others (multiaddresses, those worth telling first)."""

    def subscribe(self, topic: str, handler: Handler) -> None:
        """Have `handler` told of every message on `topic` from others; once per message."""

    def publish(self, topic: str, data: bytes) -> bool:
        """Send to all subscribers of `topic`, best effort. False if it was dropped here, because the queue is full."""

    def serve(self, method: str, server: Server) -> None:
        """Answer requests for `method`."""

    def request(self, peer: str, method: str, payload: bytes = b"", timeout: float = 10.0, limit: int = 2**20) -> bytes:
        """Ask one peer and wait. Raises `PeerUnreachable`, or `RemoteProtocolError` for a response that is torn, larger
        than `limit` bytes, or a refusal."""

    def accept(self, method: str, acceptor: Acceptor) -> None:
        """Take part in exchanges of `method`."""

    def exchange(
        self,
        peer: str,
        method: str,
        ours: Outgoing,
        answered: Callable[[bytes, int], Sink],
        timeout: float,
    ) -> Future[None]:
        """Exchange bodies with one peer, in the background. `answered` is told the peer's head and the size of its
        body before anything of that is read, and says where it goes, or raises `RemoteProtocolError`. The future is
        done when both bodies have arrived whole (length and sha256) and both peers know; it fails with
        `PeerUnreachable`, `RemoteProtocolError` for a refusal or a body that is torn or altered, or
        `LocalProtocolError` for a fault in a callback of this node, which is reported too. Callbacks run on worker
        threads, of which there are few: they must not wait for other things to happen. Raises `LocalProtocolError` for
        a head or a size that no peer would take."""

    def listen(self, method: str, opened: Callable[[Channel], Listener]) -> None:
        """Take channels that others open for `method`. `opened` runs on the transport's own thread and raises
        `RemoteProtocolError` to refuse."""

    def connect(self, peer: str, method: str, opened: Callable[[Channel], Listener]) -> Channel:
        """Open a channel to a peer, in the background; returns at once, when `opened` has said who listens. Messages
        may be sent at once; if the peer cannot be reached or refuses, the listener is told that it is `closed`."""

    def announce(self, card: PeerCard) -> None:
        """Tell the swarm who this is; renewed by the transport, with its own addresses, until `close`."""

    def members(self) -> Mapping[str, PeerCard]:
        """Peer id -> card of those whose card has not run out, this node left out. As last looked up; never waits."""

    def too_new(self) -> str:
        """What a peer calls itself whose card is of a newer protocol than this node reads; empty = there was none."""

    def stats(self) -> Mapping[str, float]:
        """Running totals and levels: `peers`, `bytes_in`, `bytes_out`, `messages_in`, `messages_out`, `dropped`,
        `restarts/gossip`, `restarts/dht`, and `rejected/<reason>` for what never reached a handler."""

    def refusals(self) -> Mapping[str, Refused]:
        """Source (peer id, IPv4 address, or /64 of IPv6) -> what it was refused, for which reasons; of the latest
        sources. Part of what `stats` counts: some refusals have no source that is known."""

    def close(self) -> None:
        """Say goodbye and stop; within a few seconds, whatever happens."""
