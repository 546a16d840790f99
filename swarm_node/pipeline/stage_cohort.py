"""Average one stage with the same stage of other crews.

    stage 0        `Node.average` steps between rounds, at the crew's leader
    other stages   `StageCohort`, at the peer that holds one: it joins when the stage comes, steps right after each
                   update that the leader ordered, and leaves with the stage

A stage's cohort is every peer, of any crew, that holds the same stage of a policy that began alike. One peer averages
one stage: the first of those that it holds. A matrix that is embedding and head at once is averaged at the first
stage; the leader then sends it to the last one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

from torch import Tensor

from protocol.transports.base import Transport
from swarm_node.averaging import Averager, LateJoin
from swarm_node.averaging.cohort import join_cohort, leave_cohort
from swarm_node.config import AveragingConfig

if TYPE_CHECKING:
    from swarm_node.grpo.optimizer import Optimizer
    from swarm_node.pipeline.compute.worker import Worker
    from swarm_node.pipeline.recovery.held_stages import HeldStages

LOOK_S = 0.5
"""Longest between two looks whether others' weights have arrived, where training waits for them."""


MOST_S = 10.0
"""A stage that waits for others' weights deals with no message, and its crew waits for it: no longer than this, and
well below the time after which the crew would give it up. What arrives later is applied later, as with `overlap`."""


def averaged(worker: Worker) -> dict[str, Tensor]:
    """The live weights of a stage that are averaged: all, but a matrix that two stages hold only at the first."""
    weights = worker.optimizer.weights()
    if worker.index > 0 and worker.tied_name is not None:
        del weights[worker.tied_name]
    return weights


class StageCohort:
    """Averages the first stage that this peer holds, stage 0 apart, which is its lead's to average."""

    def __init__(
        self,
        config: AveragingConfig,
        swarm: str,
        period_s: float,
        held_stages: HeldStages,
        transport: Transport,
        say: Callable[[str], None],
        now: Callable[[], float] = time.time,
        most_s: float = MOST_S,
    ) -> None:
        """`most_s`: training waits no longer for others' weights."""
        self.config = config
        self._most_s = most_s
        self.stage: int | None = None
        self.late_join: LateJoin | None = None
        self._swarm = swarm
        self._period_s = period_s
        self._held_stages = held_stages
        self._transport = transport
        self._say = say
        self._now = now
        self._optimizer: Optimizer | None = None
        self._updates = 0
        self._said = False

    @property
    def averager(self) -> Averager | None:
        return None if self.late_join is None else self.late_join.averager

    @property
    def id(self) -> str:
        """For the membership card; empty = none."""
        averager = self.averager
        return "" if averager is None else averager.place.cohort

    def look(self) -> None:
        """A stage may have come or gone: be in the cohort of the first there is now."""
        if self.config.method == "none":
            return
        held = sorted(stage for stage in self._held_stages.workers if stage > 0)
        if not held:
            self.leave()
            return
        self.say_which(held)
        optimizer = self._held_stages.optimizer(held[0])
        if optimizer is not self._optimizer:  # another stage, or this one built anew
            self.leave()
            self._join(held[0], optimizer)

    def say_which(self, held: list[int]) -> None:
        """Once, if this peer holds several stages."""
        if len(held) > 1 and not self._said and self.config.method != "none":
            self._said = True
            rest = ", ".join(map(str, held[1:]))
            self._say(f"of the stages held here, {held[0]} is averaged with other crews, {rest} not")

    def leave(self) -> None:
        """Be in no cohort: whoever calls is refused."""
        if self._optimizer is not None:
            self._optimizer.updating = nullcontext
            self.stage = self.late_join = self._optimizer = None
            leave_cohort(self._transport)

    def _join(self, stage: int, optimizer: Optimizer) -> None:
        worker = self._held_stages.workers[stage]
        weights = averaged(worker)

        def probe() -> float | None:
            """A stage alone says nothing of its answers; but nobody can go on with what is not finite."""
            return None if all(bool(weight.isfinite().all()) for weight in weights.values()) else math.nan

        self.late_join = join_cohort(
            self.config,
            self._swarm,
            self._period_s,
            self._held_stages.start_of(worker),
            weights,
            self._transport,
            self._now,
            self._say,
            optimizer.publish,
            probe,
            f"stage {stage}",
        )
        self.stage, self._optimizer, self._updates = stage, optimizer, worker.updates
        self.late_join.version = worker.updates
        optimizer.updating = self.late_join.averager.changing
        if self.config.late_join and not worker.updates:
            self.late_join.seek()

    def step(self) -> None:
        """If the stage has made an update since: before any other message is dealt with, apply what others' weights did
        to it, and begin what is due."""
        late_join = self.late_join
        if late_join is None or self.stage is None or self._held_stages.workers[self.stage].updates == self._updates:
            return
        self._updates = updates = self._held_stages.workers[self.stage].updates
        averager = late_join.averager
        fetched = late_join.step(updates)
        if fetched is not None:
            who = averager.roster.called(fetched.peer)
            self._say(f"stage {self.stage} goes on with the weights of {who}, version {fetched.version}")
        averager.step(updates)
        until = time.monotonic() + self._most_s
        while averager.waiting() and (left := until - time.monotonic()) > 0:
            averager.woken.wait(min(left, LOOK_S))
            averager.woken.clear()
            averager.step(updates)
