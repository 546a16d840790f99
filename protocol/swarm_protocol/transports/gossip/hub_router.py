"""GossipSub with hubs: the mesh keeps all peers that dialled this node, because they may have no other link."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from typing import Any

import trio
from libp2p.peer.id import ID
from libp2p.pubsub.gossipsub import PROTOCOL_ID_V11, PROTOCOL_ID_V12, GossipSub
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.score import ScoreParams, TopicScoreParams
from libp2p.pubsub.utils import safe_bytes_from_hex
from libp2p.rcmgr import Direction

from swarm_protocol.transports.gossip.frames import FrameCache, FrameQueue
from swarm_protocol.transports.gossip.pipe import MAX_CONNECTIONS

MIN_DIALLED = 2  # peers that this node dialled, in each mesh
LARGE_BYTES = 2048  # size from which on neighbours are told of a message before it is forwarded
LINGER_S, LINGER_BYTES_PER_S = (0.01, 0.04), 4e6
"""Large messages are forwarded after this pause and a random part of the time that they take at this speed. Meanwhile,
neighbours report that they have them. Measured with four linked peers, 60 KB: 0.9 copies sent per peer instead of
2.2."""
GRAYLIST = -50.0
"""Score below which a peer is banned: about six bad messages in a minute. Its first deliveries earn at most 10."""


class HubGossipSub(GossipSub):
    """GossipSub whose meshes keep all peers that dialled this node, beyond the degree."""

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
        self.recent = self.mcache = FrameCache(self.mcache.window_size, self.mcache.history_size)

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
        """The members of `peers` that this node dialled."""
        assert self.pubsub is not None
        network: Any = self.pubsub.host.get_network()
        return [peer for peer in peers if Direction.OUTBOUND in (c.direction for c in network.get_connections(peer))]

    def _perform_opportunistic_grafting(self, topic: str, peers_to_graft: Any) -> int:
        """Disabled: it would add two peers a heartbeat until all are in."""
        return 0

    async def _maintain_mesh_quality(self, topic: str) -> None:
        """Disabled: it would replace quiet peers by busy ones, and a leaf has no other."""

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
        """Disabled: `publish` does it for messages that are large enough."""

    def _check_equivocation(self, msg: rpc_pb2.Message) -> bool:
        """Disabled: it keeps every message, for nothing: `push_msg` drops a second one of the same name."""
        return True

    def send_rpc(self, peer_id: ID, rpc: rpc_pb2.RPC, priority: bool = False) -> None:
        """Queue a frame for a peer; the library's way of doing so copies messages twice for each, and adds to each a
        signed record of 300 bytes, for a peer exchange that nobody here takes part in."""
        for message in rpc.publish:
            self._give(peer_id, message.from_id + message.seqno)
        if rpc.HasField("control") or peer_id in self._pending_control:
            super().send_rpc(peer_id, rpc_pb2.RPC(control=rpc.control), priority)

    async def handle_iwant(self, iwant_msg: rpc_pb2.ControlIWant, sender_peer_id: ID) -> None:
        """Give a peer the messages that it asks for. The library builds each as often as it is named."""
        if not self._check_iwant_rate_limit(sender_peer_id):
            return
        for wire in iwant_msg.messageIDs:
            message_id = safe_bytes_from_hex(wire)
            if message_id is not None:
                self._give(sender_peer_id, message_id)

    async def send_recent_messages(self, peer_id: ID, topic: str) -> None:
        """Give a peer that has just subscribed the latest messages. The library does so past the queue, each time."""
        for message_id in self.recent.window(topic):
            self._give(peer_id, message_id)

    def _give(self, peer: ID, message_id: bytes) -> None:
        assert self.pubsub is not None
        queue = self.pubsub.peer_queues.get(peer)
        if isinstance(queue, FrameQueue):
            self.recent.give(peer, message_id, queue)

    async def flush_pending_messages(self, peer_id: ID) -> None:
        """Disabled: it would write past the peer's queue."""

    def has(self, peer: ID, message_id: bytes) -> None:
        """`peer` sent us this message: it need not be sent there."""
        known = self.dont_send_message_ids.get(peer)
        if known is not None and len(known) < self.max_idontwant_messages:
            known.add(message_id)

    def housekeeping(self) -> None:
        """Forget entries that the library keeps for too long."""
        self.recent_message_deliveries.clear()
        now = int(time.time())
        for topic, peers in list(self.back_off.items()):
            self.back_off[topic] = {peer: until for peer, until in peers.items() if until > now}
