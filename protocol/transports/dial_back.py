"""Whether a machine can be reached is seen from another: it asks a peer to connect to some of its ports.

    asker --count, ports (2 bytes each)--> peer: connects to where the asker's own connection comes from, nowhere else
          <--a byte for each: 1 = connected--

Nothing is sent over these connections. A peer can have nobody connected to but itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from protocol.errors import PeerUnreachable, RemoteProtocolError
from protocol.transports.settings import endpoint

MAX_PORTS = 4
MAX_ASKED = 4
"""Askers at a time."""
CONNECT_S = 3.0
ANSWER_S = CONNECT_S + 2.0


class DialBack:
    """Connects back to who asks for it."""

    def __init__(self) -> None:
        self._asked = 0

    async def serve(self, came_from: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the one question on a stream of a peer at the multiaddress `came_from`, and close it; without an
        answer if that leads through a relay, or too many ask."""
        self._asked += 1
        try:
            target = endpoint(came_from)
            if target is None or self._asked > MAX_ASKED:
                return
            with suppress(TimeoutError, EOFError, OSError):
                async with asyncio.timeout(ANSWER_S):
                    count = (await reader.readexactly(1))[0]
                    if not 0 < count <= MAX_PORTS:
                        return
                    data = await reader.readexactly(2 * count)
                    ports = [int.from_bytes(data[i : i + 2], "big") for i in range(0, len(data), 2)]
                    writer.write(bytes(await asyncio.gather(*(_connects(target[0], port) for port in ports))))
                    await writer.drain()
        finally:
            self._asked -= 1
            writer.close()


async def ask_back(ports: Sequence[int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> list[bool]:
    """Of each port, whether the peer at the other end connected to it. Raises PeerUnreachable if it does not say,
    RemoteProtocolError."""
    writer.write(bytes([len(ports)]) + b"".join(port.to_bytes(2, "big") for port in ports))
    try:
        async with asyncio.timeout(ANSWER_S):
            answer = await reader.readexactly(len(ports))
    except (TimeoutError, EOFError, OSError) as error:
        raise PeerUnreachable("does not connect back: of another version, busy, or reached through a relay") from error
    if not set(answer) <= {0, 1}:
        raise RemoteProtocolError("schema", "neither connected nor not")
    return [bool(byte) for byte in answer]


async def _connects(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(host, port)
    except (TimeoutError, OSError):
        return False
    writer.close()
    return True
