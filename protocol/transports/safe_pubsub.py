"""py-libp2p 0.8.1, hardened: what a remote peer could do to it, and what is done against that here.

undecodable frame or key, error in a handler       ended the whole service    the peer is banned
message ids and topics invented by a peer          kept for ever              stripped before the library sees them
addresses in peer records, peer exchange           stored, dialled            stripped likewise
two tasks that write to one stream                 frames interleave          one lock a stream
a peer that stops reading                          blocks after 32 messages   its connection is closed
data beyond the window, streams without end        buffered                   its connection is closed
inbound connections                                counted, never discounted  counted while they live
peers known from hearsay                           dialled at random          only who the node names is dialled
meshes that are cut to the usual degree            a hub drops its leaves     who dialled us is never pruned
meshes that are full of leaves                     hubs do not link           two whom we dialled are always in

All that touches the insides of py-libp2p is in this file.
"""

from __future__ import annotations

import logging
import random
import socket
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import trio
from google.protobuf.message import DecodeError
from libp2p import new_host
from libp2p.abc import IHost, INetStream
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.exceptions import ParseError
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import IOException, MessageTooLarge
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.connection.exceptions import RawConnError
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.pubsub.gossipsub import PROTOCOL_ID_V11, PROTOCOL_ID_V12, GossipSub
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.pubsub import Pubsub
from libp2p.pubsub.score import ScoreParams, TopicScoreParams
from libp2p.pubsub.validators import signature_validator
from libp2p.rcmgr import Direction
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.transport.tcp.tcp import TCP
from libp2p.utils.varint import read_varint_prefixed_bytes_limited

from protocol.transports.gossip_pipe import MAX_CONNECTIONS
from protocol.transports.pacing import Pace

log = logging.getLogger("gossip")

MAX_RPC_BYTES = 1 << 20
"""Larger frames end the stream; the library drops larger ones on the way out."""
MAX_RPC_MESSAGES = 32
"""Messages in a frame; honest peers send one, or a few when asked for missed ones."""
MAX_RPC_CONTROLS = 64
"""Control entries of a kind in a frame, and message ids in an entry."""
MAX_BACKOFF_S = 60
BAN_S = 120.0
"""A banned peer may come back after this; a fresh key is free anyway."""
MAX_BANS = 4096
STUCK_S = 20.0
"""A peer that reads nothing for so long, or does not speak gossip, is hung up on."""
WATCH_S = 1.0
MAX_BUFFERED = 24 * 2**20
"""Bytes that a connection may have lying unread: some more than the largest window (16 MiB)."""
MAX_STREAMS = 64
"""Streams of a connection; an honest one has three or four."""
HOUSEKEEPING_S = 30.0
MAX_SEEN = 100_000
"""Message ids remembered, some 20 MB; forgotten all at once if ever reached (`Gate` still knows what was let in)."""

MAX_QUEUE, MAX_QUEUE_BYTES = 256, 16 * 2**20
"""Frames that wait for one peer; the rest is lost to it. The library's 32 lose what a dozen peers say at once."""
MIN_DIALLED = 2

LARGE_BYTES = 2048
LINGER_S, LINGER_BYTES_PER_S = (0.01, 0.04), 4e6
"""Large messages are passed on after this and a random part of the time they take at that speed: neighbours say
meanwhile that they have them. Measured with four peers, all linked, 60 KB: 0.9 copies sent per peer instead of 2.2."""

GRAYLIST = -50.0
"""Score below which a peer is banned: some six bad messages in a minute; what it delivers first earns at most 10."""


# ---------------------------------------------------------------- connections


class Wire(ReadWriteCloser):
    """A TCP connection that counts its bytes and tells when it is closed."""

    def __init__(self, stream: Any, tcp: CountedTCP, inbound: bool) -> None:
        self._stream, self._tcp = stream, tcp
        self.inbound = inbound
        self.address: tuple[str, int] | None = stream.get_remote_address()
        self.closed = trio.Event()
        _keep_alive(stream.stream)
        tcp.live.add(self)

    async def read(self, n: int | None = None) -> bytes:
        data: bytes = await self._stream.read(n)
        self._tcp.bytes_in += len(data)
        if wait := self._tcp.download.take(len(data)):
            await trio.sleep(wait)
        return data

    async def write(self, data: bytes) -> None:
        await self._stream.write(data)
        self._tcp.bytes_out += len(data)
        if wait := self._tcp.upload.take(len(data)):  # not before it: what is encrypted has to leave in that order
            await trio.sleep(wait)

    async def close(self) -> None:
        self._tcp.live.discard(self)
        self.closed.set()
        await self._stream.close()

    def get_remote_address(self) -> tuple[str, int] | None:
        return self.address


