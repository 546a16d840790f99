r"""The display of a node while it runs: the terminal or JSON lines, events.jsonl, `/healthz`.

    sentences --> logger "swarm_node" --> terminal, or one JSON object a line --> standard output or error
                                     \--> events.jsonl
    rounds    --> Console.progress, Console.health

Any module may say a sentence: `logging.getLogger(__name__).info(sentence)`, with `extra={"kind": KIND}` if it is not a
plain note. Code that several nodes of one process share, such as a crew in a test, takes a `Say` instead, because the
logger belongs to the process.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import TextIO

from swarm_node.config import NodeConfig
from swarm_node.observability.health import Health, serving
from swarm_node.observability.metrics import EventLog
from swarm_node.observability.progress import Lasting, ProgressDisplay
from swarm_node.storage.rundir import RunDir, goes_with_container

LOGGER = logging.getLogger("swarm_node")
PASSING = {"start", "estimate", "link", "completion"}  # kinds of sentences that need not stay in view

Show = Callable[[str, str], None]  # (sentence, its kind)


def say(text: str, kind: str = "note") -> None:
    """Say one sentence, from any thread."""
    LOGGER.info("%s", text, extra={"kind": kind})


def shown_as_json(node: str, stream: TextIO) -> Show:
    """Show each sentence as one JSON object a line, with the time in UTC and the node's name."""
    lasting = Lasting(stream)

    def show(text: str, kind: str) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        lasting.write(json.dumps({"time": now, "node": node, "kind": kind, "message": text}) + "\n")
        lasting.flush()

    return show


def open_log(run: RunDir, show: Show, stack: ExitStack) -> EventLog:
    """Show sentences that are logged below "swarm_node", and append them to events.jsonl, until the stack is closed."""
    events = EventLog(run.events, lambda text: show(text, "note"))
    stack.callback(events.close)
    handler = _Handler(show, events)
    stack.callback(setattr, LOGGER, "propagate", LOGGER.propagate)
    stack.callback(LOGGER.setLevel, LOGGER.level)
    stack.callback(LOGGER.removeHandler, handler)
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False  # a library that logs to the terminal must not say everything twice
    return events


def open_health(config: NodeConfig, health: Health, run: RunDir, stack: ExitStack) -> None:
    """Answer `/healthz` and `/metrics` until the stack is closed. Raises UserError."""
    listen, port = config.health.listen, config.health.port
    if port:
        stack.enter_context(serving(health, listen, port, config.health.hosts))
    stack.enter_context(run.answering(listen, port))


class Console:
    """The display of a run, and events.jsonl."""

    def __init__(self, config: NodeConfig, run: RunDir, json_output: bool, stack: ExitStack) -> None:
        """`json_output`: standard output is for the final JSON document alone. Raises UserError."""
        self.json_output = json_output
        lines: Show | None = None
        if config.log_format == "json":
            lines = shown_as_json(config.name or run.path.resolve().name, sys.stderr if json_output else sys.stdout)
        self.progress = ProgressDisplay(
            config.total_rounds, config.minutes, json_output, line=lines and (lambda text: lines(text, "progress"))
        )
        self.events = open_log(run, lines or self._show, stack)
        self.health = Health()
        open_health(config, self.health, run, stack)
        if goes_with_container(run.path):
            say(
                f"{run.path} is inside the container and will be deleted with it; mount a volume there "
                "(docker run -v NAME:DIR)"
            )

    def _show(self, text: str, kind: str) -> None:
        self.progress.say(text, lasting=kind not in PASSING)

    def following(self, follow: Callable[[Callable[[int, float], None]], bool]) -> bool:
        """Call `follow`, and show the rounds that it reports: those of another node that leads this one's crew."""
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
        """Say that a signal or a notice has come; /healthz answers from now on that the node leaves."""
        self.health.leaving = True
        say(text, "stop")


class _Handler(logging.Handler):
    """Shows one sentence at a time, and appends it to events.jsonl."""

    def __init__(self, show: Show, events: EventLog) -> None:
        super().__init__()
        self._show = show
        self._events = events

    def emit(self, record: logging.LogRecord) -> None:
        text, kind = record.getMessage(), getattr(record, "kind", "note")
        self._show(text, kind)
        self._events.write(kind, text)
