"""A place at a relay (libp2p circuit relay v2), through which peers reach a node that they cannot dial.

    reserve -> status      two messages of protobuf, each after its length, on a stream of their own

p2pd also asks by itself: but with fewer than four relays only three minutes after its start, and for a place that was
lost, because the relay restarted, not before an hour has passed.
"""

from __future__ import annotations

import asyncio

from protocol.errors import PeerUnreachable

RELAY_PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"
PLACE_S = 60.0
"""A place is asked for again after this long. Relays keep it for an hour, but not if the connection ends meanwhile."""
MAX_RELAY_ANSWER_BYTES = 4096
_RESERVE = b"\x08\x00"
_GRANTED = b"\x28\x64"  # status 100. go-libp2p writes the fields of a message in order, and this one is the last.


async def reserve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Take a place at the relay at the other end. Raises PeerUnreachable if it has none, EOFError."""
    writer.write(bytes([len(_RESERVE)]) + _RESERVE)
    low, high = (await reader.readexactly(1))[0], 0
    if low >= 128:  # its length continues, seven bits a byte
        low, high = low - 128, (await reader.readexactly(1))[0]
    if high >= MAX_RELAY_ANSWER_BYTES // 128:
        raise PeerUnreachable("that is no answer of a relay")
    if not (await reader.readexactly(128 * high + low)).endswith(_GRANTED):
        raise PeerUnreachable("the relay has no place")
