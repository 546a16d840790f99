r"""The display of a node while it runs: the terminal or JSON lines, events.jsonl, `/healthz`.

    sentences --> logger "swarm_node" --> terminal: the sentence --> standard output or error
                                     \    elsewhere: time, level and sentence, or one JSON object a line
                                      \-> events.jsonl
    rounds    --> Console.progress, Console.health

Any module may say a sentence: `logging.getLogger(__name__).info(sentence)`, with `extra={"kind": KIND}` if it is not a
plain note. Levels are `info`, `warning` (something failed or was lost, and the node goes on) and `error` (the run ends
by it). Code that several nodes of one process share, such as a crew in a test, takes a `Say` instead, because the
logger belongs to the process.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from swarm_node.config import NodeConfig
from swarm_node.errors import SwarmNodeError
from swarm_node.observability.health import Health, serving
from swarm_node.observability.lines import LEVELS, Lasting, Show, json_line, shown_as_lines
from swarm_node.observability.metrics import EventLog
from swarm_node.observability.progress import ProgressDisplay
from swarm_node.observability.usage import UsageSampler
from swarm_node.say import Warned, is_shown, level_of
from swarm_node.storage.room import free_bytes
from swarm_node.storage.rundir import RunDir, goes_with_container
from swarm_protocol.errors import printable

LOGGER = logging.getLogger("swarm_node")
PASSING = {"start", "legend", "estimate", "link", "join", "completion"}  # kinds of sentences that need not stay in view


def say(text: str, kind: str = "note") -> None:
    """Say one sentence, from any thread. A `Warned` one has the level `warning`, a `Detail` the level `debug`."""
    LOGGER.log(level_of(text), "%s", text, extra={"kind": kind})


def open_log(run: RunDir, show: Show, stack: ExitStack) -> EventLog:
    """Show sentences that are logged below "swarm_node", and append them to events.jsonl, until the stack is closed.
    The error that closes it is the last of them. What is shown depends on the level that the logger has now: `info`
    and above unless it is set. The file gets all."""
    events = EventLog(run.events, lambda text: show(text, "note", "warning"))
    stack.callback(events.close)
    handler = _Handler(show, events, LOGGER.level or logging.INFO)
    stack.callback(setattr, LOGGER, "propagate", LOGGER.propagate)
    stack.callback(LOGGER.setLevel, LOGGER.level)
    stack.callback(LOGGER.removeHandler, handler)
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.DEBUG)
    LOGGER.propagate = False  # a library that logs to the terminal must not say everything twice
    stack.push(_say_error)
    return events


def _say_error(kind: object, error: BaseException | None, trace: object) -> None:
    """Say the error that ends a run."""
    if isinstance(error, SwarmNodeError):
        error.logged = True
        LOGGER.error("%s", printable(str(error)), extra={"kind": "error"})


def open_health(config: NodeConfig, health: Health, run: RunDir, stack: ExitStack) -> Health:
    """Answer `/healthz` and `/metrics` until the stack is closed. Raises UserError."""
    health.measures["disk_free_bytes"] = partial(free_bytes, run.path)
    listen, port = config.health.listen, config.health.port
    if port:
        stack.enter_context(serving(health, listen, port, config.health.hosts))
    stack.enter_context(run.answering(listen, port))
    return health


class Console:
    """The display of a run, and events.jsonl."""

    def __init__(
        self,
        config: NodeConfig,
        run: RunDir,
        json_output: bool,
        stack: ExitStack,
        quiet: bool = False,
        health: Health | None = None,
    ) -> None:
        """`json_output`: standard output is for the final JSON document alone. `quiet`: nothing is shown. `health`:
        what answers at the node's port already; it is opened here without. Raises UserError."""
        self.json_output = json_output
        self._as_json = config.log_format == "json" and not quiet
        name, stream = config.name or run.path.resolve().name, sys.stderr if json_output else sys.stdout
        self._name, self._stream = name, stream
        lines = _nowhere if quiet else shown_as_lines(config.log_format, name, stream)
        line = None if lines is None else partial(lines, kind="progress", level="info")
        self.progress = ProgressDisplay(config.total_rounds, config.minutes, json_output, line=line)
        self.usage = UsageSampler(run.path)
        self.progress.usage = self.usage.words
        self.progress.quiet = not is_shown(logging.INFO)
        self.events = open_log(run, lines or self._show, stack)
        self.health = health or open_health(config, Health(), run, stack)
        self.health.measures["until_end_seconds"] = lambda: self.progress.left_s
        if goes_with_container(run.path):
            say(
                Warned(
                    f"{run.path} is inside the container and will be deleted with it; mount a volume there "
                    "(docker run -v NAME:DIR)"
                )
            )

    def _show(self, text: str, kind: str, level: str) -> None:
        if level != "error":  # the command line shows that one below all others
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

    def tell_as_json(self, text: str, summary: Mapping[str, Any]) -> bool:
        """Show the summary of the run as one JSON line, if that is the format of the log. Returns whether it is."""
        if self._as_json:
            lasting = Lasting(self._stream)
            lasting.write(json_line(self._name, text, "summary", "info", summary=summary))
            lasting.flush()
        return self._as_json

    def leave(self, text: str) -> None:
        """Say that a signal or a notice has come; /healthz answers from now on that the node leaves."""
        self.health.leaving = True
        say(text, "stop")


def _nowhere(text: str, kind: str, level: str) -> None:
    """Show nothing."""


class _Handler(logging.Handler):
    """Shows one sentence at a time, and appends it to events.jsonl."""

    def __init__(self, show: Show, events: EventLog, least: int) -> None:
        """`least`: the level from which sentences are shown."""
        super().__init__()
        self._show = show
        self._events = events
        self._least = least

    def emit(self, record: logging.LogRecord) -> None:
        text, kind = record.getMessage(), getattr(record, "kind", "note")
        if record.levelno >= self._least:
            self._show(text, kind, LEVELS.get(record.levelno, "error"))
        self._events.write(kind, text)
