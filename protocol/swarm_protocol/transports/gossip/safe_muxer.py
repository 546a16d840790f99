"""Yamux of py-libp2p 0.8.1 with limits on the unread bytes of a peer.

mplex, which has no windows                            offered as well             not offered
a stream's window                                      grows to 16 MiB             grows to `WINDOW_BYTES`
a frame of up to 16 MiB                                collected, then looked at   refused by its length
bytes beyond a stream's window                         buffered                    the connection ends
unread bytes of a stream that was reset                kept for a minute           dropped at once
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trio
from libp2p.abc import IMuxedConn, ISecureConn
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from libp2p.stream_muxer.muxer_multistream import MuxerMultistream
from libp2p.stream_muxer.yamux import yamux
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID, Yamux

from swarm_protocol.transports.gossip.places import MAX_BUFFERED, WINDOW_BYTES

yamux.MAX_WINDOW_SIZE = WINDOW_BYTES  # the library itself ends a connection with a longer frame, and blames nobody

MAX_YAMUX_FRAME_BYTES = 256 * 1024
"""The first window of a stream, and four times the longest frame that py-libp2p and go-libp2p send."""


class Flooded(trio.TooSlowError):
    """A frame that is too long, or too many frames. Of all errors in reading a frame, only `TooSlowError` makes the
    library end the connection in every case."""


class SafeYamux(Yamux):
    """One connection's streams."""

    on_flood: Callable[[], None] | None = None  # called before the connection ends because of what its peer sent

    def unread(self) -> int:
        """Bytes that arrived and that nothing here has read."""
        return sum(map(len, self.stream_buffers.values()))

    def drop_unread(self) -> None:
        """Forget it, before the connection ends."""
        for data in self.stream_buffers.values():
            data.clear()

    async def _read_data_body(self, length: int) -> bytes:
        if length > MAX_YAMUX_FRAME_BYTES or self.unread() + length > MAX_BUFFERED:
            if self.on_flood is not None:
                self.on_flood()
            raise Flooded
        return await super()._read_data_body(length)

    def _finalize_stream_locked(self, stream: Any, *, fully_closed: bool) -> None:
        if stream.reset_received and stream.stream_id in self.stream_buffers:  # by either end: nobody will read it
            self.stream_buffers[stream.stream_id].clear()
        super()._finalize_stream_locked(stream, fully_closed=fully_closed)


class YamuxOnly(MuxerMultistream):
    """Agrees with the other end of a connection on yamux, or on nothing."""

    def __init__(self) -> None:
        super().__init__({TProtocol(PROTOCOL_ID): SafeYamux})

    async def new_conn(self, conn: ISecureConn, peer_id: ID) -> IMuxedConn:
        """Like the library's method, but makes a `SafeYamux`; the library makes a `Yamux` in any case."""
        protocol, _ = await self._selector.select(conn, conn.is_initiator, self.negotiate_timeout)
        return self._annotate_connection(SafeYamux(conn, peer_id, conn.is_initiator), conn, protocol)
