"""Stage transports over the memory transport, as many as a test starts; every machine builds its stages at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from swarm_node.pipeline.membership.actions import BuildStage
from swarm_node.pipeline.messages import Limits
from swarm_node.pipeline.settings import limits
from swarm_node.pipeline.transport import StageTransport
from swarm_protocol.crew import Plan
from swarm_protocol.messages import PROTOCOL_VERSION, PeerCard
from swarm_protocol.transports.base import Channel, Listener
from swarm_protocol.transports.memory import MemoryNetwork, VirtualClock
from tests.support.crew_world import SWARM, spec


def small_limits(plan: Plan, me: str, sender: str) -> Limits:
    return replace(limits(plan, me, sender, width=4, vocabulary=11), tokens=plan.settings.microbatch, rows=8)


class Peers:
    """A crew and its network, whose time a test lets pass."""

    def __init__(self, stages: int) -> None:
        self.clock = VirtualClock(1000.0)
        self.network = MemoryNetwork(self.clock, seed=1)
        self.stages = stages
        self.transports: dict[str, StageTransport] = {}
        self.orders: dict[str, list[object]] = {}
        self.said: list[str] = []
        self.hear = self.said.append
        """Is told each sentence that a peer says."""
        self.channels: defaultdict[tuple[str, str, str], list[Channel]] = defaultdict(list)
        """Of each peer with another, by method, those that are closed included."""
        self.busy: set[str] = set()
        """Peers whose main thread does not ask for orders."""

    def start(self, peer: str, **changes: object) -> StageTransport:
        first = [f"/memory/p2p/{other}" for other in self.transports][:1]
        transport = self.network.join(peer, SWARM, bootstrap=first)
        for tapped in ("connect", "listen"):
            setattr(transport, tapped, partial(self.tap, peer, getattr(transport, tapped)))
        place = spec(peer, self.stages, spare_wait_s=5.0, **changes)  # type: ignore[arg-type]
        hear = lambda text: self.hear(text)  # noqa: E731 - a test may change it
        stage_transport = StageTransport(transport, place, small_limits, hear, now=self.clock.now)
        transport.announce(
            PeerCard(PROTOCOL_VERSION, SWARM, self.clock.now(), peer, ["trainer"], crew=stage_transport.card)
        )
        self.transports[peer], self.orders[peer] = stage_transport, []
        return stage_transport

    def run(self, seconds: float) -> None:
        until = self.clock.now() + seconds
        while self.clock.now() < until:
            self.clock.run_until(self.clock.now() + 0.25)
            for peer, stage_transport in self.transports.items():
                stage_transport.tick()
                for order in stage_transport.orders() if peer not in self.busy else ():
                    self.orders[peer].append(order)
                    if isinstance(order, BuildStage):
                        stage_transport.seated(order, 3, order.sources[0])

    def kill(self, peer: str) -> None:
        del self.transports[peer]
        self.network.kill(peer)

    def tap(self, me: str, use: Callable[..., Any], *args: Any) -> Any:
        """`connect` and `listen` of a transport, as they are; their channels are remembered."""
        *to, method, opened = args

        def tapped(channel: Channel) -> Listener:
            self.channels[me, channel.peer, method].append(channel)
            return opened(channel)

        return use(*to, method, tapped)

    def inject(
        self, sender: StageTransport, receiver: StageTransport, method: str, head: bytes, body: bytes = b""
    ) -> None:
        """A message that an honest sender would not make."""
        sent = [channel.send(head, body) for channel in self.channels[self.peer(sender), self.peer(receiver), method]]
        assert any(sent)

    def peer(self, of: StageTransport) -> str:
        return next(peer for peer, stage_transport in self.transports.items() if stage_transport is of)

    def at(self, stage: int) -> StageTransport:
        """Whoever holds a stage, by the lead's plan."""
        (lead,) = [stage_transport for stage_transport in self.transports.values() if stage_transport.leading]
        assert lead.plan is not None
        return self.transports[lead.plan.assignments[stage].peer]
