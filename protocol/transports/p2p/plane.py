"""The DHT and the streams of a node: hivemind's `P2P` (p2pd) and this project's `CardDHT` in the caller's asyncio loop.

P2PTransport --coroutines--> HivemindPlane --unix sockets--> p2pd (go-libp2p) ==TCP==> other peers
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo

from protocol.codec import sign_card
from protocol.dials import Dials
from protocol.errors import PeerUnreachable, RemoteProtocolError
from protocol.identity import Identity
from protocol.limits import MAX_CLOCK_SKEW_S
from protocol.messages import PeerCard
from protocol.peers import peer_of
from protocol.topics import bucket_of
from protocol.transports.dht.records import CardStorage, CardValidator
from protocol.transports.dht.server import Accounts, CardDHT
from protocol.transports.dht.whereabouts import MAX_ADDRESSES_BYTES, METHOD, WHEREABOUTS_S, Whereabouts, read_answer
from protocol.transports.p2p.connections import Connections
from protocol.transports.p2p.daemon import P2PD_CALL_S, Daemon
from protocol.transports.p2p.dial_back import DialBack
from protocol.transports.p2p.peer_streams import PeerStreams
from protocol.transports.p2p.relay import RELAY_PROTOCOL, reserve
from protocol.transports.ports import Port
from protocol.transports.settings import NetworkSettings, best_first
from protocol.transports.streams.channels import Channels
from protocol.transports.streams.stream import Traffic

PLANE_END_S = 2.0  # longest wait for tasks to end when the plane is closed
CHANNEL_GOODBYE_S = 0.2  # time that p2pd gets to pass on the last messages of channels


class HivemindPlane:
    """One peer's p2pd, DHT node and streams. All coroutines belong to the loop in which `start` was called."""

    def __init__(
        self,
        identity: Identity,
        identity_path: Path,
        swarm: str,
        settings: NetworkSettings,
        report: Callable[[str], None] = lambda sentence: None,
        on_restart: Callable[[], None] = lambda: None,
        channels: Channels | None = None,
        port: Port | None = None,
        dials: Dials | None = None,
        known: Callable[[str], Sequence[str]] | None = None,
        told: Callable[[str], Sequence[str]] | None = None,
    ) -> None:
        """`dials` decides which addresses may be dialled (default: any, once). `known` returns the addresses of a peer,
        `told` those of them that others may learn (default for both: the addresses on cards stored here). Any thread
        may call `told`."""
        self.addresses: list[str] = []  # addresses at which others reach this node, the most useful ones first
        self._channels = channels or Channels(Traffic.limited(settings), report)
        self.traffic = self._channels.traffic
        self.refusals = self.traffic.refusals  # what peers were refused, on the DHT and on streams
        self.restarted = on_restart
        self._identity = identity
        self._settings = settings
        self._validator = CardValidator(swarm, settings.card_ttl_s)
        self._storage = CardStorage()
        self._accounts = Accounts()
        self._addresses_of = known or self._stored_addresses
        self._whereabouts = Whereabouts(told or self._stored_addresses)
        self._bootstrap = {peer_of(address) for address in settings.bootstrap}
        self._clock_offset = time.time() - time.monotonic()
        self._dht: CardDHT | None = None
        port = port or Port(settings.listen, settings.port, report=report)
        self.daemon = Daemon(self, identity_path, settings, port, self.traffic, report)
        self._connections = Connections(self.daemon, dials or Dials(), self.refusals, self._storage)
        dial_back = DialBack(lambda: self.addresses)
        self.streams = PeerStreams(self.daemon, self, swarm, self._channels, dial_back, report)
        self.streams.serve(METHOD, self._whereabouts.serve)

    # ---------------------------------------------------------------- life

    async def start(self) -> None:
        """Start p2pd and keep it running; returns when it is up. Raises LocalProtocolError for settings it refuses."""
        await self.daemon.start()

    async def close(self) -> None:
        """Stop p2pd, whatever state it is in, within a bounded time."""
        talking = self._channels.cancel()
        ending = self.daemon.cancel() | self._connections.cancel() | self.streams.exchanges.cancel() | talking
        if ending:
            await asyncio.wait(ending, timeout=PLANE_END_S)
        if talking:
            await asyncio.sleep(CHANNEL_GOODBYE_S)
        await self.daemon.stop()
        self.streams.answers.close()  # after p2pd, which brings the requests
        self.daemon.release()

    async def begin(self, p2pd: P2P) -> None:
        """Set up the DHT and the stream handlers of a p2pd that has just started."""
        dht = CardDHT(
            p2pd,
            self._identity.peer_id,
            self._validator,
            self._storage,
            self._accounts,
            self.refusals,
            client=self._settings.dial_only,
            named=self._whereabouts.named,
        )
        await asyncio.wait_for(dht.serve(), P2PD_CALL_S)
        handlers = self.streams.handlers()
        if not self._settings.serve_relay:  # without its relay service, p2pd still relays 128 KiB a connection
            handlers[RELAY_PROTOCOL] = _hang_up
        for protocol, handler in handlers.items():
            await asyncio.wait_for(p2pd.add_binary_stream_handler(protocol, handler), P2PD_CALL_S)
        self._dht = dht
        await self.look_around()

    def ended(self) -> None:
        """p2pd has ended, and its DHT node and connections with it."""
        self._dht = None
        self._connections.serving.clear()

    @property
    def connection_count(self) -> int:
        """Number of connected peers."""
        return len(self._storage.connected)

    @property
    def port(self) -> int:
        """TCP port on which p2pd listens, or listened last."""
        return self.daemon.port_number

    @property
    def too_new(self) -> str:
        """A peer whose card is of a newer protocol; see `Transport.too_new`."""
        return self._validator.too_new

    @property
    def made(self) -> dict[str, float]:
        """Peer id -> when its newest card was made, by its own clock; see `P2PTransport.made`."""
        return dict(self._validator.made)

    # ---------------------------------------------------------------- addresses and connections

    async def look_around(self) -> None:
        """Ask p2pd at which addresses this node can be reached by now (routers, relays). Raises PeerUnreachable."""
        with suppress(ValueError):  # no address at all: dial-only and no relay yet
            visible = self._running()[0].get_visible_maddrs(latest=True)
            found = await self.daemon.bounded(visible, P2PD_CALL_S)
            self.addresses = best_first([str(address) for address in found])

    async def connect(self, peer: str, addresses: Sequence[str]) -> None:
        """Dial a peer at all of these multiaddresses, enter each other into the DHT tables, and give it this node's
        card. Raises PeerUnreachable."""
        dht = self._running()[1]
        to = await self._connections.dial(peer, addresses)
        if not await self.daemon.bounded(dht.ping(to), P2PD_CALL_S):
            return  # connected, but it only dials and keeps no part of the DHT
        self._connections.serving.setdefault(peer)
        await self.daemon.bounded(asyncio.gather(dht.give_own(to), dht.look_around()), P2PD_CALL_S)

    async def reach(self, peer: str) -> None:
        """Dial a peer that another peer named, at the addresses on its card. Raises PeerUnreachable."""
        addresses = list(self._addresses_of(peer))
        namer = self._whereabouts.namer(peer)
        if not addresses and namer and namer in await self.connected():
            try:
                answer = await self.streams.request(namer, METHOD, peer.encode(), WHEREABOUTS_S, MAX_ADDRESSES_BYTES)
                addresses = read_answer(peer, answer)
            except RemoteProtocolError as error:
                raise PeerUnreachable(f"{namer} does not say where {peer} is: {error}") from error
        await self._connections.dial(peer, addresses)

    async def connected(self) -> set[str]:
        """Ids of the peers that are connected with this node. Raises PeerUnreachable."""
        return set(await self._connections.connected())

    async def connections(self) -> Mapping[str, list[str]]:
        """Peer id -> addresses at the other ends of its connections. Raises PeerUnreachable."""
        return await self._connections.connected()

    async def dial_back(self, peer: str, ports: Sequence[int]) -> list[bool]:
        """For each of this machine's TCP ports, whether `peer` could connect to it. Raises PeerUnreachable,
        RemoteProtocolError."""
        return await self.streams.dial_back(peer, ports)

    async def take_place(self, relay: str) -> None:
        """Reserve a place at a relay that is connected, for `PLACE_S` at least. Raises PeerUnreachable."""

        async def take() -> None:
            p2pd = self._running()[0]
            _, reader, writer = await p2pd.call_binary_stream_handler(PeerID.from_base58(relay), RELAY_PROTOCOL)
            try:
                await reserve(reader, writer)
            finally:
                writer.close()

        await self.daemon.bounded(take(), P2PD_CALL_S)

    # ---------------------------------------------------------------- cards

    async def store_card(self, card: PeerCard, members: int = 0) -> int:
        """Sign this node's card and store it. `members` is the number of other peers known. Returns how many peers
        accepted the card. Raises PeerUnreachable."""
        dht, peer = self._running()[1], self._identity.peer_id
        self._check_clock(dht)
        value = msgspec.msgpack.encode(sign_card(card, self._identity))
        record = peer, value, card.created + self._settings.card_ttl_s
        key = self._validator.keys[bucket_of(peer)]
        storing = dht.store_card(key, record, members, self._bootstrap, list(self._connections.serving))
        return await self.daemon.bounded(storing, P2PD_CALL_S)

    async def get_cards(self, buckets: Collection[int], members: int = 0) -> dict[str, PeerCard]:
        """Peer id -> card of all peers in these buckets, this node included. `members` is the number of other peers
        known. Raises PeerUnreachable."""
        dht = self._running()[1]
        self._check_clock(dht)
        keys = [self._validator.keys[bucket] for bucket in buckets]
        search = dht.find_cards(keys, members, self._bootstrap, list(self._connections.serving))
        found, now = await self.daemon.bounded(search, P2PD_CALL_S), time.time()
        return dict(self._validator.card(value) for value, expiration in found.values() if expiration > now)

    def _stored_addresses(self, peer: str) -> list[str]:
        """Addresses on the card of a peer that is stored here."""
        try:
            value = self._storage.value(self._validator.keys[bucket_of(peer)], peer)
            return [] if value is None else list(self._validator.card(value)[1].addresses)
        except RemoteProtocolError:
            return []

    def _check_clock(self, dht: CardDHT) -> None:
        """Forget all cards stored here if the clock was set back: they would outlast, and keep out, newer ones."""
        before, self._clock_offset = self._clock_offset, time.time() - time.monotonic()
        if self._clock_offset < before - MAX_CLOCK_SKEW_S:
            dht.forget_cards()

    def _running(self) -> tuple[P2P, CardDHT]:
        p2pd = self.daemon.running()
        if self._dht is None:
            raise PeerUnreachable("the network is not up")
        return p2pd, self._dht


async def _hang_up(info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()
