"""A node of the network in memory and the air between nodes, as gossip, exchanges and channels see them."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from swarm_protocol.messages import PeerCard
from swarm_protocol.transports.base import Acceptor, Channel, Listener
from swarm_protocol.transports.memory.links import LinkModel, Uplink, VirtualClock


class Air:
    """Time, chance and faults between the nodes of one network."""

    def __init__(self, clock: VirtualClock, seed: int) -> None:
        self.clock = clock
        self.rng = random.Random(seed)
        self.faults: Counter[str] = Counter()
        """Faults of messages: `lost`, `duplicated`, `cut` (the receiver was gone or cut off on arrival)."""

    def delay(self, sender: Station, receiver: Station) -> float:
        """Seconds that a message takes from the sender's uplink to the receiver."""
        ours, theirs = sender.link, receiver.link
        delay = ours.latency_s + theirs.latency_s
        if ours.jitter_s or theirs.jitter_s:
            delay += self.rng.uniform(0.0, ours.jitter_s) + self.rng.uniform(0.0, theirs.jitter_s)
        return delay


class Station(ABC):
    """One node."""

    def __init__(self, peer_id: str, link: LinkModel, dial_only: bool) -> None:
        self.peer_id = peer_id
        self.link = link
        self.uplink = Uplink(link)
        self.dial_only = dial_only
        self.bytes_in = 0
        self.rejected: Counter[str] = Counter()
        self.alive = True
        self.side = 0  # number of the part of a partitioned network that the node is in
        self.edges: dict[Station, None] = {}  # nodes that it is connected with
        self.component = Component({self: None})
        self.acceptors: dict[str, Acceptor] = {}
        self.exchanging: Counter[str] = Counter()
        """Caller -> number of its exchanges that this node accepted and that are under way."""
        self.openings: dict[str, Callable[[Channel], Listener]] = {}
        self.channels: dict[ChannelEnd, None] = {}

    def can_reach(self, other: Station) -> bool:
        """Whether both nodes are alive and no partition is between them."""
        return self.alive and other.alive and self.side == other.side

    @abstractmethod
    def receive(self, sender: Station, message: GossipMessage) -> None:
        """A message has arrived from `sender`. Raises whatever a handler raises except RemoteProtocolError."""


class ChannelEnd(Protocol):
    """A node's end of a channel."""

    peer: str
    other: Station
    taken: bool  # whether the peer opened it

    def cut(self) -> None:
        """A fault ends it."""

    def close(self) -> None:
        """The node ends it."""


@dataclass(eq=False)
class Component:
    """Nodes that are connected, directly or through others, and the cards that they hold together."""

    nodes: dict[Station, None]
    cards: dict[str, tuple[PeerCard, float]] = field(default_factory=dict)  # peer id -> card, and when it expires
    meshes: dict[str, Mesh] = field(default_factory=dict)  # topic -> gossip mesh
    changes: int = 0  # number of nodes that joined and left


@dataclass
class Mesh:
    """Which nodes of one component forward messages of one topic to which others."""

    built: float
    state: tuple[int, int]  # counts of changes of the component and of the topic for which it was built
    neighbours: dict[Station, dict[Station, None]]


@dataclass(eq=False)
class GossipMessage:
    """A message on its way, and the nodes that have it."""

    topic: str
    data: bytes
    seen: set[Station] = field(default_factory=set)
