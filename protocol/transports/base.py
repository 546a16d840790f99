"""The port between a node and its peers, whatever carries it.

All methods may be called from any thread and, but for `request`, return at once. Handlers run on the transport's own
thread: they must be quick, and what they raise is counted and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from protocol.messages import PeerCard

Handler = Callable[[bytes], None]
"""Told the bytes of each message on a topic, as its sender sealed them; whoever forwarded them is not known."""
Server = Callable[[str, bytes], bytes]
"""(caller's peer id, payload) -> response. Raises `RemoteProtocolError` to refuse."""


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

    def announce(self, card: PeerCard) -> None:
        """Tell the swarm who this is; renewed by the transport, with its own addresses, until `close`."""

    def members(self) -> Mapping[str, PeerCard]:
        """Peer id -> card of those whose card has not run out, this node left out. As last looked up; never waits."""

    def stats(self) -> Mapping[str, float]:
        """Running totals and levels: `peers`, `bytes_in`, `bytes_out`, `messages_in`, `messages_out`, `dropped`,
        `restarts/gossip`, `restarts/dht`, and `rejected/<reason>` for what never reached a handler."""

    def close(self) -> None:
        """Say goodbye and stop; within a few seconds, whatever happens."""
