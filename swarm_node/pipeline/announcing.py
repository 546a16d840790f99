"""The view of a node in a crew that others have: its membership card, its status file, and how to join it.

While the node leads, `swarm.member.Member` announces its card, and its run writes its status.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from swarm_node.pipeline.assemble import CrewParts
from swarm_protocol.messages import PROTOCOL_VERSION, CrewCard, PeerCard
from swarm_protocol.transports.base import Handler, Transport

ANNOUNCE_TICK_S = 0.5  # so often time passes for the crew, and the join command is renewed
STATUS_S = 2.0  # time between two writings of the status of a node that does not lead
MAX_SHOWN = 500  # peers in the status


class LeaderSubscriptions:
    """Topics that a node hears while it leads; each handler takes the place of the one before."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._handlers: dict[str, Handler] = {}

    def subscribe(self, topic: str, handler: Handler) -> None:
        """Have `handler` called with each message of a topic, until `end`. The transport's subscription stays."""
        known = topic in self._handlers
        self._handlers[topic] = handler
        if not known:
            self._transport.subscribe(topic, lambda data: self._handlers[topic](data))

    def end(self) -> None:
        """Call no handler any more."""
        self._handlers = dict.fromkeys(self._handlers, lambda data: None)


@dataclass
class Announcer:
    """The card and the status file of a node in a crew."""

    parts: CrewParts
    drives: Callable[[], bool]  # whether this node leads a whole crew
    status: Callable[[], dict[str, Any]]  # the crew's part of the status file
    _announced: Any = None

    def start(self, stack: ExitStack) -> None:
        """Keep time, join command and status on a thread of its own, which ends with `stack`."""
        ended = threading.Event()
        ticking = threading.Thread(target=self._tick, args=(ended,), name="crew", daemon=True)
        ticking.start()
        stack.callback(ticking.join)
        stack.callback(ended.set)

    def card(self) -> tuple[CrewCard, tuple[int, int] | None]:
        """The crew's part of the membership card, and the first and the last layer that are held here."""
        card, plan = self.parts.stage_transport.card, self.parts.stage_transport.plan
        held = [] if plan is None else [plan.spans[stage] for stage in card.held]
        return card, (held[0][0], held[-1][1] - 1) if held else None

    def announce(self) -> None:
        """Renew the membership card if it has changed."""
        parts = self.parts
        card, layers = self.card()
        shown = card, parts.held_stages.updates, parts.cohort.id
        if self.drives() or shown == self._announced:
            return
        self._announced = shown
        parts.transport.announce(
            PeerCard(
                protocol=PROTOCOL_VERSION,
                swarm=parts.entered.manifest.swarm_id,
                created=time.time(),
                name=parts.status_text.name,
                roles=["trainer"],
                cohort=parts.cohort.id,
                family=parts.loading.config.model_type,
                policy_version=parts.held_stages.updates,
                stages=layers,
                crew=card,
            )
        )

    def _write_status(self) -> None:
        parts, transport = self.parts, self.parts.transport
        averager = parts.cohort.averager
        parts.run.write_status(
            {
                "swarm": parts.entered.manifest.swarm_id,
                "swarm_name": parts.entered.manifest.name,
                "time": time.time(),
                "peer": transport.peer_id,
                "name": parts.status_text.name,
                "addresses": transport.addresses,
                "traffic": dict(transport.stats()),
                "restarted": dict(transport.restarted()),
                "averaging": None if averager is None else averager.status(),
                "peers": {
                    peer: {
                        "name": card.name,
                        "present": True,
                        "trains": "trainer" in card.roles,
                        "policy_version": card.policy_version,
                    }
                    for peer, card in sorted(transport.members().items())[:MAX_SHOWN]
                },
                "link": parts.join_command.link,
                "crew": self.status(),
            }
        )

    def _tick(self, ended: threading.Event) -> None:
        written, transport = 0.0, self.parts.transport
        stage_transport = self.parts.stage_transport
        while not ended.wait(ANNOUNCE_TICK_S):
            stage_transport.tick()
            members, absent = transport.members(), stage_transport.absent
            here = {peer: card for peer, card in members.items() if peer not in absent}
            self.parts.join_command.renew(transport.addresses, here, stage_transport.plan)
            if not self.drives() and time.monotonic() - written > STATUS_S:
                written = time.monotonic()
                self._write_status()
