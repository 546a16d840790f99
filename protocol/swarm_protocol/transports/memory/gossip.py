"""Gossip in the network in memory: in one hop to every subscriber, or hop by hop over random meshes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from swarm_protocol.transports.memory.station import Air, Component, GossipMessage, Mesh, Station

MESH_REBUILD_S = 1.0  # shortest time between two rebuilds of a mesh


@dataclass
class _Topic:
    subscribers: dict[Station, None] = field(default_factory=dict)
    changes: int = 0


class MemoryGossip:
    """The topics of one network, and the delivery of messages on them."""

    def __init__(self, network: Air, degree: int | None) -> None:
        """`degree` is the mean number of neighbours in a mesh; with `None`, messages go directly to all subscribers."""
        self.degree = degree
        self._network = network
        self._topics: dict[str, _Topic] = {}

    def subscribe(self, node: Station, name: str) -> None:
        topic = self._topics.setdefault(name, _Topic())
        topic.subscribers[node] = None
        topic.changes += 1

    def unsubscribe(self, node: Station, names: Iterable[str]) -> None:
        for name in names:
            self._topics[name].subscribers.pop(node)
            self._topics[name].changes += 1

    def receivers(self, node: Station, name: str) -> Iterable[Station]:
        """The nodes to which `node` sends a message on topic `name`."""
        topic = self._topics.get(name)
        if topic is None:
            return ()
        if self.degree is None:
            return [other for other in topic.subscribers if other.component is node.component and other is not node]
        mesh = self._mesh(node.component, name, topic)
        if node in mesh.neighbours:
            return mesh.neighbours[node]
        reachable = [other for other in mesh.neighbours if not (node.dial_only and other.dial_only)]
        return self._network.rng.sample(reachable, min(self.degree, len(reachable)))  # publishes without listening

    def send(self, sender: Station, receiver: Station, message: GossipMessage) -> None:
        """Send one message over both links, which may lose or duplicate it."""
        network, ours, theirs = self._network, sender.link, receiver.link
        left_at, copies = sender.uplink.send(len(message.data), network.clock.now()), 1
        if (ours.loss or theirs.loss) and network.rng.random() >= (1 - ours.loss) * (1 - theirs.loss):
            network.faults["lost"] += 1
            return
        if ours.duplicate or theirs.duplicate:
            if network.rng.random() >= (1 - ours.duplicate) * (1 - theirs.duplicate):
                network.faults["duplicated"] += 1
                copies = 2
        for _ in range(copies):
            arrival = left_at + network.delay(sender, receiver)
            network.clock.call_at(arrival, receiver.receive, sender, message)

    def _mesh(self, component: Component, name: str, topic: _Topic) -> Mesh:
        """The mesh of one topic in one component. Each node links to degree / 2 nodes that can be dialled, so that the
        mean number of links is `degree`; a node that only dials links to `degree` nodes."""
        state = component.changes, topic.changes
        mesh, now, rng = component.meshes.get(name), self._network.clock.now(), self._network.rng
        if mesh is not None and (mesh.state == state or now < mesh.built + MESH_REBUILD_S):
            return mesh
        assert self.degree is not None
        nodes = [node for node in topic.subscribers if node.component is component]
        open_ = [node for node in nodes if not node.dial_only]
        neighbours: dict[Station, dict[Station, None]] = {node: {} for node in nodes}
        for node in nodes:
            links = self.degree if node.dial_only else (self.degree + 1) // 2
            chosen = rng.sample(open_, min(links + 1, len(open_)))
            for other in [other for other in chosen if other is not node][:links]:
                neighbours[node][other] = neighbours[other][node] = None
        component.meshes[name] = mesh = Mesh(now, state, neighbours)
        return mesh
