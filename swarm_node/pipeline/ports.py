"""What stages say to each other, and what they know of whatever carries it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from swarm_node.errors import Interrupted

if TYPE_CHECKING:
    from torch import Tensor

    from protocol.pipeline import Head


@dataclass(frozen=True)
class Message:
    """From one stage to another, or from the lead (which holds stage 0) to a stage and back."""

    stage: int
    """To whom: a stage's number; `LEAD` for the loop that drives them all."""
    head: Head
    tensors: tuple[Tensor, ...] = ()


LEAD = -1


class StageLost(Interrupted):
    """Stages have gone, or are given up; what was under way is to be done again once they are rebuilt. No stages =
    only messages are lost."""

    def __init__(self, stages: Collection[int], why: str) -> None:
        lost = f"stage {', '.join(map(str, sorted(stages)))}" if stages else "messages"
        super().__init__(f"{lost} lost: {why}")
        self.stages = frozenset(stages)
        self.why = why


class Refused(StageLost):
    """A stage takes no message of what is under way; no stage is lost. Doing it again may not help."""

    def __init__(self, stage: int) -> None:
        super().__init__((), f"stage {stage} refuses what it is sent")


class MessageTransport(Protocol):
    """The other stages of a crew, wherever they are."""

    @property
    def count(self) -> int:
        """Stages of the crew."""

    def send(self, message: Message) -> None:
        """To whoever holds that stage, in order; never waits. Raises StageLost if nobody does."""

    def receive(self, timeout: float) -> Message | None:
        """The next message for a stage held here, or for the lead if that is here; `None` if none comes in time.
        Raises StageLost, at the lead only, if a stage has gone since the pipeline was last whole."""


class SliceOptimizer(Protocol):
    """Updates the trained parameters of one stage."""

    updates: int

    def zero_grad(self) -> None: ...

    def squares(self, leave_out: Sequence[str] = ()) -> float:
        """Sum of the squares of its gradient, but for the parameters named."""

    def apply(self, scale: float, rate: float) -> None:
        """One update with the gradient times `scale` at learning rate `rate`; the gradient is gone afterwards."""

    def renew(self, name: str, value: Tensor, keep: bool = False) -> None:
        """Give a parameter another value, and forget its moments, unless they are to be kept."""
