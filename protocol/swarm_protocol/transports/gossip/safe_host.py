"""Hosts of py-libp2p 0.8.1, hardened below pubsub: possible attacks of a remote peer, and the defences here.

undecodable handshake, error in a handler          ended the whole service    the connection or stream ends
inbound connections                                counted, never discounted  admitted by `places`
a length in a handshake or a stream's first words  believed, buffered         bounded
identify, identify/push, ping                      served; all is kept        not served, not asked for
streams opened again and again                     each a task                limited a minute, then the peer is banned
frames, and bytes that nobody reads                buffered, up to 16 MiB     bounded (`safe_muxer`)
peers known from hearsay                           dialled at random          only peers that the node names are dialled

Members do not need the protocols that are not served: they know each other's addresses from cards, and agree on the
version of gossip when they open a stream. For identify/push the library kept up to a megabyte for each of a thousand
addresses that a stranger named.
"""

from __future__ import annotations

import logging
import socket
from collections import Counter
from typing import Any

import trio
from libp2p import new_host
from libp2p.abc import IHost, INetStream
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.exceptions import ParseError
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import IOException
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.exceptions import SwarmException
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.protocol_muxer.exceptions import MultiselectCommunicatorError
from libp2p.protocol_muxer.multiselect import Multiselect
from libp2p.protocol_muxer.multiselect_client import MultiselectClient
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.transport.tcp.tcp import TCP
from libp2p.utils.varint import read_varint_prefixed_bytes_limited

from swarm_protocol.budgets import Budgets
from swarm_protocol.hosts import neighbourhood
from swarm_protocol.transports.gossip.gate import BUDGETED_CONNECTIONS
from swarm_protocol.transports.gossip.places import MAX_ARRIVING, MAX_HANDSHAKE_BYTES, ConnectionPlaces, Link
from swarm_protocol.transports.gossip.safe_muxer import YamuxOnly
from swarm_protocol.transports.pacing import Bandwidth
from swarm_protocol.transports.refusals import Refusals

log = logging.getLogger("gossip")

MAX_PROTOCOL_BYTES = 1024
"""The name of a protocol that a peer asks for, or agrees to, on a stream: the longest of ours has 17."""
UNLIMITED = Bandwidth(0.0)
STREAMS_PER_MINUTE = 60
"""Streams that one peer may open. An honest one opens a few when it connects, and one again when that broke."""
FIRST_REFUSAL_LOGS = {
    "connections": "all places for gossip connections are taken",
    "crowded": "a gossip connection gave way to one from a less busy address",
    "handshake": "a gossip connection did not finish its handshake",
    "flood": "a gossip peer sent more than a peer may",
    "memory": "a gossip peer was disconnected to save memory",
}
"""Reason -> sentence that is logged when the reason is first counted."""


class Wire(ReadWriteCloser):
    """A TCP connection that counts its bytes and signals when it is closed."""

    def __init__(self, stream: Any, tcp: CountedTCP, inbound: bool) -> None:
        self._stream, self._tcp = stream, tcp
        self.address: tuple[str, int] | None = stream.get_remote_address()
        self.link = Link(neighbourhood(self.address[0] if self.address else ""), inbound, trio.current_time())
        self.bytes_in = self.bytes_weighed = 0  # bytes that arrived; those of them that `heaviest` has counted
        self.closed = trio.Event()
        _keep_alive(stream.stream)
        tcp.live[self.link] = self

    async def read(self, n: int | None = None) -> bytes:
        data: bytes = await self._stream.read(n)
        self._tcp.bytes_in += len(data)
        self.bytes_in += len(data)
        await self._note_handshake(len(data))
        if wait := self._tcp.download.take(len(data)):
            await trio.sleep(wait)
        return data

    async def _note_handshake(self, size: int) -> None:
        link = self.link
        if link in self._tcp.live and link not in self._tcp.places.seated:  # also if dialled: it may be anybody
            link.heard, link.heard_bytes = trio.current_time(), link.heard_bytes + size
            if link.heard_bytes > MAX_HANDSHAKE_BYTES:
                self._tcp.refuse("handshake", self.address)
                await self.close()
                raise IOException("more than a handshake takes")

    async def write(self, data: bytes) -> None:
        await self._stream.write(data)
        self._tcp.bytes_out += len(data)
        if wait := self._tcp.upload.take(len(data)):  # not before it: what is encrypted has to leave in that order
            await trio.sleep(wait)

    async def close(self) -> None:
        self._tcp.live.pop(self.link, None)
        self._tcp.places.leave(self.link)
        self.closed.set()
        await self._stream.close()

    def get_remote_address(self) -> tuple[str, int] | None:
        return self.address


