"""The port between a node and its peers, whatever carries it.

All methods may be called from any thread. All but `request` return at once. Handlers run on the transport's own thread
and must be quick; their exceptions are counted and dropped.

`request` is a question and its answer, whole in memory. `exchange` is for large bodies: both peers send a body of known
size at the same time, piece by piece; either both learn that both bodies arrived, or the exchange has failed.
A `Channel` carries messages both ways, in order, as long as both peers live, and notices when the other one does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from swarm_protocol.messages import PeerCard
from swarm_protocol.transports.refusals import Refused
from swarm_protocol.twins import Twins

Handler = Callable[[bytes], None]
"""Called with the bytes of each message on a topic, as its author signed them. The forwarder is not known."""
Server = Callable[[str, bytes], bytes]
"""(caller's peer id, payload) -> response. Raises `RemoteProtocolError` to refuse."""

Sink = Callable[[memoryview], None]
"""Takes the next piece of a body, at most `MAX_CHUNK_BYTES`; the memory is lent for the call. Raises
`RemoteProtocolError` to end the exchange. The pieces are worth nothing until the exchange has succeeded."""


@dataclass(frozen=True)
class Outgoing:
    """The data that one side of an exchange sends."""

    head: bytes  # head of at most `MAX_HEAD_BYTES`
    size: int = 0  # bytes of the body
    pieces: Callable[[], Iterable[bytes | memoryview]] = tuple
    """Makes the body, on a worker thread, as it leaves: pieces of at most `MAX_CHUNK_BYTES`, `size` bytes together."""
    promise: Callable[[], bytes] | None = None
    """Makes the sha256 of the body, on a worker thread. Both sides give it, or neither: then each sends its body only
    when it has the other's sha256, so that no body can depend on the other."""


@dataclass(frozen=True)
class Accepted:
    """The answer of a peer that was asked to exchange."""

    ours: Outgoing
    sink: Sink
    done: Callable[[Exception | None], None]
    """Called once, on a worker thread, in every case. `None` = both bodies have arrived whole, and both peers know. If
    the very last byte is lost, one peer is told of success and the other is not."""


Acceptor = Callable[[str, bytes, int], Accepted]
"""(caller's peer id, its head, size of its body) -> answer. Runs on a worker thread, before anything of the body is
read. Raises `RemoteProtocolError` to refuse."""


class Channel(Protocol):
    """A lasting connection with one peer: messages both ways, in order, each whole or not at all."""

    @property
    def peer(self) -> str:
        """Peer id at the other end."""

    def send(self, head: bytes, *body: bytes | memoryview) -> bool:
        """Queue a message. The parts of the body must not change until it has left. Never waits. Returns False if the
        channel is closed. A channel whose peer is too slow for too long is closed."""

    def close(self) -> None:
        """Close the channel. Queued messages may be lost. `closed` is called if it has not been."""


@dataclass(frozen=True)
class Listener:
    """Callbacks of a channel. They run on the transport's own thread and must be quick."""

    judge: Callable[[bytes, int], None]
    """Called with the head of a message and the size of its body, before the body is read or allocated. Raises
    `RemoteProtocolError` to count it and close the channel."""
    received: Callable[[bytes, bytearray], None]  # called with head and body of a message
    closed: Callable[[str], None]
    """Called once, when nothing more will come, and why: the peer has closed it, is gone, or was silent."""


class Transport(Protocol):
    """The operations that a node has on the network."""

    @property
    def peer_id(self) -> str:
        """This node's peer id."""

    @property
    def addresses(self) -> list[str]:
        """Multiaddresses at which this node listens, most useful first."""

    def subscribe(self, topic: str, handler: Handler) -> None:
        """Call `handler` once for every message of others on `topic`."""

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
        self, peer: str, method: str, ours: Outgoing, answered: Callable[[bytes, int], Sink], timeout: float
    ) -> Future[None]:
        """Exchange bodies with one peer, in the background. `answered` is called with the peer's head and the size of
        its body before the body is read; it returns the sink, or raises `RemoteProtocolError`. The future is done when
        both bodies have arrived whole (length and sha256) and both peers know. It fails with `PeerUnreachable`; with
        `RemoteProtocolError` for a refusal or a damaged body; or with `LocalProtocolError` for a fault in a callback of
        this node, which is also reported. Callbacks run on a few worker threads and must not wait for other events.
        Raises `LocalProtocolError` for a head or a size that peers would refuse."""

    def listen(self, method: str, opened: Callable[[Channel], Listener]) -> None:
        """Take channels that others open for `method`. `opened` runs on the transport's own thread and raises
        `RemoteProtocolError` to refuse."""

    def connect(self, peer: str, method: str, opened: Callable[[Channel], Listener]) -> Channel:
        """Open a channel to a peer, in the background. Returns when `opened` has returned the listener. Messages may be
        sent at once. If the peer cannot be reached or refuses, the listener's `closed` is called."""

    def announce(self, card: PeerCard) -> None:
        """Publish this node's card. The transport renews it, with its own addresses, until `close`."""

    def hear(self, peer: str, addresses: Sequence[str]) -> None:
        """A peer was heard of through others, and says that it can be reached at these addresses. If it has no card
        here yet, it is dialled: those others may be gone the next moment."""

    def meet(self, cards: Mapping[str, PeerCard]) -> None:
        """Peer id -> card that this peer signed: they came from elsewhere, and count like cards that were looked up."""

    def members(self) -> Mapping[str, PeerCard]:
        """Peer id -> card, for other peers' cards that have not expired, as of the last lookup. Never waits."""

    def left(self) -> Mapping[str, PeerCard]:
        """Peer id -> last card of other peers that have said goodbye, until it expires. Never waits."""

    def too_new(self) -> str:
        """Name of a peer whose card is of a newer protocol than this node reads; empty = there was none."""

    def clock_ahead(self) -> float | None:
        """Seconds that this machine's clock is ahead of other nodes', by the cards that they renew; None = unknown."""

    def twins(self) -> Twins:
        """The nodes that run with this node's key."""

    def stats(self) -> Mapping[str, float]:
        """Running totals and levels: `peers`, `bytes_in`, `bytes_out`, `messages_in`, `messages_out`, `dropped`,
        `restarts/gossip`, `restarts/dht`, and `rejected/<reason>` for messages that reached no handler."""

    def restarted(self) -> Mapping[str, str]:
        """Part of the network (`gossip`, `dht`) -> why its process ended last, for those that were started again."""

    def refusals(self) -> Mapping[str, Refused]:
        """Source (peer id, IPv4 address, or /64 of IPv6) -> refusals, for the latest sources. `stats` counts more: some
        refusals have no known source."""

    def close(self) -> None:
        """Say goodbye and stop, within a few seconds in every case."""
