"""The peers that one node knows in the DHT: its routing table, and those that it does not ask for a while."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.p2p import PeerID

from swarm_protocol.transports.dht.messages import MAX_NEAREST, node_id_of
from swarm_protocol.transports.refusals import Refusals

DEPTH_MODULO = 5  # hivemind's default: how far a table is split that this node is not in itself
AVOIDED_S = 5.0
"""A peer that did not answer, or answered with nonsense, is not asked for so long: about one round of lookups, so that
a bootstrap peer that was busy once is asked in the next."""
MAX_AVOIDED = 1024


class Neighbours(RoutingTable):  # type: ignore[misc]
    """hivemind's routing table. Only peers with the node id of their own key get into it, and no more wait for a
    bucket's places than the bucket has."""

    def __init__(self, me: PeerID, refusals: Refusals, ping: Callable[[PeerID], Coroutine[Any, Any, bool]]) -> None:
        """`ping` asks a peer whether it still answers."""
        super().__init__(node_id_of(me), MAX_NEAREST, DEPTH_MODULO)
        self._me, self._refusals, self._ping = me, refusals, ping
        self._avoided: dict[PeerID, float] = {}  # peer -> end of the time (monotonic) in which it is not asked
        self._pings: set[asyncio.Task[bool]] = set()

    def add_or_update_node(self, node_id: DHTID, peer_id: PeerID) -> tuple[DHTID, PeerID] | None:
        stale: tuple[DHTID, PeerID] | None = super().add_or_update_node(node_id, peer_id)
        bucket = self.buckets[self.get_bucket_index(node_id)]
        while len(bucket.replacement_nodes) > self.bucket_size:
            del self[next(iter(bucket.replacement_nodes))]
        return stale

    def meet(self, peer: PeerID, claimed: bytes) -> None:
        """Enter a peer into the table, if the node id that it claims follows from its key. A peer that only asks claims
        none."""
        if not claimed:
            return
        node_id = node_id_of(peer)
        if claimed != node_id.to_bytes():
            self._refusals.note(str(peer), "node_id")
            return
        self._avoided.pop(peer, None)
        if peer != self._me:
            stale = self.add_or_update_node(node_id, peer)
            if stale is not None:  # it makes way for one that waits, if it does not answer
                ping = asyncio.create_task(self._ping(stale[1]))
                self._pings.add(ping)
                ping.add_done_callback(self._pings.discard)

    def avoid(self, peer: PeerID) -> None:
        """Do not ask a peer for `AVOIDED_S`."""
        node_id = node_id_of(peer)
        if node_id in self:
            self.buckets[self.get_bucket_index(node_id)].nodes_requested_for_ping.discard(node_id)
            del self[node_id]
        self._avoided.pop(peer, None)
        self._avoided[peer] = time.monotonic() + AVOIDED_S
        if len(self._avoided) > MAX_AVOIDED:
            del self._avoided[next(iter(self._avoided))]

    def is_avoided(self, peer: PeerID) -> bool:
        return self._avoided.get(peer, 0.0) > time.monotonic()
