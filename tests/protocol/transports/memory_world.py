"""Nodes on a network in memory, for the tests of its parts."""

from __future__ import annotations

from swarm_protocol.messages import PROTOCOL_VERSION, PeerCard
from swarm_protocol.transports.base import Transport
from swarm_protocol.transports.memory import (
    LinkModel,
    MemoryNetwork,
    MemoryTransport,
    VirtualClock,
)
from tests.support.wire import SWARM

START = 1_800_000_000.0
UP = START + 30.0
"""By then everybody has found everybody."""
Heard = list[tuple[float, str, bytes]]


def card(name: str = "node", swarm: str = SWARM) -> PeerCard:
    return PeerCard(protocol=PROTOCOL_VERSION, swarm=swarm, created=0.0, name=name, roles=["trainer"])


class World:
    """A network, its clock, and what was heard on topic `t`: (seconds after START, who, what)."""

    def __init__(self, seed: int = 0, degree: int | None = None) -> None:
        self.clock = VirtualClock(START)
        self.network = MemoryNetwork(self.clock, seed, degree)
        self.heard: Heard = []

    def join(
        self, name: str, *bootstrap: str, link: LinkModel | None = None, dial_only: bool = False
    ) -> MemoryTransport:
        addresses = [f"/memory/p2p/{peer}" for peer in bootstrap]
        node = self.network.join(name, SWARM, link or LinkModel(), addresses, dial_only)
        node.announce(card(name))
        node.subscribe("t", lambda data: self.heard.append((self.clock.now() - START, name, data)))
        return node

    def run(self, seconds: float) -> None:
        self.clock.run_until(self.clock.now() + seconds)


def members(node: Transport) -> set[str]:
    return set(node.members())
