"""What people see of a run while it goes: the terminal, events.jsonl, `/healthz`.

sentences --> Screen.say --> progress (terminal) + events.jsonl
rounds    --> Screen.progress, Screen.health
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack

from swarm_node.config import NodeConfig
from swarm_node.observability.health import Health, serving
from swarm_node.observability.metrics import EventLog
from swarm_node.observability.progress import Progress
from swarm_node.storage.rundir import RunDir, goes_with_container

PASSING = {"start", "estimate", "link", "completion"}
"""Kinds of sentences that need not stay in view."""


class Screen:
    """What people see of a run, and events.jsonl."""

    def __init__(self, config: NodeConfig, run: RunDir, json_output: bool, stack: ExitStack) -> None:
        self.progress = Progress(config.total_rounds, config.minutes, json_output)
        self.events = EventLog(run.events, self.progress.say)
        stack.callback(self.events.close)
        self.health = Health()
        listen, port = config.health.listen, config.health.port
        if port:
            stack.enter_context(serving(self.health, listen, port, config.health.hosts))
        stack.enter_context(run.answering(listen, port))
        self._saying = threading.Lock()
        if goes_with_container(run.path):
            self.say(f"no volume: {run.path} goes when this container goes; mount one there (docker run -v NAME:DIR)")

    def following(self, follow: Callable[[Callable[[int, float], None]], bool]) -> bool:
        """`follow`, showing the rounds of the lead that it tells of."""
        began = False

        def show(round: int, reward: float) -> None:
            nonlocal began
            if not began:
                began = True
                self.progress.start(round)
            self.progress.update(round, {"reward": reward})
            self.health.write(round, {"reward": reward})

        try:
            return follow(show)
        finally:
            if began:
                self.progress.stop()

    def leave(self, text: str) -> None:
        """A signal or a notice has come: say so, and train no more."""
        self.health.leaving = True
        self.say(text, "stop")

    def say(self, text: str, kind: str = "note") -> None:
        """One sentence to the screen and to events.jsonl."""
        with self._saying:  # the network's thread has things to say as well
            self.progress.say(text, lasting=kind not in PASSING)
            self.events.write(kind, text)
