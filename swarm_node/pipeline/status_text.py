"""The state of a crew as text for people: which peer holds each stage, what is missing, and what was lost."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from swarm_node.pipeline.messages import StageLost
from swarm_node.pipeline.recovery.held_stages import HeldStages
from swarm_node.pipeline.transport import StageTransport
from swarm_node.say import Warned
from swarm_protocol.crew import Progress
from swarm_protocol.transports.base import Transport

RECOVERED = "stages/recovered/"
ROUNDS_AFTER = 10  # rounds on either side of a loss whose mean rewards are compared
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
        return type(text)(_PEER.sub(lambda found: self.called(found[1]), text))

    @property
    def holders(self) -> tuple[str, ...]:
        """Peer ids by stage; empty before the first plan."""
        plan = self.stage_transport.plan
        return () if plan is None else tuple(seat.peer for seat in plan.assignments)

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


@dataclass
class Aftermath:
    """Sentences of the leader about losses: which peer holds a stage now, and how the reward changed.

    A stage is lost, or passes to another peer; the crew is whole again, and that is said. `ROUNDS_AFTER` rounds later
    the mean rewards before and after the loss are compared."""

    status_text: StatusText
    say: Callable[[str], None]
    _rewards: list[float] = field(default_factory=list)
    _waiting: list[tuple[int, float, int | None, str]] = field(default_factory=list)
    """(round after which it is said, reward before, what was lost)"""
    _losses: float = 0.0  # stages lost until the crew was last whole
    _holders: tuple[str, ...] = ()  # holders of the stages then

    @property
    def reward(self) -> float:
        """Mean over the last rounds; 0 before the first."""
        return fmean(self._rewards[-ROUNDS_AFTER:]) if self._rewards else 0.0

    def note_holders(self) -> None:
        """This node begins to lead."""
        self._holders = self.status_text.holders

    def begin(self, progress: Progress) -> None:
        """This node leads a whole crew. `progress`: as the leader before left it."""
        if self._any_lost():
            self._lost(f"the leader of crew {self.status_text.crew} was lost", progress)

    def mended(self, lost: StageLost, seconds: float, progress: Progress) -> None:
        """The crew is whole again: say what was lost, and which peer has it now."""
        text, before = self.status_text, self._holders
        holders = self._holders = text.holders
        passed = [stage for stage, peer in enumerate(holders) if peer != before[stage]]
        if self._any_lost():
            back = passed or sorted(lost.stages)
            stages = ", ".join(map(str, back))
            by = ", ".join(dict.fromkeys(text.called(holders[stage]) for stage in back))
            self.say(f"stage {stages} is back after {seconds:.1f} s, held by {by}")
            self._lost(f"stage {stages} was lost", progress)
        elif passed:
            self.say("; ".join(f"stage {stage} passed to {text.called(holders[stage])}" for stage in passed))
        else:
            self.say(Warned(text.named(f"crew {text.crew} does a step again: {lost.why}")))

    def round_over(self, round: int, reward: float) -> None:
        """A round has ended: compare the rewards around losses that are long enough ago."""
        self._rewards.append(reward)
        del self._rewards[:-ROUNDS_AFTER]
        for told in [one for one in self._waiting if one[0] <= round]:
            _, before, rounds, what = told
            when = "before" if rounds is None else f"in the {rounds} rounds before"
            self.say(f"reward {before:.3f} {when} {what}, {self.reward:.3f} in the {ROUNDS_AFTER} after")
            self._waiting.remove(told)

    def _any_lost(self) -> bool:
        """Whether any stage was lost since this was last asked."""
        before, self._losses = self._losses, self.status_text.stage_transport.metrics().get("stages/lost", 0.0)
        return self._losses > before

    def _lost(self, what: str, progress: Progress) -> None:
        before, rounds = (self.reward, len(self._rewards)) if self._rewards else (progress.reward, None)
        self._waiting.append((progress.round + ROUNDS_AFTER, before, rounds, what))
