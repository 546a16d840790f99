"""The gossip side of a node's transport: its handlers, the gossip process, and the connections of that."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from swarm_protocol.dials import Dials
from swarm_protocol.gossip_kinds import KINDS
from swarm_protocol.limits import MAX_ADDRESSES
from swarm_protocol.peers import PeerTable
from swarm_protocol.transports.base import Handler
from swarm_protocol.transports.gossip.client import NO_STATUS, GossipClient
from swarm_protocol.transports.gossip.pipe import GossipSettings
from swarm_protocol.transports.ports import Port
from swarm_protocol.transports.settings import best_first


class GossipSide:
    """`publish` may be called from any thread; everything else runs in the network's loop."""

    def __init__(
        self, settings: GossipSettings, port: Port | None, report: Callable[[str], None], started: Callable[[], None]
    ) -> None:
        """`started` is called when a gossip process is up, perhaps a new one."""
        self._report = report
        topics = (kind.topics(settings.swarm, settings.shards) for kind in KINDS if kind.sharded)
        self._shard_of_topic = {topic: shard for each in topics for shard, topic in enumerate(each)}
        self._handlers: dict[str, list[Handler]] = {}
        self.client = GossipClient(settings, self._on_message, report, started, port)
        self.stat = NO_STATUS  # what the gossip process said last
        self.has_dialled = False  # whether `tend` dialled when it was called last
        self.refused = 0  # messages that the queue to the gossip process did not take
        self.handler_faults = 0

    def subscribe(self, topic: str, handler: Handler) -> None:
        if topic not in self._handlers:
            self.client.subscribe(topic)
        self._handlers.setdefault(topic, []).append(handler)

    def publish(self, topic: str, data: bytes) -> bool:
        taken = self.client.publish(topic, data)
        self.refused += not taken
        return taken

    def _on_message(self, topic: str, data: bytes) -> None:
        for handler in self._handlers.get(topic, ()):
            try:
                handler(data)
            except Exception as error:  # the port's promise
                self.handler_faults += 1
                self._report(f"a message was dropped: {error!r}")

    async def tend(self, table: PeerTable, dials: Dials, sweep_s: float) -> None:
        """Dial and drop gossip connections as the table says. `sweep_s` is the time that a lookup of all cards takes.
        Raises PeerUnreachable."""
        if not self.client.gossip_id or self.client.pid is None:
            return  # its restart starts the next round
        self.stat = await self.client.stat()
        now, connected = time.time(), self.stat.peers
        for gossip_id, address in self.stat.ways.items():
            dials.prove(gossip_id, [address], now)
        self.has_dialled = False
        shards = sorted({self._shard_of_topic[topic] for topic in self._handlers if topic in self._shard_of_topic})
        for addresses in table.gossip_to_dial(shards, self.client.settings.max_connections, connected, now).values():
            for address in addresses:
                self.client.dial(address)
                self.has_dialled = True
        ghosts = table.ghosts(connected, now, sweep_s)
        if ghosts:
            self.client.drop(ghosts)

    def addresses(self, own: Sequence[str]) -> list[str]:
        """Addresses of the gossip process. It knows its port, and `own`, the addresses of p2pd, may name more hosts."""
        listening = self.client.addresses
        if not listening:
            return []
        tail = listening[0].partition("/tcp/")[2]  # <port>/p2p/<gossip id>
        hosts = [address.partition("/tcp/")[0] for address in own if "/p2p-circuit" not in address]
        found = dict.fromkeys([*listening, *(f"{host}/tcp/{tail}" for host in hosts)])
        return best_first(list(found))[:MAX_ADDRESSES]
