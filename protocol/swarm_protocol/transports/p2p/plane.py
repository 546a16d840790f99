"""The DHT and the streams of a node: hivemind's `P2P` (p2pd) and this project's `CardDHT` in the caller's asyncio loop.

P2PTransport --coroutines--> HivemindPlane --unix sockets--> p2pd (go-libp2p) ==TCP==> other peers
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo

from swarm_protocol.codec import sign_card
from swarm_protocol.dials import Dials
from swarm_protocol.errors import PeerUnreachable, RemoteProtocolError
from swarm_protocol.first_cards import CARDS_METHOD, MAX_FIRST_CARDS, write_cards
from swarm_protocol.identity import Identity
from swarm_protocol.limits import MAX_CLOCK_SKEW_S
from swarm_protocol.messages import PeerCard
from swarm_protocol.peers import peer_of
from swarm_protocol.topics import bucket_of
from swarm_protocol.transports.dht.lookup import direct
from swarm_protocol.transports.dht.records import CardStorage, CardValidator
from swarm_protocol.transports.dht.server import CardDHT
from swarm_protocol.transports.dht.whereabouts import (
    MAX_ADDRESSES_BYTES,
    METHOD,
    WHEREABOUTS_S,
    Whereabouts,
    read_answer,
)
from swarm_protocol.transports.p2p.connections import Connections
from swarm_protocol.transports.p2p.daemon import P2PD_CALL_S, Daemon
from swarm_protocol.transports.p2p.peer_streams import PeerStreams
from swarm_protocol.transports.p2p.relay import RELAY_PROTOCOL
from swarm_protocol.transports.ports import Port
from swarm_protocol.transports.settings import NetworkSettings, best_first
from swarm_protocol.transports.streams.services import Services

PLANE_END_S = 2.0  # longest wait for tasks to end when the plane is closed
CHANNEL_GOODBYE_S = 0.2  # time that p2pd gets to pass on the last messages of channels


class HivemindPlane:
    """One peer's p2pd, DHT node and streams. All coroutines belong to the loop in which `daemon` was started."""

    def __init__(
        self,
        identity: Identity,
        identity_path: Path,
        swarm: str,
        settings: NetworkSettings,
        port: Port | None,
        services: Services,
        report: Callable[[str], None],
        on_restart: Callable[[], None],
        dials: Dials,
        known: Callable[[str], Sequence[str]],
        told: Callable[[str], Sequence[str]],
    ) -> None:
        """A node that only dials has no `port`. `dials` decides which addresses may be dialled. `known` returns the
        addresses of a peer, `told` those of them that others may learn; any thread may call `told`."""
        self.addresses: list[str] = []  # addresses at which others reach this node, the most useful ones first
        self.traffic = services.traffic
        self.refusals = self.traffic.refusals  # what peers were refused, on the DHT and on streams
        self.restarted = on_restart
        self.known = known
        self.validator = CardValidator(swarm, settings.card_ttl_s)
        self._identity = identity
        self._settings = settings
        self._storage = CardStorage()
        self._whereabouts = Whereabouts(told)
        self._bootstrap = {peer_of(address) for address in settings.bootstrap}
        self._rng = random.Random()
        self._clock_offset = time.time() - time.monotonic()
        self._dht: CardDHT | None = None
        self.daemon = Daemon(self, identity_path, settings, port, self.traffic, report)
        self.connections = Connections(self.daemon, dials, self.refusals, self._storage)
        self.streams = PeerStreams(self, swarm, services)
        services.answers.servers[METHOD] = self._whereabouts.serve
        services.answers.servers[CARDS_METHOD] = self._give_cards

    async def close(self) -> None:
        """Stop p2pd, whatever state it is in, within a bounded time."""
        services = self.streams.services
        talking = services.channels.cancel()
        ending = self.daemon.cancel() | services.exchanges.cancel() | talking
        if ending:
            await asyncio.wait(ending, timeout=PLANE_END_S)
        if talking:
            await asyncio.sleep(CHANNEL_GOODBYE_S)
        await self.daemon.stop()
        services.answers.close()  # after p2pd, which brings the requests
        self.daemon.release()

    async def begin(self, p2pd: P2P) -> None:
        """Set up the DHT and the stream handlers of a p2pd that has just started."""
        dht = CardDHT(
            p2pd,
            self._identity.peer_id,
            self.validator,
            self._storage,
            self.refusals,
            self._settings.dial_only,
            self._whereabouts.named,
        )
        if not self._settings.dial_only:
            await asyncio.wait_for(dht.add_p2p_handlers(p2pd), P2PD_CALL_S)
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
        self.connections.serving.clear()

    async def look_around(self) -> None:
        """Ask p2pd at which addresses this node can be reached by now (routers, relays). Raises PeerUnreachable."""
        with suppress(ValueError):  # no address at all: dial-only and no relay yet
            visible = self.daemon.running().get_visible_maddrs(latest=True)
            found = await self.daemon.bounded(visible, P2PD_CALL_S)
            self.addresses = best_first([str(address) for address in found])

    async def connect(self, peer: str, addresses: Sequence[str]) -> None:
        """Dial a peer at all of these multiaddresses, enter each other into the DHT tables, and give it this node's
        card. Raises PeerUnreachable."""
        dht = self._running()
        to = await self.connections.dial(peer, addresses)
        if not await self.daemon.bounded(dht.ping(to), P2PD_CALL_S):
            return  # connected, but it only dials and keeps no part of the DHT
        self.connections.serving.setdefault(peer)
        await self.daemon.bounded(asyncio.gather(dht.give_own(to), dht.look_around()), P2PD_CALL_S)

    async def reach(self, peer: str) -> None:
        """Dial a peer that another peer named, at the addresses on its card. Raises PeerUnreachable."""
        addresses = self.known(peer)
        namer = self._whereabouts.namer(peer)
        if not addresses and namer and namer in await self.connections.connected():
            try:
                answer = await self.streams.request(namer, METHOD, peer.encode(), WHEREABOUTS_S, MAX_ADDRESSES_BYTES)
                addresses = read_answer(peer, answer)
            except RemoteProtocolError as error:
                raise PeerUnreachable(f"{namer} does not say where {peer} is: {error}") from error
        await self.connections.dial(peer, addresses)

    async def store_card(self, card: PeerCard, members: int = 0) -> int:
        """Sign this node's card and store it. `members` is the number of other peers known. Returns how many peers
        accepted the card. Raises PeerUnreachable."""
        dht, peer = self._running(), self._identity.peer_id
        self._check_clock(dht)
        value = msgspec.msgpack.encode(sign_card(card, self._identity))
        record = peer, value, card.created + self._settings.card_ttl_s
        storing = dht.store_card(self.validator.keys[bucket_of(peer)], record, self._direct(members))
        return await self.daemon.bounded(storing, P2PD_CALL_S)

    async def get_cards(self, buckets: Collection[int], members: int = 0) -> dict[str, PeerCard]:
        """Peer id -> card of all peers in these buckets, this node included. `members` is the number of other peers
        known. Raises PeerUnreachable."""
        dht = self._running()
        self._check_clock(dht)
        search = dht.find_cards([self.validator.keys[bucket] for bucket in buckets], members, self._direct(members))
        found, now = await self.daemon.bounded(search, P2PD_CALL_S), time.time()
        return dict(self.validator.card(value) for value, expiration in found.values() if expiration > now)

    def _give_cards(self, caller: str, payload: bytes) -> bytes:
        return write_cards(self._storage.some(MAX_FIRST_CARDS, time.time()))

    def _direct(self, members: int) -> list[str]:
        return direct(list(self.connections.serving), self._bootstrap, members, self._rng)

    def _check_clock(self, dht: CardDHT) -> None:
        """Forget all cards stored here if the clock was set back: they would outlast, and keep out, newer ones."""
        before, self._clock_offset = self._clock_offset, time.time() - time.monotonic()
        if self._clock_offset < before - MAX_CLOCK_SKEW_S:
            dht.forget_cards()

    def _running(self) -> CardDHT:
        self.daemon.running()
        if self._dht is None:
            raise PeerUnreachable("the network is not up")
        return self._dht


async def _hang_up(info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()