class CountedTCP(TCP):
    """TCP with counters and a bound on connections, both ways together."""

    def __init__(self, max_connections: int, upload: Pace | None = None, download: Pace | None = None) -> None:
        super().__init__()
        self.max_connections = max_connections
        self.upload, self.download = upload or Pace(0.0), download or Pace(0.0)
        self.live: set[Wire] = set()
        self.bytes_in = self.bytes_out = 0
        self.rejected: Counter[str] = Counter()
        """What was refused, by reason; here and in `SafePubsub`."""

    async def _dial_resolved(self, maddr: Any, source: tuple[str, int] | None = None) -> Any:
        connection = await super()._dial_resolved(maddr, source)
        assert isinstance(connection, RawConnection)
        connection.stream = Wire(connection.stream, self, inbound=False)
        return connection

    def create_listener(self, handler_function: Any) -> Any:
        async def handle(stream: Any) -> None:
            if len(self.live) >= self.max_connections:
                self.rejected["connections"] += 1
                await stream.close()
                return
            wire = Wire(stream, self, inbound=True)
            # The library's handler waits for the end of the process, and holds one of its places for connections.
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_when, wire.closed, nursery.cancel_scope)
                await handler_function(wire)
                nursery.cancel_scope.cancel()

        return super().create_listener(handle)

    async def hang_up(self, address: tuple[str, int] | None) -> None:
        """Close the socket under a connection: unlike a polite goodbye, that never waits for the peer."""
        for wire in [wire for wire in self.live if wire.address == address]:
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


def make_host(tcp: CountedTCP) -> IHost:
    """A host with a fresh Ed25519 key: Noise and yamux over `tcp` only, and nobody dialled but on request."""
    keys = create_new_key_pair()
    room = tcp.max_connections + 16  # so that the library's own limits never bite: they close the wrong ones
    host = new_host(
        key_pair=keys,
        sec_opt={NOISE: NoiseTransport(keys, noise_privkey=create_noise_key_pair().private_key)},
        muxer_preference="YAMUX",
        transports=[tcp],
        connection_config=ConnectionConfig(
            max_connections=room, high_watermark=room, low_watermark=0, min_connections=0
        ),
        disable_identify_address_discovery=True,
    )
    network: Any = host.get_network()
    network.set_resource_manager(None)  # it refuses bursts of connections from one address
    network.auto_connector._is_connecting = True  # = do not begin to dial peers known from hearsay
    network.retry_config = RetryConfig(max_retries=0)  # the node decides when to try again
    handle_stream = network.common_stream_handler

    async def contained(stream: INetStream) -> None:
        try:
            await handle_stream(stream)
        except Exception as error:  # one stream's, whatever it was; outside it would end the process
            log.debug("stream of %s: %r", stream.muxed_conn.peer_id, error)
            await stream.reset()

    network.set_stream_handler(contained)
    return host


async def connect(host: IHost, peer: PeerInfo) -> None:
    """Dial as if for the first time: failed dials are remembered for a minute and old addresses for longer, but a peer
    that starts again has new ones."""
    network: Any = host.get_network()
    if not network.get_connections(peer.peer_id):
        network.unblock_peer(peer.peer_id)
        host.get_peerstore().clear_addrs(peer.peer_id)
    await host.connect(peer)


# ---------------------------------------------------------------- routing


