"""Streams between one node and its peers, over p2pd: requests, exchanges, channels and connecting back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from hivemind.p2p import P2PDaemonError, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo

from protocol.errors import LocalProtocolError, NotOfSwarm, PeerUnreachable, RemoteProtocolError
from protocol.hosts import neighbourhood_of_stream
from protocol.limits import MAX_REQUEST_BYTES
from protocol.transports.base import Acceptor, Outgoing, Server, Sink
from protocol.transports.p2p.daemon import P2PD_CALL_S, Daemon
from protocol.transports.p2p.dial_back import DialBack, ask_back
from protocol.transports.streams.channels import Channels, StreamChannel
from protocol.transports.streams.exchanges import Exchanges
from protocol.transports.streams.requests import Answers, ask
from protocol.transports.streams.stream import Stream

if TYPE_CHECKING:
    from protocol.transports.p2p.plane import HivemindPlane

EXCHANGE_END_S = 2.0  # longest wait for callbacks of an exchange that was given up
NOT_SPOKEN = "protocols not supported"
"""go-libp2p's words when a peer is there but does not know the protocol. The swarm's id is in the protocol's name."""
StreamHandler = Callable[[StreamInfo, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class PeerStreams:
    """All streams of one node, its own and those that peers open."""

    def __init__(
        self,
        daemon: Daemon,
        plane: HivemindPlane,
        swarm: str,
        channels: Channels,
        dial_back: DialBack,
        report: Callable[[str], None],
    ) -> None:
        self.answers = Answers(daemon.traffic, report)
        self.exchanges = Exchanges(daemon.traffic, report)
        self._channels = channels
        self._dial_back = dial_back
        self._daemon = daemon
        self._plane = plane
        self._swarm = swarm
        self.request_protocol, self._exchange_protocol, self._channel_protocol, self._dial_back_protocol = (
            f"/swarm-node/{swarm[:16]}/{name}/1" for name in ("request", "exchange", "channel", "dial-back")
        )

    def handlers(self) -> dict[str, StreamHandler]:
        """Protocol -> handler of the streams that peers open."""
        return {
            self.request_protocol: self._on_stream(self.answers.serve),
            self._exchange_protocol: self._on_stream(self.exchanges.serve),
            self._channel_protocol: self._on_stream(self._channels.serve),
            self._dial_back_protocol: self._on_dial_back,
        }

    def serve(self, method: str, server: Server) -> None:
        """Answer requests for `method` from now on."""
        self.answers.servers[method] = server

    def accept(self, method: str, acceptor: Acceptor) -> None:
        """Take part in exchanges of `method` from now on."""
        self.exchanges.acceptors[method] = acceptor

    async def request(
        self, peer: str, method: str, payload: bytes, timeout: float, limit: int, addresses: Sequence[str] = ()
    ) -> bytes:
        """Ask `peer`, known to be at `addresses`. Raises PeerUnreachable or RemoteProtocolError."""
        if len(payload) > MAX_REQUEST_BYTES or not 0 < len(method.encode()) < 256:
            raise LocalProtocolError(f"a request {method!r} of {len(payload)} bytes cannot be sent")

        async def ask_it() -> bytes:
            async with self._stream(peer, self.request_protocol, addresses) as stream:
                return await ask(stream, method, payload, limit)

        self._daemon.running()
        return await self._daemon.bounded(ask_it(), timeout)

    async def exchange(
        self,
        peer: str,
        method: str,
        ours: Outgoing,
        answered: Callable[[bytes, int], Sink],
        timeout: float,
        addresses: Sequence[str] = (),
    ) -> None:
        """Exchange bodies with `peer`, known to be at `addresses`. Raises PeerUnreachable, RemoteProtocolError, or
        LocalProtocolError for a fault in `ours` or `answered`."""

        async def exchange_with_it() -> None:
            async with self._stream(peer, self._exchange_protocol, addresses) as stream:
                await self.exchanges.call(stream, method, ours, answered)

        self._daemon.running()
        call = asyncio.create_task(exchange_with_it())
        try:
            await self._daemon.bounded(call, timeout)
        finally:
            await asyncio.wait({call}, timeout=EXCHANGE_END_S)  # for callbacks that still run

    async def dial_back(self, peer: str, ports: Sequence[int], addresses: Sequence[str] = ()) -> list[bool]:
        """For each of this machine's TCP ports, whether `peer`, known to be at `addresses`, could connect to it. Raises
        PeerUnreachable, RemoteProtocolError."""

        async def ask_it() -> list[bool]:
            async with self._stream(peer, self._dial_back_protocol, addresses) as stream:
                return await ask_back(ports, stream.reader, stream.writer)

        return await self._daemon.bounded(ask_it(), P2PD_CALL_S)

    async def open_channel(self, channel: StreamChannel, method: str, addresses: Sequence[str] = ()) -> None:
        """Open `channel` to a peer known to be at `addresses`, and serve it until it ends."""

        async def dial() -> Stream:
            self._daemon.running()
            return await self._daemon.bounded(self._open(channel.peer, self._channel_protocol, addresses), P2PD_CALL_S)

        await self._channels.call(channel, method, dial)

    @asynccontextmanager
    async def _stream(self, peer: str, protocol: str, addresses: Sequence[str]) -> AsyncIterator[Stream]:
        """A stream to `peer`, which is dialled first if it is not connected."""
        stream = await self._open(peer, protocol, addresses)
        try:
            yield stream
        except RemoteProtocolError as error:
            if error.reason == "torn":
                await asyncio.sleep(0.1)  # if it was our own p2pd that died, that is known by then, and ends this call
            raise
        finally:
            stream.close()

    async def _open(self, peer: str, protocol: str, addresses: Sequence[str]) -> Stream:
        p2pd = self._daemon.running()
        try:
            to = PeerID.from_base58(peer)
        except ValueError as error:
            raise PeerUnreachable(f"{peer!r} is no peer: {error}") from error
        failure: Exception | None = None
        if peer not in await self._plane.connected():
            try:
                if addresses:
                    await self._plane.connect(peer, addresses)
                else:
                    await self._plane.reach(peer)
            except PeerUnreachable as error:  # p2pd may know another address
                failure = error if addresses else None
        try:
            _, reader, writer = await p2pd.call_binary_stream_handler(to, protocol)
            return Stream(reader, writer, self._daemon.traffic, peer)
        except P2PDaemonError as error:
            if NOT_SPOKEN in str(error):
                raise NotOfSwarm(f"{peer} is there, but not in swarm {self._swarm[:16]}") from error
            raise failure or error from error

    def _on_stream(self, serve: Callable[[Stream], Awaitable[None]]) -> StreamHandler:
        async def handle(info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            address = neighbourhood_of_stream(str(info.addr))
            await serve(Stream(reader, writer, self._daemon.traffic, str(info.peer_id), address))

        return handle

    async def _on_dial_back(self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._dial_back.serve(str(info.addr), reader, writer)
