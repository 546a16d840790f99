"""GossipSub of py-libp2p 0.8.1, hardened: possible attacks of a remote peer, and the defences here.

undecodable frame or key, error in a handler       ended the whole service    the peer is banned
message ids and topics invented by a peer          kept for ever              stripped before the library sees them
addresses in peer records, peer exchange           stored, dialled            stripped too
tasks that write past a peer's queue               frames interleave          disabled
a message named many times in one request          built as often             put into a peer's queue once (`frames`)
a peer that subscribes again and again             built as often             the same
a peer that resets our stream again and again      given all, each time       the same; banned after a minute's streams
a large message, while many peers read slowly      three copies a peer        all write the same bytes
frames of which the end never comes                kept, in no count          count as unread
many messages that are let in                      each kept for 30 s         forgotten after five heartbeats
a peer that stops reading                          blocks after 32 messages   its connection is closed
data beyond the window, streams without end        buffered                   its connection is closed
many peers that each have little unread            buffered                   the largest heap's connection is closed
meshes that are cut to the usual degree            a hub drops its leaves     peers that dialled us are never pruned
meshes that are full of leaves                     hubs do not link           two peers that we dialled are always in

All code that touches the insides of py-libp2p is in this file, `hub_router`, `safe_host` and `safe_muxer`.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import trio
from google.protobuf.message import DecodeError
from libp2p.abc import IHost, INetStream
from libp2p.exceptions import ParseError
from libp2p.io.exceptions import IOException, MessageTooLarge
from libp2p.network.connection.exceptions import RawConnError
from libp2p.network.stream.exceptions import StreamClosed, StreamReset
from libp2p.peer.id import ID
from libp2p.pubsub import pubsub
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.pubsub import Pubsub
from libp2p.pubsub.validators import signature_validator

from swarm_protocol.transports.gossip.frames import FrameQueue, FrameReader
from swarm_protocol.transports.gossip.gate import HARMLESS, GossipGate
from swarm_protocol.transports.gossip.hub_router import HubGossipSub
from swarm_protocol.transports.gossip.places import MAX_BUFFERED
from swarm_protocol.transports.gossip.safe_host import CountedTCP

log = logging.getLogger("gossip")
pubsub.RpcQueue = FrameQueue  # type: ignore[assignment, attr-defined, misc]  # the queue that the library makes for each peer

MAX_RPC_BYTES = 1 << 20  # larger frames end the stream; the library drops larger ones on the way out
MAX_RPC_MESSAGES = 32  # messages in a frame; honest peers send one, or a few when asked for missed ones
MAX_RPC_CONTROLS = 64  # control entries of a kind in a frame, and message ids in an entry
MAX_ID_BYTES = 2 * (64 + 16)  # of a message's name: an author and a number, in hex as some libraries write them
MAX_BACKOFF_S = 60
BAN_S = 120.0  # a banned peer may come back after this; a fresh key is free anyway
MAX_BANS = 4096
STUCK_S = 20.0  # a peer that reads nothing for so long, or does not speak gossip, is hung up on
WATCH_S, BUFFERS_S = 1.0, 0.1
"""Time between two checks of peers; and of all unread bytes, while these are more than a quarter of the limit. Some 5
MB can arrive within the shorter time, and less than three quarters of the limit within the longer one."""
MAX_ALL_BUFFERED = 128 * 2**20
"""Unread bytes of all connections together, with the frames of which the end has not come. With 100 MB of its own, the
process stays below `MAX_SIDECAR_RSS`."""
MAX_GOSSIP_STREAMS = 3
"""Streams on which one peer sends gossip: one, and another after the first broke. Each may hold a frame."""
MAX_STREAMS = 64  # streams of a connection; an honest one has three or four
HOUSEKEEPING_S = 30.0
MAX_SEEN_IDS = 100_000
"""Message ids remembered, some 20 MB. If there are ever more, all are forgotten; `GossipGate` still knows the accepted
ones."""


class SafePubsub(Pubsub):
    """Pubsub that no frame of a peer can end. It counts refusals by reason."""

    router: HubGossipSub
    peer_queues: dict[ID, FrameQueue]  # type: ignore[assignment]

    def __init__(
        self,
        host: IHost,
        router: HubGossipSub,
        tcp: CountedTCP,
        topics: Iterable[str],
        gate: GossipGate,
        deliver: Callable[[str, bytes], None],
    ) -> None:
        """`topics` are all that exist. `deliver` gets (topic, data) of messages that the `gate` lets in."""
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
        self.gate, self.deliver = gate, deliver
        self.rejected = tcp.rejected
        self.banned: OrderedDict[ID, float] = OrderedDict()
        self._stuck: dict[ID, tuple[object, float]] = {}
        self._reading: dict[ID, set[FrameReader]] = {}  # the gossip streams of each peer

    # ------------------------------------------------------------ from peers

    async def continuously_read_stream(self, stream: INetStream) -> None:
        """Handle a peer's frames one after another until the stream ends; nothing it sends gets further than this."""
        peer = stream.muxed_conn.peer_id
        if self.is_banned(peer):
            return await self.hang_up(peer)
        readers, reader = self._reading.setdefault(peer, set()), FrameReader(stream)
        if len(readers) >= MAX_GOSSIP_STREAMS:
            return await self.ban(peer, "flood")
        readers.add(reader)
        try:
            while self.manager.is_running and not self.is_banned(peer):
                await self._take(peer, await reader.next(self.max_inbound_rpc_size))
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
        finally:
            readers.discard(reader)
            if not self._reading.get(peer):
                self._reading.pop(peer, None)

    async def _take(self, peer: ID, frame: bytes) -> None:
        """Handle a frame; afterwards nothing here holds it. Raises DecodeError, and what the library does about it."""
        rpc = rpc_pb2.RPC()
        rpc.ParseFromString(frame)
        self._sanitise(rpc)
        for message in rpc.publish:
            await self.push_msg(peer, message)
        for subscription in rpc.subscriptions:
            self.handle_subscription(peer, subscription)
        if rpc.HasField("control"):
            await self.router.handle_rpc(rpc, peer)

    def _sanitise(self, rpc: Any) -> None:
        """Strip fields that are not used, and bound the others."""
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
                known = [name for name in entry.messageIDs if len(name) <= MAX_ID_BYTES]
                if len(known) < len(entry.messageIDs):
                    entry.messageIDs[:] = known
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
                if reason in HARMLESS:
                    self.rejected[reason] += 1
                else:
                    self._refuse(msg_forwarder, reason)
                    await self._blame(msg_forwarder, topic, reason)
                return
        self._mark_msg_seen(msg)
        if not own:
            if self.router.scorer is not None:
                self.router.scorer.on_first_delivery(msg_forwarder, topic)
            for connection in self._connections(msg_forwarder):
                self.tcp.brought(connection.get_remote_address())
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
        return self.gate.refusal(topic, msg.data, ID(msg.from_id).to_base58(), forwarder.to_base58(), time.time())

    async def _blame(self, peer: ID, topic: str, reason: str) -> None:
        scorer = self.router.scorer
        assert scorer is not None
        scorer.on_invalid_message(peer, topic)
        if scorer.is_graylisted(peer, [topic]):
            log.info("%s is banned, last for %s", peer, reason)
            await self.ban(peer, "graylist")

    # ------------------------------------------------------------ to peers

    async def write_msg(self, stream: INetStream, rpc_msg: bytes) -> bool:  # type: ignore[override]
        """Write a frame of a peer's queue, and reset the stream if that fails. The library copies it three times."""
        try:
            await stream.write(rpc_msg)
        except (StreamClosed, StreamReset) as error:
            log.debug("a frame was not written: %r", error)
            self._handle_dead_peer(stream.muxed_conn.peer_id)
            await stream.reset()
            return False
        return True

    def _schedule_peer_stream_retry(self, peer_id: ID) -> None:
        """Open another stream to a connected peer, in place of one that broke: it counts as one that the peer opens."""
        if self.tcp.streams.take(str(peer_id), trio.current_time(), 1):
            super()._schedule_peer_stream_retry(peer_id)
        else:
            self.tcp.flooding[peer_id] = self.address(peer_id)

    # ------------------------------------------------------------ who may stay

    def is_banned(self, peer: ID) -> bool:
        return self.banned.get(peer, 0.0) > trio.current_time()

    async def ban(self, peer: ID, reason: str, address: tuple[str, int] | None = None) -> None:
        """Count, hang up, and do not talk to it for `BAN_S`. `address`: of its connection, if that is gone."""
        self._refuse(peer, reason, address)
        self.banned[peer] = trio.current_time() + BAN_S
        if len(self.banned) > MAX_BANS:
            self.banned.popitem(last=False)
        await self.hang_up(peer)

    async def hang_up(self, peer: ID) -> None:
        """Close all connections with `peer`, without waiting for it. What it sent counts no more."""
        self._reading.pop(peer, None)
        for connection in self._connections(peer):
            connection.drop_unread()
            await self.tcp.hang_up(connection.get_remote_address())

    def _refuse(self, peer: ID, reason: str, address: tuple[str, int] | None = None) -> None:
        self.tcp.refuse(reason, self.address(peer) or address)

    def address(self, peer: ID) -> tuple[str, int] | None:
        """The other end of its connection, if it is connected."""
        return next((connection.get_remote_address() for connection in self._connections(peer)), None)

    def _connections(self, peer: ID) -> list[Any]:
        return [connection.muxed_conn for connection in self.host.get_network().get_connections(peer)]

    async def watch(self) -> None:
        """Watch peers for ever: hang up on those that are banned, stuck or silent, or that flood below the reach of
        pubsub."""
        swept = trio.current_time()
        while True:
            end = trio.current_time() + WATCH_S
            while (left := end - trio.current_time()) > 0:
                await trio.sleep(min(left, BUFFERS_S) if await self._bound_buffers() else left)
            await self.tcp.sweep()
            while self.tcp.flooding:
                peer, address = self.tcp.flooding.popitem()
                await self.ban(peer, "flood", address)
            for peer in self.host.get_connected_peers():
                if self.is_banned(peer):
                    await self.hang_up(peer)
                elif self._floods(peer):
                    await self.ban(peer, "flood")
                elif self._is_stuck(peer):
                    self._refuse(peer, "stuck")
                    await self.hang_up(peer)
            connected = set(self.host.get_connected_peers())
            self._stuck = {peer: since for peer, since in self._stuck.items() if peer in connected}
            if trio.current_time() - swept > HOUSEKEEPING_S:
                swept = trio.current_time()
                self.router.housekeeping()
                if len(self.seen_messages.cache) > MAX_SEEN_IDS:
                    self.seen_messages.cache.clear()

    def _floods(self, peer: ID) -> bool:
        streams = (len(connection.stream_buffers) for connection in self._connections(peer))
        return max(streams, default=0) > MAX_STREAMS or self._unread(peer) > MAX_BUFFERED

    def _unread(self, peer: ID) -> int:
        """Bytes that came from a peer and that are no whole frame, or of which nothing has been read."""
        unread: int = sum(connection.unread() for connection in self._connections(peer))
        return unread + sum(reader.bytes for reader in self._reading.get(peer, ()))

    def kept(self) -> dict[ID, int]:
        """Bytes kept for each connected peer: frames that wait for it, and what it sent and is unread."""
        queues = self.peer_queues
        return {
            peer: self._unread(peer) + (queues[peer].bytes if peer in queues else 0)
            for peer in self.host.get_connected_peers()
        }

    def kept_once(self) -> int:
        """The same of all peers together, where a frame that waits for several counts once."""
        queues = list(self.peer_queues.values())
        frames = {id(frame): len(frame) for queue in queues for frame in queue.frames()}
        unread = sum(map(self._unread, self.host.get_connected_peers()))
        return sum(frames.values()) + sum(queue.copied() for queue in queues) + unread

    async def _bound_buffers(self) -> bool:
        """Ban peers while too much lies unread of all; whether more than a quarter of that lies there."""
        unread = {peer: self._unread(peer) for peer in self.host.get_connected_peers()}
        while sum(unread.values()) > MAX_ALL_BUFFERED:
            peer = max(unread, key=lambda peer: unread[peer])
            del unread[peer]
            await self.ban(peer, "flood")
        return sum(unread.values()) > MAX_ALL_BUFFERED / 4

    def _is_stuck(self, peer: ID) -> bool:
        """No stream to it, or the same frame is being written to it, for `STUCK_S`."""
        queue = self.peer_queues.get(peer)
        waiting = queue.frames() if queue is not None else []
        if queue is not None and not waiting:
            self._stuck.pop(peer, None)
            return False
        sign = waiting[0] if waiting else None
        if peer not in self._stuck or self._stuck[peer][0] is not sign:
            self._stuck[peer] = sign, trio.current_time()
        return trio.current_time() - self._stuck[peer][1] > STUCK_S


def _cut(items: Any, most: int) -> None:
    if len(items) > most:
        del items[most:]
