"""Average one stage with the same stage of other crews.

    stage 0        at the crew's leader, in `Node.average` between rounds
    other stages   at their holders, in `StageCohort`: it joins when a stage comes, steps right after each update that
                   the leader orders, and leaves with the stage

The cohort of a stage is all peers, of any crew, that hold the same stage of a policy with the same start. A peer
averages one stage, the first of those that it holds. A matrix that is embedding and head at once is averaged at the
first stage; the leader then has it sent to the last one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass

from swarm_node.averaging.averager import Averager
from swarm_node.averaging.cohort import join_cohort, leave_cohort
from swarm_node.averaging.cohort_weights import LateJoin
from swarm_node.config import AveragingConfig
from swarm_node.grpo.optimizer import Optimizer
from swarm_node.pipeline.recovery.held_stages import HeldStages
from swarm_protocol.transports.base import Transport

ARRIVAL_LOOK_S = 0.5
"""Longest time between two looks whether others' weights have arrived, where training waits for them."""
MOST_S = 10.0
"""Longest wait for others' weights. Meanwhile the stage deals with no message and its crew waits, so this must be well
below the time after which the crew gives the stage up. Weights that arrive later are applied later."""


@dataclass
class StageCohort:
    """Averages the first stage other than stage 0 that this peer holds."""

    config: AveragingConfig
    swarm: str
    period_s: float  # of the swarm's outer rounds
    held_stages: HeldStages
    transport: Transport
    say: Callable[[str], None]
    now: Callable[[], float] = time.time
    most_s: float = MOST_S  # longest wait for others' weights
    absent: Callable[[], Collection[str]] = tuple  # returns peers of the crew that are known to be gone
    stage: int | None = None
    late_join: LateJoin | None = None
    _optimizer: Optimizer | None = None
    _updates: int = 0
    _said: bool = False

    @property
    def averager(self) -> Averager | None:
        return None if self.late_join is None else self.late_join.averager

    @property
    def id(self) -> str:
        """Id of the cohort, for the membership card; empty = none."""
        averager = self.averager
        return "" if averager is None else averager.place.cohort

    def look(self) -> None:
        """Join the cohort of the first stage that is held now, since stages may have come or gone."""
        if self.config.method == "none":
            return
        held = sorted(stage for stage in self.held_stages.workers if stage > 0)
        if not held:
            self.leave()
            return
        self.say_which(held)
        optimizer = self.held_stages.workers[held[0]].optimizer
        if optimizer is not self._optimizer:  # another stage, or the same one after it was rebuilt
            self.leave()
            self._join(held[0], optimizer)

    def say_which(self, held: list[int]) -> None:
        """Say once which stage is averaged, if this peer holds several."""
        if len(held) > 1 and not self._said and self.config.method != "none":
            self._said = True
            rest = ", ".join(map(str, held[1:]))
            self.say(f"this node averages stage {held[0]} with other crews, but not stage {rest}")

    def leave(self) -> None:
        """Leave the cohort: requests of other peers are refused from now on."""
        if self._optimizer is not None:
            self._optimizer.updating = nullcontext
            self.stage = self.late_join = self._optimizer = None
            leave_cohort(self.transport)

    def _join(self, stage: int, optimizer: Optimizer) -> None:
        worker = self.held_stages.workers[stage]
        weights = worker.averaged()

        def probe() -> float | None:
            """A single stage gives no answers to compare, but its weights must be finite."""
            return None if all(bool(weight.isfinite().all()) for weight in weights.values()) else math.nan

        self.late_join = join_cohort(
            self.config,
            self.swarm,
            self.period_s,
            self.held_stages.start_of(worker),
            weights,
            self.transport,
            self.now,
            self.say,
            optimizer.publish,
            probe,
            f"stage {stage}",
        )
        self.late_join.averager.absent = self.absent
        self.stage, self._optimizer, self._updates = stage, optimizer, worker.updates
        self.late_join.version = worker.updates
        optimizer.updating = self.late_join.averager.changing
        if self.config.late_join and not worker.updates:
            self.late_join.seek()

    def step(self) -> None:
        """After an update of the stage, before the next message: apply others' weights, and begin a due exchange."""
        late_join = self.late_join
        if late_join is None or self.stage is None or self.held_stages.workers[self.stage].updates == self._updates:
            return
        self._updates = updates = self.held_stages.workers[self.stage].updates
        averager = late_join.averager
        fetched = late_join.step(updates)
        if fetched is not None:
            who = averager.roster.called(fetched.peer)
            self.say(f"stage {self.stage} goes on with the weights of {who}, version {fetched.version}")
        averager.step(updates)
        until = time.monotonic() + self.most_s
        while averager.waiting() and (left := until - time.monotonic()) > 0:
            averager.woken.wait(min(left, ARRIVAL_LOOK_S))
            averager.woken.clear()
            averager.step(updates)
