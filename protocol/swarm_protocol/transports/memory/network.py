"""A network in one process, on a virtual clock, with faults. Equal seeds give equal events.

    clock = VirtualClock(); network = MemoryNetwork(clock, seed=3)
    a = network.join("a", swarm); b = network.join("b", swarm, bootstrap=a.addresses)
    clock.run_until(10.0)                  b has dialled a: they see each other's cards and hear each other's messages
    network.partition(["a"]); network.heal(); network.kill("a")

Every node keeps a `PeerTable` and dials the peers that it names. Nodes that are connected, directly or through others,
form a component. Cards spread within a component; messages and requests stay within it. Components merge when one of
their nodes reaches another, and fall apart when nothing connects them any more.

Gossip goes in one hop to every subscriber, and the sender pays for it. With `degree`, it goes hop by hop over a random
mesh, and each node pays for what it forwards. Byte counts cover gossip, requests, exchanges and channels; the cost of
membership is measured on the real network. Everything runs on the thread that drives the clock.

    exchange      caller --latency--> acceptor asked --latency--> `answered` asked; then both ways at once: the body
                  leaves, sharing its uplink with gossip and other bodies, --latency--> both are here: both are taken
    channel       opener --latency--> taker asked --latency--> open; each end's messages leave like bodies, one after
                  the other, --latency--> judged, received. A goodbye, or SILENCE_S after a kill or a cut: closed
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from swarm_protocol.errors import LocalProtocolError
from swarm_protocol.identity import Identity
from swarm_protocol.transports.memory.gossip import MemoryGossip
from swarm_protocol.transports.memory.links import LinkModel, VirtualClock
from swarm_protocol.transports.memory.station import Component
from swarm_protocol.transports.memory.transport import SPREAD_S, MemoryTransport, Network

DEFAULT_LINK = LinkModel()


class MemoryNetwork(Network):
    """All nodes, their connections, and the faults between them."""

    def __init__(self, clock: VirtualClock, seed: int = 0, degree: int | None = None) -> None:
        """`degree` is the mean number of neighbours in gossip meshes; with `None`, gossip takes one hop."""
        super().__init__(clock, seed)
        self.gossip = MemoryGossip(self, degree)
        self.nodes = {}
        self.left = {}

    def join(
        self,
        who: Identity | str,
        swarm: str,
        link: LinkModel = DEFAULT_LINK,
        bootstrap: Sequence[str] = (),
        dial_only: bool = False,
    ) -> MemoryTransport:
        """Start a node. `who` is its identity, or its peer id alone; then its cards are not checked. A peer that was
        killed returns by joining again. Nobody can dial a node that is `dial_only`."""
        peer = who if isinstance(who, str) else who.peer_id
        if peer in self.nodes:
            raise LocalProtocolError(f"peer {peer} is already there")
        node = MemoryTransport(self, who, swarm, link, bootstrap, dial_only)
        self.nodes[peer] = node
        self.clock.call_in(0.0, node.tick)
        return node

    def kill(self, peer: str) -> None:
        """End a node without a goodbye. Its card expires, and its channels close after a time of silence."""
        for channel in list(self.nodes[peer].channels):
            channel.cut()
        self.remove(self.nodes[peer])

    def partition(self, *groups: Collection[str]) -> None:
        """Cut all connections between these groups of peers, and between them and all other peers, also those that join
        later. A channel between two groups ends even if the cut is short."""
        for node in self.nodes.values():
            node.side = next((i for i, group in enumerate(groups, 1) if node.peer_id in group), 0)
        for node in self.nodes.values():
            for other in [other for other in node.edges if other.side != node.side]:
                del node.edges[other]
            for channel in node.channels:
                if channel.other.side != node.side:
                    channel.cut()
        for component in dict.fromkeys(node.component for node in self.nodes.values()):
            self._split(component)

    def heal(self) -> None:
        """End the partition. Nodes that were cut off are found when somebody dials them."""
        for node in self.nodes.values():
            node.side = 0

    def dial(self, node: MemoryTransport, peer: str) -> None:
        other = self.nodes.get(peer)
        if other is None or other.dial_only or other is node or other.side != node.side:
            return
        node.edges[other] = other.edges[node] = None
        if other.component is not node.component:
            self.clock.call_in(SPREAD_S, self._merge, node, other)

    def remove(self, node: MemoryTransport) -> None:
        del self.nodes[node.peer_id]
        node.alive = False
        component = node.component
        for other in node.edges:
            del other.edges[node]
        self.gossip.unsubscribe(node, node.handlers)
        node.edges = {}
        del component.nodes[node]
        node.component = Component({node: None})
        self._split(component)

    def _merge(self, node: MemoryTransport, other: MemoryTransport) -> None:
        """Merge the components of two nodes, if these are still connected."""
        large, small = node.component, other.component
        if other not in node.edges or large is small:
            return
        if len(small.nodes) > len(large.nodes):
            large, small = small, large
        for moved in small.nodes:
            moved.component = large
        large.nodes |= small.nodes
        large.changes += 1
        for peer, entry in small.cards.items():
            if peer not in large.cards or large.cards[peer][0].created < entry[0].created:
                large.cards[peer] = entry

    def _split(self, component: Component) -> None:
        """Split a component into its connected parts. Each keeps all cards."""
        left = dict(component.nodes)
        pieces = []
        while left:
            piece = [left.popitem()[0]]
            for node in piece:  # grows meanwhile
                for other in node.edges:
                    if other in left:
                        del left[other]
                        piece.append(other)
            pieces.append(piece)
        component.changes += 1
        if len(pieces) == 1:
            return
        for piece in pieces:
            fresh = Component(dict.fromkeys(piece), dict(component.cards))
            for node in piece:
                node.component = fresh
