"""Members that answer calls for weights with something of the test's own."""

from __future__ import annotations

import msgspec

from swarm_node.averaging.averager import Averager
from swarm_node.averaging.codecs import coded_bytes
from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.limits import MAX_CHUNK_BYTES
from swarm_protocol.tensors import WEIGHTS_METHOD, WeightsHead
from swarm_protocol.transports.base import Accepted, Outgoing, Transport


def body_bytes(averager: Averager) -> int:
    """Length of all weights in float32, as they travel."""
    return sum(coded_bytes("float32", n) for n in averager.fragments.sizes)


def with_a_nan(size: int) -> bytes:
    """A body of zeros but for one value, the hundred and first."""
    return bytes(400) + b"\x00\x00\xc0\x7f" + bytes(size - 404)


def answers(transport: Transport, head: WeightsHead, body: bytes) -> None:
    """Have it give this to each that asks, whether it is valid or not."""
    pieces = [body[i : i + MAX_CHUNK_BYTES] for i in range(0, len(body), MAX_CHUNK_BYTES)]
    ours = Outgoing(msgspec.msgpack.encode(head), len(body), lambda: pieces)
    accepted = Accepted(ours, lambda piece: None, lambda error: None)
    transport.accept(WEIGHTS_METHOD, lambda peer, head, size: accepted)


def refuses(transport: Transport, reason: str, detail: str = "") -> None:
    """Have it refuse each that asks."""

    def refuse(peer: str, head: bytes, size: int) -> Accepted:
        raise RemoteProtocolError(reason, detail)

    transport.accept(WEIGHTS_METHOD, refuse)
