"""The state of a crew as text for people: which peer holds each stage, and what is missing."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any

from protocol.crew import Progress
from protocol.transports.base import Transport
from swarm_node.pipeline.recovery.held_stages import HeldStages
from swarm_node.pipeline.transport import StageTransport

RECOVERED = "stages/recovered/"
_PEER = re.compile(r"(?:peer )?…(\w{8})")


@dataclass(frozen=True)
class StatusText:
    """Sentences and status of the crew that `stage_transport` belongs to. Usable from any thread."""

    transport: Transport
    stage_transport: StageTransport
    crew: str  # its name
    name: str  # the name of this node

    def called(self, peer: str) -> str:
        """A peer's name for people. `peer`: its id, or the end of it."""
        if self.transport.peer_id.endswith(peer):
            return "this node"
        names = {other: card.name for other, card in self.transport.members().items()}
        shown = next((name for other, name in names.items() if other.endswith(peer)), "")
        name = shown or self.stage_transport.name_of(peer)
        another = any(other_name == name for other, other_name in names.items() if not other.endswith(peer))
        return f"peer …{peer[-8:]}" if another or name in ("", "node") else name

    def named(self, text: str) -> str:
        """`text` with names in place of peer ids, where names are known."""
        return _PEER.sub(lambda found: self.called(found[1]), text)

    @property
    def holders(self) -> tuple[str, ...]:
        """Peer ids by stage; empty before the first plan."""
        plan = self.stage_transport.plan
        return () if plan is None else tuple(seat.peer for seat in plan.assignments)

    @property
    def losses(self) -> float:
        """Stages lost so far, as this peer counts them while it leads."""
        return self.stage_transport.metrics().get("stages/lost", 0.0)

    def whole(self) -> str:
        """A sentence that the crew is whole, with the holder of each stage."""
        holders = ", ".join(f"{stage} {self.called(peer)}" for stage, peer in enumerate(self.holders))
        spare = "" if self.stage_transport.planned_stages else "; this node waits until one is free"
        if len(set(self.holders)) == 1:
            return f"crew {self.crew} is whole: all stages with {self.called(self.holders[0])}{spare}"
        return f"crew {self.crew} is whole: stage {holders}{spare}"

    def missing(self) -> str:
        """A sentence about what keeps the crew from going on; empty = nothing does."""
        missing = self.stage_transport.missing
        if not missing:
            return ""
        stages = ", ".join(map(str, missing))
        takers = ", ".join(dict.fromkeys(self.called(taker) for _, taker in missing.values() if taker))
        seconds = max(seconds for seconds, _ in missing.values())
        being = f"being rebuilt by {takers}" if takers else "waiting for a peer"
        return f"stage {stages} is missing for {seconds:.0f} s: {being}"

    def status(self, held_stages: HeldStages, progress: Progress) -> dict[str, Any]:
        """The crew's part of the status file, as `swarm-node status` shows it."""
        plan, card, counts = self.stage_transport.plan, self.stage_transport.card, self.stage_transport.metrics()
        members, workers = self.transport.members(), dict(held_stages.workers)

        def shown(peer: str) -> dict[str, str]:
            mine = peer == self.transport.peer_id
            known = members[peer].name if peer in members else self.stage_transport.name_of(peer)
            return {"peer": peer, "name": self.name if mine else known}

        missing = {
            stage: {"since": time.time() - seconds, "taker": shown(taker) if taker else None}
            for stage, (seconds, taker) in self.stage_transport.missing.items()
        }
        return {
            "name": self.crew,
            "count": card.count,
            "lead": None if plan is None else shown(plan.lead),
            "whole": self.stage_transport.whole and not missing,
            "updates": max((worker.updates for worker in workers.values()), default=0),
            "round": progress.round,
            "stages": [
                {"layers": [seat.layers[0], seat.layers[1] - 1], **shown(seat.peer), "missing": missing.get(stage)}
                for stage, seat in enumerate([] if plan is None else plan.assignments)
            ],
            "absent": sorted(self.stage_transport.absent),
            "spares": 0 if plan is None else len(plan.spares),
            "held": sorted(workers),
            "replicas": {
                stage: state.updates for stage, state in sorted(held_stages.weight_transfer.replicas.copy().items())
            },
            "recovered": {
                name.removeprefix(RECOVERED): int(n) for name, n in counts.items() if name.startswith(RECOVERED)
            },
        }