class HubGossipSub(GossipSub):
    """GossipSub whose meshes keep all who dialled us, whatever the degree."""

    def __init__(self, degree: int) -> None:
        super().__init__(
            [PROTOCOL_ID_V12, PROTOCOL_ID_V11],
            degree,
            degree_low=max(1, degree * 2 // 3),
            degree_high=2 * degree,
            heartbeat_interval=1,
            prune_back_off=10,
            score_params=ScoreParams(
                p2_first_message_deliveries=TopicScoreParams(weight=1, cap=10, decay=0.9),
                p4_invalid_messages=TopicScoreParams(weight=10, cap=100, decay=0.98),  # positive: it is subtracted
                p5_behavior_penalty_weight=1,
                p5_behavior_penalty_decay=0.98,
                publish_threshold=GRAYLIST,
                gossip_threshold=GRAYLIST,
                graylist_threshold=GRAYLIST,
                accept_px_threshold=float("inf"),
            ),
            max_idontwant_messages=256,
            adaptive_gossip_enabled=False,  # slows the heartbeat down to a minute
            spam_protection_enabled=False,  # drops bursts; the gate has rates of its own
            eclipse_protection_enabled=False,  # wants three networks, which a home or a laptop is not
        )

    def mesh_heartbeat(self) -> Any:
        """Have `MIN_DIALLED` peers that we dialled in each mesh: two hubs with leaves enough would else never link."""
        grafts, prunes = super().mesh_heartbeat()
        assert self.pubsub is not None
        for topic in self.mesh.keys() & self.pubsub.peer_topics.keys():
            mesh = self.mesh[topic]
            missing = MIN_DIALLED - len(self._dialled(mesh))
            if missing > 0:
                others = self._get_in_topic_gossipsub_peers_from_minus(topic, MAX_CONNECTIONS, mesh, True)
                for peer in self.select_from_minus(missing, self._dialled(others), ()):
                    mesh.add(peer)
                    grafts[peer].append(topic)
        return grafts, prunes

    def _select_peers_for_pruning(self, topic: str, num_to_prune: int) -> list[ID]:
        """Only peers that we dialled, beyond the degree, worst score first: they can be reached by others. One that
        dialled us may have no other link at all."""
        assert self.scorer is not None
        scorer, dialled = self.scorer, self._dialled(self.mesh[topic])
        dialled.sort(key=lambda peer: scorer.score(peer, [topic]))
        return dialled[: max(0, len(dialled) - self.degree)]

    def _dialled(self, peers: Iterable[ID]) -> list[ID]:
        """Those of `peers` that we dialled."""
        assert self.pubsub is not None
        network = self.pubsub.host.get_network()
        return [peer for peer in peers if any(_outbound(link) for link in network.get_connections(peer))]

    def _perform_opportunistic_grafting(self, topic: str, peers_to_graft: Any) -> int:
        """Not done: it adds two peers a heartbeat until all are in."""
        return 0

    async def _maintain_mesh_quality(self, topic: str) -> None:
        """Not done: it replaces quiet peers by busy ones, and a leaf has no other."""

    async def publish(self, msg_forwarder: ID, pubsub_msg: rpc_pb2.Message) -> None:
        assert self.pubsub is not None
        size, topic = len(pubsub_msg.data), pubsub_msg.topicIDs[0]
        others = self.mesh.get(topic, set()) - {msg_forwarder, ID(pubsub_msg.from_id)}
        if msg_forwarder != self.pubsub.my_id and size >= LARGE_BYTES and others:
            message_id = self.pubsub.get_message_id(pubsub_msg)
            for peer in others:
                await self.emit_idontwant([message_id], peer)
            await trio.sleep(random.uniform(*LINGER_S) + random.random() * size / LINGER_BYTES_PER_S)
        await super().publish(msg_forwarder, pubsub_msg)
        # Kept by the library for 30 s, for every connected peer that is not on this topic: up to 100 messages each.
        self._pending_messages.clear()

    async def _emit_idontwant_for_message(self, msg_id: bytes, topic_ids: Iterable[str]) -> None:
        """Done in `publish`, for those messages only where it is worth a frame."""

    def send_rpc(self, peer_id: ID, rpc: rpc_pb2.RPC, priority: bool = False) -> None:
        """Queue a frame for a peer; the library's way of doing so copies messages twice for each."""
        assert self.pubsub is not None
        rpc.ClearField("senderRecord")  # 300 bytes in each frame, for a peer exchange that nobody here takes part in
        queue = self.pubsub.peer_queues.get(peer_id)
        if queue is None or rpc.HasField("control") or len(rpc.publish) != 1 or peer_id in self._pending_control:
            super().send_rpc(peer_id, rpc, priority)
        elif len(queue) < min(MAX_QUEUE, MAX_QUEUE_BYTES // (len(rpc.publish[0].data) + 1)):
            queue.push(rpc)

    def has(self, peer: ID, message_id: bytes) -> None:
        """`peer` sent us this message: it need not be sent there."""
        known = self.dont_send_message_ids.get(peer)
        if known is not None and len(known) < self.max_idontwant_messages:
            known.add(message_id)

    def housekeeping(self) -> None:
        """Forget what the library keeps for longer than it is of use."""
        self.equivocation_detection.clear()
        self.recent_message_deliveries.clear()
        now = int(time.time())
        for topic, peers in list(self.back_off.items()):
            self.back_off[topic] = {peer: until for peer, until in peers.items() if until > now}


def _outbound(connection: Any) -> bool:
    return isinstance(connection, SwarmConn) and connection.direction == Direction.OUTBOUND


class SafePubsub(Pubsub):
    """Pubsub that no frame of a peer can end, and that counts what it refuses by reason."""

    router: HubGossipSub

    def __init__(
        self,
        host: IHost,
        router: HubGossipSub,
        tcp: CountedTCP,
        topics: Iterable[str],
        check: Callable[[str, bytes, str, str], str | None],
        harmless: frozenset[str],
        deliver: Callable[[str, bytes], None],
    ) -> None:
        """`topics` = all that exist. `check` is told (topic, data, id of who signed the message, id of its forwarder)
        and says why it is refused; reasons not in `harmless` count against the forwarder. `deliver` is told (topic,
        data) of the rest."""
        known = frozenset(topics)
        super().__init__(
            host,
            router,
            strict_signing=True,
            seen_ttl=300,
            max_inbound_rpc_size=MAX_RPC_BYTES,
            max_subscriptions_per_rpc=len(known) + 16,
            max_subscriptions_per_peer=len(known),
            allowed_topics=known,
        )
        self.counter = time.time_ns()  # seconds, as in the library, repeat after a restart
        self.known = known
        self.tcp = tcp
        self.check, self.harmless, self.deliver = check, harmless, deliver
        self.rejected = tcp.rejected
        self.banned: OrderedDict[ID, float] = OrderedDict()
        self._write_locks: WeakKeyDictionary[INetStream, trio.Lock] = WeakKeyDictionary()
        self._stuck: dict[ID, tuple[object, float]] = {}

    # ------------------------------------------------------------ from peers

    async def continuously_read_stream(self, stream: INetStream) -> None:
        """Handle a peer's frames one after another until the stream ends; nothing it sends gets further than this."""
        peer = stream.muxed_conn.peer_id
        if self.is_banned(peer):
            return await self.hang_up(peer)
        try:
            while self.manager.is_running and not self.is_banned(peer):
                data = await read_varint_prefixed_bytes_limited(stream, self.max_inbound_rpc_size)
                rpc = rpc_pb2.RPC()
                rpc.ParseFromString(data)
                self._sanitise(rpc)
                for message in rpc.publish:
                    await self.push_msg(peer, message)
                for subscription in rpc.subscriptions:
                    self.handle_subscription(peer, subscription)
                if rpc.HasField("control"):
                    await self.router.handle_rpc(rpc, peer)
                await trio.lowlevel.checkpoint()
        except (MessageTooLarge, ParseError, DecodeError) as error:
            log.info("bad frame from %s: %r", peer, error)
            await self.ban(peer, "frame")
        except (IOException, RawConnError) as error:  # among them all that a stream raises when it simply ends
            log.debug("stream of %s ended: %r", peer, error)
            await stream.reset()
        except Exception as error:  # the library's, brought about by what the peer sent
            log.warning("frame from %s: %r", peer, error)
            await self.ban(peer, "frame")

    def _sanitise(self, rpc: Any) -> None:
        """Strip what we do not use, bound the rest."""
        rpc.ClearField("senderRecord")
        _cut(rpc.publish, MAX_RPC_MESSAGES)
        _cut(rpc.subscriptions, self.max_subscriptions_per_rpc)
        if not rpc.HasField("control"):
            return
        control = rpc.control
        for kind in (control.ihave, control.graft, control.prune):
            for i in reversed(range(len(kind))):
                if kind[i].topicID not in self.known:
                    del kind[i]
        for prune in control.prune:
            prune.ClearField("peers")
            prune.backoff = min(prune.backoff, MAX_BACKOFF_S)
        for kind in (control.ihave, control.iwant, control.idontwant):
            _cut(kind, MAX_RPC_CONTROLS)
            for entry in kind:
                _cut(entry.messageIDs, MAX_RPC_CONTROLS)
        _cut(control.graft, len(self.known))
        _cut(control.prune, len(self.known))

    async def push_msg(self, msg_forwarder: ID, msg: rpc_pb2.Message) -> None:
        """Check a message, deliver it and pass it on; our own are only passed on."""
        own = msg_forwarder == self.my_id
        if not own:
            if len(msg.topicIDs) != 1 or msg.topicIDs[0] not in self.topic_ids:
                return
            if self._is_msg_seen(msg):
                self.router.has(msg_forwarder, self.get_message_id(msg))
                return
            if ID(msg.from_id) == self.my_id or self.is_banned(msg_forwarder):
                return
            topic = msg.topicIDs[0]
            reason = self._refusal(topic, msg, msg_forwarder)
            if reason is not None:
                self.rejected[reason] += 1
                if reason not in self.harmless:
                    await self._blame(msg_forwarder, topic, reason)
                return
        self._mark_msg_seen(msg)
        if not own:
            if self.router.scorer is not None:
                self.router.scorer.on_first_delivery(msg_forwarder, topic)
            self.deliver(topic, msg.data)
        self.manager.run_task(self._pass_on, msg_forwarder, msg)

    async def _pass_on(self, forwarder: ID, msg: rpc_pb2.Message) -> None:
        try:
            await self.router.publish(forwarder, msg)
        except Exception as error:  # the library's; outside it would end the service
            log.warning("a message was not passed on: %r", error)

    def _refusal(self, topic: str, msg: Any, forwarder: ID) -> str | None:
        if not msg.signature:
            return "unsigned"
        try:
            genuine = len(msg.from_id) <= 64 and len(msg.seqno) <= 16 and signature_validator(msg)
        except Exception as error:  # keys of any kind are parsed there, and raise anything
            log.info("unreadable key: %r", error)
            genuine = False
        if not genuine:
            return "forged"
        self._mark_msg_seen(msg)  # its name is proven: not to be fetched or looked at again, whatever it is
        return self.check(topic, msg.data, ID(msg.from_id).to_base58(), forwarder.to_base58())

    async def _blame(self, peer: ID, topic: str, reason: str) -> None:
        scorer = self.router.scorer
        assert scorer is not None
        scorer.on_invalid_message(peer, topic)
        if scorer.is_graylisted(peer, [topic]):
            log.info("%s is banned, last for %s", peer, reason)
            await self.ban(peer, "graylist")

    # ------------------------------------------------------------ to peers

    async def _handle_new_peer(self, peer_id: ID) -> None:
        await super()._handle_new_peer(peer_id)
        if peer_id in self.peer_queues:
            self.peer_queues[peer_id]._queue.max_size = MAX_QUEUE + 32  # the rest is for control

    async def write_msg(self, stream: INetStream, rpc_msg: rpc_pb2.RPC) -> bool:
        """One message at a time on a stream, whole or not at all."""
        async with self._write_locks.setdefault(stream, trio.Lock()):
            if await super().write_msg(stream, rpc_msg):
                return True
        await stream.reset()
        return False

    # ------------------------------------------------------------ who may stay

    def is_banned(self, peer: ID) -> bool:
        """Whether `peer` misbehaved not long ago."""
        return self.banned.get(peer, 0.0) > trio.current_time()

    async def ban(self, peer: ID, reason: str) -> None:
        """Count, hang up, and do not talk to it for `BAN_S`."""
        self.rejected[reason] += 1
        self.banned[peer] = trio.current_time() + BAN_S
        if len(self.banned) > MAX_BANS:
            self.banned.popitem(last=False)
        await self.hang_up(peer)

    async def hang_up(self, peer: ID) -> None:
        """Close all connections with `peer`, without waiting for it."""
        for connection in self.host.get_network().get_connections(peer):
            muxed: Any = connection.muxed_conn
            await self.tcp.hang_up(muxed.get_remote_address())

    async def watch(self) -> None:
        """For ever: hang up on peers that are banned, stuck, silent, or that flood below the reach of pubsub."""
        swept = trio.current_time()
        while True:
            await trio.sleep(WATCH_S)
            for peer in self.host.get_connected_peers():
                if self.is_banned(peer):
                    await self.hang_up(peer)
                elif self._floods(peer):
                    await self.ban(peer, "flood")
                elif self._is_stuck(peer):
                    self.rejected["stuck"] += 1
                    await self.hang_up(peer)
            connected = set(self.host.get_connected_peers())
            self._stuck = {peer: since for peer, since in self._stuck.items() if peer in connected}
            if trio.current_time() - swept > HOUSEKEEPING_S:
                swept = trio.current_time()
                self.router.housekeeping()
                if len(self.seen_messages.cache) > MAX_SEEN:
                    self.seen_messages.cache.clear()

    def _floods(self, peer: ID) -> bool:
        for connection in self.host.get_network().get_connections(peer):
            buffers = getattr(connection.muxed_conn, "stream_buffers", {})
            if len(buffers) > MAX_STREAMS or sum(map(len, buffers.values())) > MAX_BUFFERED:
                return True
        return False

    def _is_stuck(self, peer: ID) -> bool:
        """No stream to it, or the head of its queue has not moved, for `STUCK_S`."""
        queue = self.peer_queues.get(peer)
        waiting = queue._queue._priority or queue._queue._non_priority if queue is not None else None
        if queue is not None and not waiting:
            self._stuck.pop(peer, None)
            return False
        sign = waiting[0] if waiting else None
        before, since = self._stuck.setdefault(peer, (sign, trio.current_time()))
        if before is not sign:
            self._stuck[peer] = (sign, trio.current_time())
            return False
        return trio.current_time() - since > STUCK_S


def _cut(items: Any, most: int) -> None:
    if len(items) > most:
        del items[most:]