class CountedTCP(TCP):
    """TCP with counters and a bound on connections (`places`)."""

    def __init__(self, max_connections: int, upload: Bandwidth = UNLIMITED, download: Bandwidth = UNLIMITED) -> None:
        super().__init__()
        self.places = ConnectionPlaces(max_connections)
        self.upload, self.download = upload, download
        self.live: dict[Link, Wire] = {}
        self.bytes_in = self.bytes_out = 0
        self.rejected: Counter[str] = Counter()  # what was refused, by reason; here and in `SafePubsub`
        self.refusals = Refusals(self.rejected)  # refusals by the neighbourhood that they came from (`hosts`)
        self.streams = Budgets(BUDGETED_CONNECTIONS, STREAMS_PER_MINUTE)  # streams that each peer opened
        self.flooding: dict[ID, tuple[str, int] | None] = {}
        """Peers that `SafePubsub` has still to ban, and where they are connected from."""

    def refuse(self, reason: str, address: tuple[str, int] | None) -> None:
        """Count a refusal, and log the first of each reason. `address` is the other end of the connection."""
        if address is None:
            self.rejected[reason] += 1
        else:
            self.refusals.note(neighbourhood(address[0]), reason)
        if self.rejected[reason] == 1 and reason in FIRST_REFUSAL_LOGS:
            log.warning("%s (logged once)", FIRST_REFUSAL_LOGS[reason])

    async def _dial_resolved(self, maddr: Any, source: tuple[str, int] | None = None) -> Any:
        connection = await super()._dial_resolved(maddr, source)
        assert isinstance(connection, RawConnection)
        connection.stream = Wire(connection.stream, self, inbound=False)
        return connection

    def create_listener(self, handler_function: Any) -> Any:
        async def handle(stream: Any) -> None:
            wire = Wire(stream, self, inbound=True)
            # The library's handler waits for the end of the process, and holds one of its places for connections.
            try:
                if (loser := self.places.arrive(wire.link)) is not None:
                    await self._hang_up_on(loser, "handshake")
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_cancel_when, wire.closed, nursery.cancel_scope)
                    await handler_function(wire)
                    nursery.cancel_scope.cancel()
            finally:
                self.live.pop(wire.link, None)
                self.places.leave(wire.link)

        return super().create_listener(handle)

    async def admit(self, address: tuple[str, int] | None, inbound: bool) -> bool:
        """A connection has finished its handshake: whether it gets a place. It is closed if not, or another one is."""
        for link, wire in list(self.live.items()):
            if wire.address == address and link.inbound == inbound and link not in self.places.seated:
                loser = self.places.take(link, trio.current_time())
                if loser is not None:
                    await self._hang_up_on(loser, "connections" if loser is link else "crowded")
                return loser is not link
        return False  # it was closed meanwhile

    def brought(self, address: tuple[str, int] | None) -> None:
        """A message that came over this connection was let in."""
        for link, wire in self.live.items():
            if wire.address == address:
                link.valid = True

    def heaviest(self) -> tuple[Wire | None, int]:
        """The inbound connection over which the most has arrived since this was last called, and how many bytes."""
        weights = {wire: wire.bytes_in - wire.bytes_weighed for wire in self.live.values()}
        for wire in weights:
            wire.bytes_weighed = wire.bytes_in
        inbound = [wire for wire in weights if wire.link.inbound]
        most = max(inbound, key=lambda wire: weights[wire], default=None)
        return most, 0 if most is None else weights[most]

    async def sweep(self) -> None:
        """Hang up on handshakes that take too long."""
        for link in self.places.late(trio.current_time()):
            await self._hang_up_on(link, "handshake")

    async def _hang_up_on(self, link: Link, reason: str) -> None:
        self.places.leave(link)
        wire = self.live.get(link)
        self.refuse(reason, None if wire is None else wire.address)
        if wire is not None:
            await wire.close()

    async def hang_up(self, address: tuple[str, int] | None) -> None:
        """Close the socket under a connection: unlike a polite goodbye, that never waits for the peer."""
        for wire in [wire for wire in self.live.values() if wire.address == address]:
            await wire.close()


