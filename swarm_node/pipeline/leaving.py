"""How a node leaves its crew so that nothing is lost: others keep its stages, and files have them."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass

from swarm_node.errors import StopRequested
from swarm_node.pipeline.assemble import CrewParts
from swarm_node.pipeline.compute.worker import attend
from swarm_node.say import Warned
from swarm_node.types import Stop
from swarm_protocol.crew import Progress

LAST_WORD_S = 5.0  # the leader waits so long until the others have heard that the run is over, and have left
LAST_WORD_LOOK_S = 0.05  # time between two looks whether they have
GATHER_S = 20.0
"""A leaving node waits so long until others have its stages, and a leader so long for the weights of theirs. With a
notice the former takes as long as is left, ..."""
SAVE_S = 4.0  # ... except for this time, in which this node and those that it has started save what they hold.
SETTLE_S = 1.0  # a leaving node waits so long for an update that the others may be making already


@dataclass
class Leaving:
    """The end of this node's part in its crew."""

    parts: CrewParts
    leads: Callable[[], bool]  # whether this node leads, or is about to
    after_update: Callable[[], None]  # is called when stages may have changed
    begun: bool = False  # this node leaves: it takes no stage of another peer any more
    complete: bool = False  # the run directory has, or will have, the newest weights of all stages

    def drain(self, stop: Stop) -> None:
        """Have other peers keep the stages of this node, as they are after the last update, if the crew may go on."""
        parts, held_stages = self.parts, self.parts.held_stages
        if self.begun:
            return
        self.begun = True
        if not self.leads():
            self._settle()
        for stage in held_stages.workers:
            held_stages.save(stage)
        plan = parts.stage_transport.plan
        if plan is None or parts.over or not parts.join_command.open:
            return
        until = time.monotonic() + GATHER_S

        def left_s() -> float:
            told = stop.left_s
            return until - time.monotonic() if math.isinf(told) else told - SAVE_S

        for stage, (peer, why) in sorted(held_stages.hand_over(plan, left_s).items()):
            if peer:
                parts.say(f"{parts.status_text.called(peer)} keeps stage {stage} for the node that holds it next")
            else:
                parts.say(Warned(parts.status_text.named(f"only {parts.run.path} keeps stage {stage} ({why})")))

    def _settle(self) -> None:
        """Make the update that the others may be making already."""
        parts, workers = self.parts, self.parts.held_stages.workers
        until = time.monotonic() + SETTLE_S
        while any(worker.midway for worker in workers.values()):
            message = parts.stage_transport.receive(until - time.monotonic())
            if message is None:
                return
            attend(message, workers, parts.stage_transport.send, parts.count_refusal)
            self.after_update()

    def gather(self, stop: Stop) -> None:
        """At the leader: fetch the weights of the other stages, so that its directory has the whole policy.

        After a signal there is little time for it; a signal that comes meanwhile ends it."""
        parts, held_stages = self.parts, self.parts.held_stages
        plan = parts.stage_transport.plan
        if plan is None or not held_stages.updates:
            return
        for stage in held_stages.workers:
            held_stages.save(stage)
        self.complete = len(held_stages.workers) == len(plan.assignments)
        if self.complete:
            return
        parts.say("fetching the weights of the other stages, so that the policy can be exported here")
        try:
            if not stop.requested:
                stop.allow()
            missing = held_stages.gather(plan, max(0.0, min(GATHER_S, stop.left_s - SAVE_S)))
            stop.hold()
        except StopRequested:
            parts.say(
                Warned("stopping without the weights of all stages: the run directories of their holders have them")
            )
            return
        self.complete = not missing
        for stage, why in sorted(missing.items()):
            parts.say(
                Warned(f"stage {stage} stays with its holder ({why}): `swarm-node export` takes both run directories")
            )
        if self.complete:
            run = shlex.quote(str(parts.run.path))
            parts.say(f"the weights of all stages are here: `swarm-node export {run} DIR` makes a model of them")

    def announce_end(self, progress: Progress) -> None:
        """At the leader: all rounds are done, so the others need not wait for another leader."""
        transport = self.parts.stage_transport
        transport.tell(Progress(progress.round, progress.reward, over=True))
        until = time.monotonic() + LAST_WORD_S
        while transport.connected and time.monotonic() < until:
            time.sleep(LAST_WORD_LOOK_S)

    def close(self, stop: Stop) -> None:
        """Drain, write everything that is held here to disk, and leave the crew."""
        parts = self.parts
        try:
            self.drain(stop)
        finally:
            plan = parts.stage_transport.plan
            if plan is not None and not parts.stage_transport.whole:
                for stage, updates in parts.held_stages.save_copies(plan).items():
                    parts.say(f"the copy of stage {stage} after update {updates} is saved in {parts.run.path} as well")
            parts.held_stages.save_all()
            parts.stage_transport.close()
