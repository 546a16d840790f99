"""A node in a crew: holds stages of a policy that several peers hold together, and leads them if it has the first.

    CrewParts -> StageTransport (who holds what) --orders--> HeldStages (stages come and go)
                          |                                   |
                          | messages                          v
                          +----------------------> Worker.handle -> answers     until the run is over
                          |
                          +-- holds stage 0 --> Run: the usual rounds, with StagedPolicy and Driver

The leader runs the node's own loop; all others answer messages. A node that leads no more, because another leader
stands higher, goes back to answering. The leader says what is lost, and how it came back.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from swarm_node.averaging.averager import Averager
from swarm_node.averaging.cohort import leave_cohort
from swarm_node.errors import SwarmNodeError, UserError
from swarm_node.pipeline.announcing import Announcer, LeaderSubscriptions
from swarm_node.pipeline.assemble import CrewParts
from swarm_node.pipeline.compute.worker import attend
from swarm_node.pipeline.driver import Driver
from swarm_node.pipeline.leaving import Leaving
from swarm_node.pipeline.membership.actions import BuildStage, DropStage, StartLeading, StopLeading
from swarm_node.pipeline.messages import StageLost
from swarm_node.pipeline.settings import crew_settings, with_crew_settings
from swarm_node.pipeline.stage_calls import StageCalls
from swarm_node.pipeline.staged_policy import StagedPolicy
from swarm_node.pipeline.status_text import Aftermath
from swarm_node.policy.architecture import is_windowed
from swarm_node.policy.loading import load_tokenizer
from swarm_node.types import Stop
from swarm_protocol.crew import Progress

ORDERS_WAIT_S = 0.5  # longest time between two looks at orders and messages
JOIN_COMMAND_SLACK_S = 5.0
"""People are told how to join so much later than `spare_wait_s`: a stage that neighbours can take is back by then."""
TURNS = 2**32  # passes and generations that a leader may count before its numbers would be those of the next leader


class Deposed(SwarmNodeError):
    """Another peer leads this crew now."""


class CrewNode:
    """This node's part in its crew."""

    def __init__(self, parts: CrewParts, stack: ExitStack) -> None:
        """The node's thread, which keeps time for the crew, ends with `stack`."""
        self.parts = parts
        self.config = parts.own  # configuration of this node, with the crew's settings once these are known
        self.settings = crew_settings(parts.own)  # the crew's settings, as far as this node knows
        self.say = parts.say
        self.stage_transport = parts.stage_transport
        self.held_stages = parts.held_stages
        self.subscriptions = LeaderSubscriptions(parts.transport)
        self.driver: Driver | None = None
        self.policy: StagedPolicy
        self.progress = Progress(parts.held_stages.checkpoints.round, 0.0)
        """Progress of the crew, as last heard or told, or as of the newest checkpoint here."""
        self._stop: Stop | None = None
        self._leads = False  # this node is to lead, by its orders
        self._updates: dict[int, int] = {}  # updates of the stages here, as last reported
        self._whole_since = math.inf  # when the crew was first whole, `time.monotonic`
        self._advised = False  # checkpoints are due, since this machine may well be taken back soon
        self._averaged = 0  # changes that others' weights made to stage 0 while this node led
        self._aftermath = Aftermath(parts.status_text, parts.say)
        self.leaving = Leaving(parts, lambda: self._leads or self.driver is not None, self._after_update)
        parts.leaving = lambda: self.leaving.begun or parts.over or bool(self._stop and self._stop.requested)
        self.announcer = Announcer(parts, lambda: self.driver is not None, self.status)
        self.announcer.start(stack)

    # ----------------------------------------------------------------- following

    def follow(self, stop: Stop, show: Callable[[int, float], None] = lambda round, reward: None) -> bool:
        """Answer messages until this node is to lead (True), or the run is over (False).

        `show` is called with each round that the leader has done, and its reward. StopRequested by a signal."""
        told, self._stop = "", stop
        while True:
            stop.check()
            if stop.advised:
                stop.advised, self._advised = False, True
            self._save_if_advised()
            self._carry_out_orders()
            if self._leads:
                self.parts.cohort.leave()
                self.announcer.announce()
                if self.minutes_over:
                    self.say(f"{self.config.minutes:g} minutes are over: somebody else has to lead the crew")
                    return False
                return True
            if self.stage_transport.whole and (whole := self.parts.status_text.whole()) != told:
                told = whole
                self._begin()
                self.say(whole)
            self.parts.cohort.look()
            self.announcer.announce()
            if self._heard_progress(show):
                return False
            message = self.stage_transport.receive(ORDERS_WAIT_S)
            if message is None:
                continue
            left = attend(message, self.held_stages.workers, self.stage_transport.send, self.parts.count_refusal)
            assert left is None, "only the leader is sent messages for the leader"
            self.parts.cohort.step()
            self._after_update()

    def _heard_progress(self, show: Callable[[int, float], None]) -> bool:
        """Take note of the progress that the leader told. Whether the run is over."""
        progress, plan = self.stage_transport.progress, self.stage_transport.plan
        if progress is None or progress == self.progress:
            return False
        self.progress = progress
        self.held_stages.checkpoints.round = progress.round
        if progress.over:
            self.say(f"the run of crew {self.config.pipeline.crew} is over after round {progress.round}")
            return True
        show(progress.round, progress.reward)
        if not self.held_stages.workers and plan is not None:
            self.held_stages.updated(plan)  # a stage that was kept for a leaving peer has another holder by now
        return False

    def _after_update(self) -> None:
        """Renew replicas and checkpoints, and tell the crew, if a stage here has made an update."""
        plan, checkpoints = self.stage_transport.plan, self.held_stages.checkpoints
        updates = {stage: worker.updates for stage, worker in self.held_stages.workers.items()}
        if updates != self._updates and plan is not None:
            if any(made > self._updates.get(stage, made) for stage, made in updates.items()):
                self.parts.run_settings.trained()
            self._updates = updates
            checkpoints.round = max(checkpoints.round, self.progress.round + (self.driver is None))
            self.held_stages.updated(plan)
            self.parts.report()
            self.announcer.announce()

    def _save_if_advised(self) -> None:
        """Write checkpoints of the stages here if they are due, as soon as the last ones are written."""
        if self._advised and self.held_stages.save_soon():
            self._advised = False
            self.parts.report()

    # ----------------------------------------------------------------- orders

    def _carry_out_orders(self) -> None:
        """Build and drop stages as ordered. Deposed if this node does not lead any more."""
        self._go_by_plan()
        for order in self.stage_transport.orders():
            self._go_by_plan()  # it may be a new one since; stages of another branch are written first
            match order:
                case StartLeading():
                    self._leads = True
                case StopLeading():
                    self._leads = False
                    if self.driver is not None:
                        raise Deposed("another peer leads this crew now")
                case DropStage(stage):
                    self.held_stages.leave(stage)
                case BuildStage():
                    self._build(order)
            self.parts.report()

    def _go_by_plan(self) -> None:
        """Take over the crew's settings, and its run, where they differ from this node's."""
        plan = self.stage_transport.plan
        if plan is None:
            return
        if plan.run != self.held_stages.checkpoints.run:
            if self.held_stages.go_to(plan.run):
                self.progress = Progress(0, 0.0)
            self.parts.report()
        if plan.settings == self.settings:
            return
        self.settings = plan.settings
        self.config, changed = with_crew_settings(self.parts.own, self.settings)
        self.parts.footprint.config, self.parts.footprint.reference = self.config, self.settings.reference
        self.held_stages.go_by(self.config, self.settings.reference)
        if changed:
            self.say(f"crew {self.config.pipeline.crew} goes by its leader's options: {', '.join(changed)}")

    def _build(self, order: BuildStage) -> None:
        plan = self.stage_transport.plan
        if plan is None or not self.stage_transport.stands(order):
            return
        try:
            taken = self.held_stages.take(order, plan.spans)
        except UserError as error:
            taken = str(error)
        if isinstance(taken, str):
            self.stage_transport.unable(order, taken)
        else:
            updates, source = taken
            self.stage_transport.seated(order, updates, source)
            self._updates = {}

    # ----------------------------------------------------------------- leading

    def take_lead(self, stop: Stop) -> None:
        """Wait until every stage is held: then there are `policy` and `driver`.

        Deposed if another peer leads, StopRequested by a signal."""
        began, self._stop = time.monotonic(), stop
        while not self.stage_transport.mend(ORDERS_WAIT_S):
            stop.check()
            self._carry_out_orders()
            self.announcer.announce()
            self._tell_how_to_join(began)
            if not self._leads:
                raise Deposed("another peer leads this crew now")
        config, plan = self.config, self.stage_transport.plan
        assert plan is not None
        calls = StageCalls(
            self.stage_transport,
            self.held_stages.workers,
            config.pipeline.wire,
            self.parts.count_refusal,
            config.pipeline.stall_s,
            plan.term * TURNS,
        )
        self.driver = driver = Driver(calls, self._mend, config.pipeline.swap, self.say)
        self._aftermath.note_holders()
        tokenizer = load_tokenizer(config.policy)
        longest_row = config.rollouts.max_prompt_tokens + config.rollouts.max_new_tokens
        self.policy = StagedPolicy(driver, tokenizer, config.policy, self.say, self.settings.microbatch)
        self.policy.packing = not is_windowed(self.parts.loading.config, longest_row)
        self.policy.start_digest = self.held_stages.starts[0]
        self.progress = self.stage_transport.progress or self.progress
        stop.allow()
        driver.updates = self.stage_transport.updates  # stage 0 may have been rebuilt, and know of none
        driver.despite_losses(lambda: driver.join_ends(averaged=False))
        driver.despite_losses(lambda: driver.agree(plan.run[-1][1]))  # what the run goes on from
        stop.hold()
        self.policy.version = driver.updates
        self._begin()
        self.say(f"{self.parts.status_text.whole()}; {driver.updates} updates so far")
        self._aftermath.begin(self.progress)

    def round_over(self, round: int, reward: float, averager: Averager | None) -> None:
        """At the leader, between two rounds: replicas and checkpoints are made; a stage may pass to another peer."""
        driver = self.driver
        assert driver is not None
        if averager is not None:
            self.parts.cohort.say_which(sorted(self.held_stages.workers))
            changes = averager.counts["exchanges"] + averager.replaced
            if changes != self._averaged:
                self._averaged = changes
                driver.despite_losses(lambda: driver.join_ends(averaged=True))
        self._aftermath.round_over(round, reward)
        self.progress = Progress(round, self._aftermath.reward)
        self.held_stages.checkpoints.round = round
        self.stage_transport.tell(self.progress)
        self._after_update()
        if self._stop is not None and self._stop.advised:  # the run resets it once it has saved as well
            self._advised = True
        self._save_if_advised()
        self.stage_transport.at_rest()

    def _mend(self, lost: StageLost) -> None:
        """Have lost stages rebuilt, here or elsewhere; returns when the crew is whole.

        Deposed if this node does not lead any more. StopRequested by a signal, also where training holds it: every
        stage is by itself."""
        began = time.monotonic()
        self.stage_transport.doubt(lost)
        while not self.stage_transport.mend(ORDERS_WAIT_S):
            if self._stop is not None:
                self._stop.check()
            self._carry_out_orders()
            self._tell_how_to_join(began)
        self._carry_out_orders()  # a stage that has passed to another peer is dropped
        self._aftermath.mended(lost, time.monotonic() - began, self.progress)

    def leave_lead(self) -> None:
        """Go back to answering; stage 0 is dropped with the policy that worked on it."""
        self.driver, self._leads = None, False
        self.__dict__.pop("policy", None)
        self.subscriptions.end()
        leave_cohort(self.parts.transport)

    # ----------------------------------------------------------------- what others read

    def metrics(self) -> dict[str, float]:
        """`stages/*` of the round that ends."""
        return ({} if self.driver is None else self.driver.calls.figures()) | self.stage_transport.metrics()

    def status(self) -> dict[str, Any]:
        """The crew's part of the status file. Usable from any thread."""
        return self.parts.status_text.status(self.held_stages, self.progress)

    def waiting(self) -> str:
        """A sentence about a missing stage; empty if none is, or the crew was never whole. From any thread."""
        return self.parts.status_text.missing() if self._whole_since < math.inf else ""

    def _tell_how_to_join(self, since: float) -> None:
        """Say how a peer can join if none has come for a stage."""
        formed = self.stage_transport.plan is not None
        if not formed or time.monotonic() >= since + self.config.pipeline.spare_wait_s + JOIN_COMMAND_SLACK_S:
            self.invite()

    def invite(self) -> None:
        """Say what to type on another machine, if that has not been said."""
        self.parts.join_command.tell(self._whole_since < math.inf, self.say)

    def _begin(self) -> None:
        """The crew is whole: from the first time on, minutes count."""
        self._whole_since = min(self._whole_since, time.monotonic())

    @property
    def minutes_over(self) -> bool:
        """This node has been in its crew for as long as it was told to."""
        minutes = self.config.minutes
        return minutes is not None and time.monotonic() - self._whole_since > 60 * minutes
