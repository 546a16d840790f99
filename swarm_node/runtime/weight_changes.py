"""When a run changes its weights, and where a signal may come meanwhile."""

from __future__ import annotations

from swarm_node.errors import UserError
from swarm_node.node import Node
from swarm_node.runtime.drain import WEIGHTS_CHECK_S
from swarm_node.runtime.shutdown import Stopper

REST_S = 3.0  # rest of a round that a signal waits for: well below the time until the last resort


class WeightChanges:
    """Updates and averages of one run; between them the weights are those of a finished round."""

    def __init__(self, node: Node, stop: Stopper, alone: bool) -> None:
        """`alone`: no crew holds the weights."""
        self._node = node
        self._stop = stop
        self._alone = alone
        self.unfinished = False
        """Whether the weights are those of an unfinished round: no checkpoint may have them."""

    def begin(self) -> None:
        """Mark the weights as those of an unfinished round, until it ends; a crew's weights are not in these
        checkpoints. Raises StopRequested if it was raised before and swallowed."""
        if self._stop.hold():
            self._stop.check()
        self.unfinished = self._alone

    def go_on(self, seconds: float) -> None:
        """Let a signal end the round here if its other updates take longer than REST_S. It waits for a shorter rest,
        since only a whole round can be repeated bit for bit. A crew's update is not given up halfway. Raises
        StopRequested."""
        if seconds > REST_S:
            (self._stop.allow if self._alone else self._stop.check)()

    def average(self) -> None:
        """Exchange weights with the cohort. A signal may come while it waits for others, not while weights change."""
        averager = self._node.averager
        if averager is None:
            return
        while True:
            self._stop.hold()
            averager.woken.clear()
            self.unfinished = True
            try:
                again = self._node.average()
            except UserError:  # of the user's own reducer, before anything has changed
                self.unfinished = False
                raise
            self.unfinished = False
            if not again:
                return
            self._stop.allow()
            averager.woken.wait(WEIGHTS_CHECK_S)
