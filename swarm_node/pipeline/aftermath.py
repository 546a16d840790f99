"""Sentences of the leader about losses: which peer holds a stage now, and how the reward changed.

A stage is lost, or passes to another peer; the crew is whole again, and that is said. `ROUNDS_AFTER` rounds later the
mean rewards before and after the loss are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean

from protocol.crew import Progress
from swarm_node.pipeline.messages import StageLost
from swarm_node.pipeline.status_text import StatusText

ROUNDS_AFTER = 10  # rounds on either side of a loss whose mean rewards are compared


@dataclass
class Aftermath:
    """Losses of the crew that this node leads."""

    status_text: StatusText
    say: Callable[[str], None]
    _rewards: list[float] = field(default_factory=list)
    _waiting: list[tuple[int, float, str]] = field(default_factory=list)
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
            self.say(text.named(f"crew {text.crew} does a step again: {lost.why}"))

    def round_over(self, round: int, reward: float) -> None:
        """A round has ended: compare the rewards around losses that are long enough ago."""
        self._rewards.append(reward)
        del self._rewards[:-ROUNDS_AFTER]
        for after, before, what in [one for one in self._waiting if one[0] <= round]:
            self.say(
                f"reward {before:.3f} in the {ROUNDS_AFTER} rounds before {what}, {self.reward:.3f} in the "
                f"{ROUNDS_AFTER} after"
            )
            self._waiting.remove((after, before, what))

    def _any_lost(self) -> bool:
        """Whether any stage was lost since this was last asked."""
        before, self._losses = self._losses, self.status_text.losses
        return self._losses > before

    def _lost(self, what: str, progress: Progress) -> None:
        before = self.reward if self._rewards else progress.reward
        self._waiting.append((progress.round + ROUNDS_AFTER, before, what))