async def _cancel_when(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


def _keep_alive(stream: trio.SocketStream) -> None:
    """Have the system notice within a minute that the other machine is gone (one that only sleeps answers nothing)."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPALIVE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # each system has some of them
            stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class _ShortNames(Multiselect):
    """Agrees with a peer on a stream's protocol, without reading more than a name is long."""

    async def negotiate(self, communicator: Any, negotiate_timeout: int = 10) -> Any:
        return await super().negotiate(_ShortReader(communicator.read_writer), negotiate_timeout)


class _ShortAnswers(MultiselectClient):
    """Limits the length of names on streams that this node opens."""

    async def select_one_of(self, protocols: Any, communicator: Any, negotiate_timeout: int = 30) -> Any:
        return await super().select_one_of(protocols, _ShortReader(communicator.read_writer), negotiate_timeout)


class _ShortReader(MultiselectCommunicator):
    async def read(self) -> str:
        try:
            return (await read_varint_prefixed_bytes_limited(self.read_writer, MAX_PROTOCOL_BYTES)).decode()[:-1]
        except (ParseError, IOException, UnicodeDecodeError) as error:
            raise MultiselectCommunicatorError(repr(error)) from error


def make_host(tcp: CountedTCP) -> IHost:
    """A host with a fresh Ed25519 key: Noise and yamux over `tcp` only, and nobody dialled but on request."""
    keys = create_new_key_pair()
    room = tcp.places.most + MAX_ARRIVING + 64  # so that the library's own limits never bite: they close the wrong ones
    host: Any = new_host(
        key_pair=keys,
        sec_opt={NOISE: NoiseTransport(keys, noise_privkey=create_noise_key_pair().private_key)},
        transports=[tcp],
        connection_config=ConnectionConfig(
            max_connections=room, high_watermark=room, low_watermark=0, min_connections=0
        ),
        disable_identify_address_discovery=True,
    )
    host.multiselect = _ShortNames()  # with no protocol yet
    host.multiselect_client = _ShortAnswers()
    host._schedule_identify = lambda peer_id, *, reason: None
    network: Any = host.get_network()
    network.upgrader.muxer_multistream = YamuxOnly()
    network.set_resource_manager(None)  # it refuses bursts of connections from one address
    network.auto_connector._is_connecting = True  # = do not begin to dial peers known from hearsay
    network.retry_config = RetryConfig(max_retries=0)  # the node decides when to try again
    handle_stream, add_conn = network.common_stream_handler, network.add_conn

    async def contained(stream: INetStream) -> None:
        peer = stream.muxed_conn.peer_id
        try:
            if tcp.streams.take(str(peer), trio.current_time(), 1):
                await handle_stream(stream)
                return
            tcp.flooding[peer] = stream.get_remote_address()
        except Exception as error:  # one stream's, whatever it was; outside it would end the process
            log.debug("stream of %s: %r", peer, error)
        await stream.reset()

    async def admitted(muxed: Any, direction: str = "unknown") -> Any:
        address = muxed.get_remote_address()
        if not await tcp.admit(address, direction == "inbound"):
            raise SwarmException("there is no place for this connection")
        muxed.on_flood = lambda: tcp.flooding.update({muxed.peer_id: address})
        return await add_conn(muxed, direction)

    network.set_stream_handler(contained)
    network.add_conn = admitted
    return host  # type: ignore[no-any-return]


async def connect(host: IHost, peer: PeerInfo) -> None:
    """Dial as if for the first time: failed dials are remembered for a minute and old addresses for longer, but a peer
    that starts again has new ones."""
    network: Any = host.get_network()
    if not network.get_connections(peer.peer_id):
        network.unblock_peer(peer.peer_id)
        host.get_peerstore().clear_addrs(peer.peer_id)
    await host.connect(peer)
