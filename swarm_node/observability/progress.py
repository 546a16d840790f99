"""How a run looks while it goes: a live bar on a terminal, plain lines otherwise.

On a terminal:

    round 120/200 ━━━━━━━━━━━━━━━━━━━━━━━━━╺━━━━━━━━━━━━━━━  60%  1:02 left
    reward 0.412 ▁▁▂▂▃▃▄▅▅▆▆▇▇█  2,310 tok/s

or, while it waits, what for instead of the speed; and, of a node that averages weights, a line `averaged 12 times, last
with bob`.

Plain, at each tenth of the run, but at least five seconds and at most a minute apart:

    round 120/200  reward 0.412  2,310 tok/s  0.78 s/round  1:02 left
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from statistics import fmean
from typing import TextIO

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

SMOOTHED = 10  # rounds behind the reward shown: one round's reward is mostly noise
SPEED_OVER = 32  # rounds behind seconds per round, so that the estimate follows a change
BAR_WIDTH = 40
SPARK_WIDTH = 24
BLOCKS = "▁▂▃▄▅▆▇█"
PLAIN_WIDTH = 200  # files and pipes have no width; only tables look at it
LEAST_S, MOST_S = 5.0, 60.0  # between plain lines


class Progress:
    """Shows one run. With `json_output` standard output stays silent and plain lines go to standard error."""

    def __init__(
        self,
        total_rounds: float,
        minutes: float | None = None,
        json_output: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream or (sys.stderr if json_output else sys.stdout)
        self._console = Console(file=self._stream, highlight=False, markup=False, emoji=False)
        self._live: Live | None = None
        self._on_terminal = self._stream.isatty() and not self._console.is_dumb_terminal and not json_output
        if not self._stream.isatty():
            self._console.width = PLAIN_WIDTH
        self._clock = clock
        self.waiting: Callable[[], str] = str
        """What the run waits for, in words; empty = it goes on. Asked whenever the live bar is drawn, on its thread."""
        self._total = total_rounds
        self._of = "" if math.isinf(total_rounds) else f"/{total_rounds}"
        self._limit_s = math.inf if minutes is None else minutes * 60
        self._round = 0
        self._rewards: list[float] = []
        self._tokens_per_s: float | None = None
        self._peers: float | None = None
        self._used: deque[float] = deque(maxlen=SPEED_OVER)
        self._averaged = ""
        self._started_at = 0.0
        self._ended: deque[float] = deque(maxlen=SPEED_OVER + 1)
        self._printed_round: int | None = None
        self._printed_at = -math.inf
        self._printed_tenth = 0

    def start(self, round: int = 0) -> None:
        """Begin, with `round` rounds already done (a resumed run)."""
        self._round = round
        self._started_at = self._clock()
        self._ended.append(self._started_at)
        if self._on_terminal:
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4)
            self._live.start()

    def update(self, round: int, metrics: Mapping[str, float | None], averaged: str = "") -> None:
        """`round` rounds are done and the last one measured `metrics` (`reward`, `perf/generated_tok_s`, `swarm/…`);
        `averaged` says what came of averaging, if this node averages."""
        self._round = round
        self._ended.append(self._clock())
        reward = metrics.get("reward")
        if reward is not None and math.isfinite(reward):
            self._rewards.append(reward)
        self._tokens_per_s = metrics.get("perf/generated_tok_s")
        self._peers = metrics.get("swarm/trainers")
        self._averaged = averaged
        self._used.append(metrics.get("swarm/groups_used") or 0.0)
        if not self._on_terminal and self._line_due():
            self._print_line()

    def say(self, text: str) -> None:
        """Print a line of its own, whole and at once; may be called from any thread."""
        if self._on_terminal:
            self._console.print(Text(text), soft_wrap=True)
        else:
            self._plain(text)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str | float]]) -> None:
        """Print a table: first column left, the others right, floats with three digits."""
        heading = Text(title, style="bold")
        table = Table(title=heading, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for number, column in enumerate(columns):
            table.add_column(Text(column), justify="right" if number else "left", no_wrap=True)
        for row in rows:
            table.add_row(*(Text(f"{cell:.3f}" if isinstance(cell, float) else str(cell)) for cell in row))
        with suppress(OSError):  # as in _plain
            self._console.print(table)
            self._stream.flush()

    def stop(self) -> None:
        """End, leaving the last state on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif not self._on_terminal and self._round != self._printed_round and len(self._ended) > 1:
            self._print_line()

    def _share(self) -> float:
        """How much of the run is done, in [0, 1], by rounds or by minutes, whichever ends it first."""
        elapsed = self._clock() - self._started_at
        return min(1.0, max(self._round / self._total, elapsed / self._limit_s))

    def _tenth(self) -> int:
        return int(10 * self._share() + 1e-9)

    def _line_due(self) -> bool:
        since = self._ended[-1] - self._printed_at
        if self._printed_round is None or self._round >= self._total or since >= MOST_S:
            return True
        return since >= LEAST_S and self._tenth() > self._printed_tenth

    def _print_line(self) -> None:
        self._printed_round, self._printed_at = self._round, self._ended[-1]
        self._printed_tenth = self._tenth()
        speed = f"{self._seconds_per_round():.2f} s/round"
        parts = [f"round {self._round}{self._of}", *self._numbers(), self._averaged, speed, self._time_left()]
        self._plain("  ".join(filter(None, parts)))

    def _plain(self, line: str) -> None:
        with suppress(OSError):  # the log's disk is full or its reader has gone: the run matters more
            print(line, file=self._stream, flush=True)

    def _render(self) -> Group:
        waiting = self.waiting()
        head = Table.grid(padding=(0, 1))
        width = max(1, min(BAR_WIDTH, self._console.width - 45))  # the rest of the line takes up to 45
        bar = ProgressBar(total=1.0, completed=self._share(), width=width)
        left = "" if waiting else self._time_left()
        head.add_row(f"round {self._round}{self._of}", bar, f"{self._share():4.0%}", left)
        parts = self._numbers(waiting)
        if parts and not self._console.options.ascii_only:
            parts[0] += " " + sparkline(self._rewards)
        lines = filter(None, ["  ".join(parts), self._averaged])
        return Group(head, *(Text(line, no_wrap=True, overflow="ellipsis") for line in lines))

    def _numbers(self, waiting: str = "") -> list[str]:
        numbers = [f"reward {fmean(self._rewards[-SMOOTHED:]):.3f}"] if self._rewards else []
        if waiting:  # other figures are of before that
            return [*numbers, waiting]
        if self._tokens_per_s is not None:
            numbers.append(f"{self._tokens_per_s:,.0f} tok/s")
        if self._peers is not None:
            others = "1 other" if self._peers == 1 else f"{self._peers:.0f} others"
            numbers.append(f"{others}, {fmean(self._used):.1f} of their groups a round")
        return numbers

    def _seconds_per_round(self) -> float:
        return (self._ended[-1] - self._ended[0]) / (len(self._ended) - 1)

    def _time_left(self) -> str:
        if self._round >= self._total:
            return f"took {_clock_face(self._ended[-1] - self._started_at)}"
        now = self._clock()
        left = self._limit_s - (now - self._started_at)
        if len(self._ended) > 1:
            since_last = now - self._ended[-1]
            left = min(left, (self._total - self._round) * self._seconds_per_round() - since_last)
        return "" if math.isinf(left) else f"{_clock_face(left)} left"


def _clock_face(seconds: float) -> str:
    """3725.0 -> 1:02:05"""
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def sparkline(values: Sequence[float], width: int = SPARK_WIDTH) -> str:
    """`values` as at most `width` blocks, each the mean of an equal share of them, from least to greatest."""
    count = min(width, len(values))
    edges = [len(values) * i // count for i in range(count + 1)] if count else []
    means = [fmean(values[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    if not means:
        return ""
    low, high = min(means), max(means)
    step = (high - low) / (len(BLOCKS) - 1) or 1.0
    return "".join(BLOCKS[round((mean - low) / step)] for mean in means)
