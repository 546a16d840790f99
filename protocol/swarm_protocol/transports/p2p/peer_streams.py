"""Streams between one node and its peers, over p2pd: requests, exchanges, channels and connecting back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from hivemind.p2p import P2PDaemonError, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo

from swarm_protocol.errors import LocalProtocolError, NotOfSwarm, PeerUnreachable, RemoteProtocolError
from swarm_protocol.hosts import neighbourhood_of_stream
from swarm_protocol.limits import MAX_REQUEST_BYTES
from swarm_protocol.transports.base import Outgoing, Sink
from swarm_protocol.transports.p2p.connections import Connections
from swarm_protocol.transports.p2p.daemon import P2PD_CALL_S, Daemon
from swarm_protocol.transports.p2p.dial_back import DialBack, ask_back
from swarm_protocol.transports.p2p.relay import RELAY_PROTOCOL, reserve
from swarm_protocol.transports.streams.requests import ask
from swarm_protocol.transports.streams.services import Services
from swarm_protocol.transports.streams.stream import Stream, check_method

EXCHANGE_END_S = 2.0  # longest wait for callbacks of an exchange that was given up
NOT_SPOKEN = "protocols not supported"
"""go-libp2p's words when a peer is there but does not know the protocol. The swarm's id is in the protocol's name."""
T = TypeVar("T")
StreamHandler = Callable[[StreamInfo, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class _Plane(Protocol):
    """Whose streams these are, as `plane.HivemindPlane`."""

    addresses: list[str]  # at which others reach this node
    daemon: Daemon
    connections: Connections
    known: Callable[[str], Sequence[str]]  # peer -> its addresses

    async def connect(self, peer: str, addresses: Sequence[str]) -> None:
        """Dial a peer at all of these. Raises PeerUnreachable."""

    async def reach(self, peer: str) -> None:
        """Dial a peer that another peer named. Raises PeerUnreachable."""


class PeerStreams:
    """All streams of one node, its own and those that peers open. Whatever asks a peer raises PeerUnreachable, or
    RemoteProtocolError."""

    def __init__(self, plane: _Plane, swarm: str, services: Services) -> None:
        self.services = services
        self._dial_back = DialBack(lambda: plane.addresses)
        self._daemon = plane.daemon
        self._plane = plane
        self._swarm = swarm
        self.request_protocol, self._exchange_protocol, self._channel_protocol, self._dial_back_protocol = (
            f"/swarm-node/{swarm[:16]}/{name}/1" for name in ("request", "exchange", "channel", "dial-back")
        )

    def handlers(self) -> dict[str, StreamHandler]:
        """Protocol -> handler of the streams that peers open."""
        return {
            self.request_protocol: self._on_stream(self.services.answers.serve),
            self._exchange_protocol: self._on_stream(self.services.exchanges.serve),
            self._channel_protocol: self._on_stream(self.services.channels.serve),
            self._dial_back_protocol: lambda info, *stream: self._dial_back.serve(str(info.addr), *stream),
        }

    async def request(self, peer: str, method: str, payload: bytes, timeout: float, limit: int) -> bytes:
        """The answer of `peer`, of at most `limit` bytes."""
        check_method(method)
        if len(payload) > MAX_REQUEST_BYTES:
            raise LocalProtocolError(f"a request {method!r} of {len(payload)} bytes cannot be sent")
        asking = self._talk(peer, self.request_protocol, lambda stream: ask(stream, method, payload, limit))
        return await self._daemon.bounded(asking, timeout)

    async def exchange(
        self, peer: str, method: str, ours: Outgoing, answered: Callable[[bytes, int], Sink], timeout: float
    ) -> None:
        """Exchange bodies with `peer`. Raises LocalProtocolError for a fault in `ours` or `answered`."""
        swap = self.services.exchanges.call
        call = asyncio.create_task(
            self._talk(peer, self._exchange_protocol, lambda stream: swap(stream, method, ours, answered))
        )
        try:
            await self._daemon.bounded(call, timeout)
        finally:
            await asyncio.wait({call}, timeout=EXCHANGE_END_S)  # for callbacks that still run

    async def dial_back(self, peer: str, ports: Sequence[int]) -> list[bool]:
        """For each of this machine's TCP ports, whether `peer` could connect to it."""
        asking = self._talk(
            peer, self._dial_back_protocol, lambda stream: ask_back(ports, stream.reader, stream.writer)
        )
        return await self._daemon.bounded(asking, P2PD_CALL_S)

    async def take_place(self, relay: str) -> None:
        """Reserve a place at a relay that is connected, for `PLACE_S` at least."""
        asking = self._talk(relay, RELAY_PROTOCOL, lambda stream: reserve(stream.reader, stream.writer))
        await self._daemon.bounded(asking, P2PD_CALL_S)

    async def open(self, peer: str) -> Stream:
        """A stream for a channel."""
        return await self._daemon.bounded(self._open(peer, self._channel_protocol), P2PD_CALL_S)

    async def _talk(self, peer: str, protocol: str, talk: Callable[[Stream], Awaitable[T]]) -> T:
        """Talk over a new stream to `peer`, and close it."""
        stream = await self._open(peer, protocol)
        try:
            return await talk(stream)
        except RemoteProtocolError as error:
            if error.reason == "torn":
                await asyncio.sleep(0.1)  # if it was our own p2pd that died, that is known by then, and ends this call
            raise
        finally:
            stream.close()

    async def _open(self, peer: str, protocol: str) -> Stream:
        """A new stream to `peer`, which is dialled first if it is not connected."""
        p2pd = self._daemon.running()
        try:
            to = PeerID.from_base58(peer)
        except ValueError as error:
            raise PeerUnreachable(f"{peer!r} is no peer: {error}") from error
        failure: Exception | None = None
        if peer not in await self._plane.connections.connected():
            addresses = self._plane.known(peer)
            try:
                await (self._plane.connect(peer, addresses) if addresses else self._plane.reach(peer))
            except PeerUnreachable as error:  # p2pd may know another address
                failure = error if addresses else None
        try:
            _, reader, writer = await p2pd.call_binary_stream_handler(to, protocol)
            return Stream(reader, writer, self.services.traffic, peer)
        except P2PDaemonError as error:
            if NOT_SPOKEN in str(error):
                raise NotOfSwarm(f"{peer} is there, but not in swarm {self._swarm[:16]}") from error
            raise failure or error from error

    def _on_stream(self, serve: Callable[[Stream], Awaitable[None]]) -> StreamHandler:
        async def handle(info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            address = neighbourhood_of_stream(str(info.addr))
            await serve(Stream(reader, writer, self.services.traffic, str(info.peer_id), address))

        return handle
