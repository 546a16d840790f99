"""How a run looks while it goes: a few lines that stay on a terminal, plain lines otherwise.

On a terminal, below the sentences that have scrolled by:

    round 120/200 ━━━━━━━━━━━━━━━━━━━━━━━━━╺━━━━━━━━━━━━━━━  60% 1:02 left
    reward 0.203 -> 0.412 ▁▁▂▂▃▃▄▅▅▆▆▇▇█  held-out 0.381  samples 2,310 tokens/s
    3 others, 1 of the crew, 4.0 of their groups a round, 65% of what it learned from
    43 MB in, 32 MB out an hour, 2.1 MB in all  averaged 12 times, last with bob
    40 s ago: averaging: 2 of this node's cohort are here: alice, bob

Reward is the mean of the first and of the last tenth of all rounds, as in the summary; of fewer than 20 rounds, that
of the last one. While the run waits, the reason replaces the speed. A narrow terminal gets shorter words, never a
second line. A run that is alone has no lines about others.

Plain, at each tenth of the run, but at least five seconds apart, and at most a minute (after ten minutes, ten):

    round 120/200  reward 0.203 -> 0.412  samples 2,310 tokens/s  3 others, 4.0 of their groups a round  1:02 left
"""

from __future__ import annotations

import io
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import TextIO, cast

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from swarm_node.observability.cut_off import cut_off
from swarm_node.observability.lines import Lasting
from swarm_node.observability.tally import ENOUGH_ROUNDS, Buckets
from swarm_node.observability.worth import others_words
from swarm_node.observability.wrapping import wrapped
from swarm_node.say import own_command
from swarm_protocol.errors import printable, visible

SPEED_OVER = 32  # rounds behind seconds per round, so that the estimate follows a change
BAR_WIDTH = 40
SPARK_WIDTH = 24
LEAST_SPARK = 4
LEAST_SHARE = 0.1  # part of a round that reward functions take, from which on it is shown
BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = ".:-=+*#@"
TRAFFIC_OVER_S = 60.0  # traffic an hour is measured over so many seconds
RATE_AFTER_S = 120.0  # it is not told in the first seconds of a start, which send much to a node that is new
MAX_PLAIN = 140  # most characters of a plain line; a longer one leaves out the traffic
PLAIN_WIDTH = 200  # files and pipes have no width; only tables look at it
LINE_LEAST_S, LINE_MOST_S, LINE_LATER_S = 5.0, 60.0, 600.0
"""Time between plain lines: at least, at most in the first `EARLY_S` of a start, and at most later."""
EARLY_S = 600.0
LONG_S = 4 * 86400.0  # from so long on, a time is given in days


class ProgressDisplay:
    """Shows one run. With `json_output` standard output stays silent and plain lines go to standard error."""

    def __init__(
        self,
        total_rounds: float,
        minutes: float | None = None,
        json_output: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        width: int | None = None,
        line: Callable[[str], None] | None = None,
    ) -> None:
        """`width`: columns, instead of those of the terminal; `line`: takes plain lines, instead of `stream`."""
        stream = stream or (sys.stderr if json_output else sys.stdout)
        if isinstance(stream, io.TextIOWrapper):  # where it cannot show a character, that is no fault of a run
            stream.reconfigure(errors="backslashreplace")
        self._stream = cast(TextIO, Lasting(stream))
        tty = self._stream.isatty()
        width = width or (None if tty else PLAIN_WIDTH)
        self._console = Console(file=self._stream, width=width, highlight=False, markup=False, emoji=False)
        self._live: Live | None = None
        self._plain = line or (lambda text: print(text, file=self._stream, flush=True))
        self._as_lines = line is not None
        self._on_terminal = tty and not self._console.is_dumb_terminal and not json_output and line is None
        self.quiet = False  # whether rounds are not shown; sentences are
        self._clock = clock
        self.waiting: Callable[[], str] = str
        """Returns what the run waits for; empty = it goes on. Called on the thread that draws the live lines."""
        self.crew: Callable[[], int | None] = lambda: None
        """Returns how many others this node's crew has; None = there is no crew. Called as `waiting` is."""
        self.paused_s: Callable[[], float] = float
        """Returns the seconds so far in which the run was paused; its minutes exclude them. Called as `waiting` is."""
        self.usage: Callable[[], str] = str
        """Returns what the run takes from its machine; empty = not known yet. Called as `waiting` is."""
        self.hint = self.paused_hint = ""  # how to stop and to pause the run; how to stop and to unpause it
        self.spent_s = 0.0  # seconds of the minutes of the run that had passed before the first round
        self._total = total_rounds
        self._of = "" if math.isinf(total_rounds) else f"/{total_rounds}"
        self._limit_s = math.inf if minutes is None else minutes * 60
        self._round = 0
        self._metrics: Mapping[str, float | None] = {}  # of the last round
        self._rewards = Buckets()
        self._rewards_shown: list[float] = []  # means of equal parts of the rounds: Rich's thread reads them
        self._tenths: tuple[float, float] | None = None  # mean reward of the first and of the last tenth of the rounds
        self.held_out = "eval/pass_1"  # the metric that is shown as held-out figure
        self._held_out: float | None = None  # its latest value
        self._used: deque[float] = deque(maxlen=SPEED_OVER)
        self._met_others = False  # whether any other that trains was seen
        self._traffic: deque[tuple[float, float, float]] = deque()  # (when, total bytes in, total bytes out)
        self._averaged = ""
        self._last: tuple[float, str] | None = None  # (when, text) of the last sentence that stays in view
        self._started_at = self._updated_at = 0.0
        self._since = "so far"  # since when time and traffic are counted
        self._rounds_at: float | None = None
        """When the first round began, by `_now`: time before it is no part of the minutes either."""
        self._ended: deque[float] = deque(maxlen=SPEED_OVER + 1)  # when the last rounds ended, by `_now`
        self._printed_round: int | None = None
        self._printed_at = -math.inf
        self._printed_tenth = 0

    def start(self, round: int = 0, rewards: Buckets | None = None) -> None:
        """Begin, with `round` rounds already done in a resumed run, and a copy of their `rewards`."""
        self._rewards = rewards or Buckets()
        self._round, self._since = round, "in this start" if round else "so far"
        self._last = None  # preparations
        self._started_at = self._updated_at = self._clock()
        self._ended.append(self._now())
        self._rounds_at = None
        if self._on_terminal and not self.quiet:
            self._live = Live(get_renderable=self.view, console=self._console, refresh_per_second=4)
            self._live.start()

    def update(self, round: int, metrics: Mapping[str, float | None], averaged: str = "") -> None:
        """Show that `round` rounds are done, with the metrics of the last one (`reward`, `step_time`, `swarm/…`).
        `averaged` is a status text of averaging, if this node averages."""
        self._round, self._metrics = round, metrics
        now, took = self._now(), metrics.get("step_time")
        if self._rounds_at is None:
            self._rounds_at = self._ended[-1] if took is None else max(self._ended[-1], now - took)
            self._ended[-1] = self._rounds_at
        self._ended.append(now)
        self._updated_at = self._clock()
        self._held_out = metrics.get(self.held_out, self._held_out)
        self._rewards.add(metrics.get("reward"))
        self._rewards_shown, self._tenths = self._rewards.means(), self._rewards.tenths()
        self._averaged = averaged
        inward, outward = metrics.get("swarm/bytes_in"), metrics.get("swarm/bytes_out")
        if inward is not None and outward is not None:
            self._traffic.append((self._updated_at, inward, outward))
            while len(self._traffic) > 2 and self._traffic[1][0] <= self._updated_at - TRAFFIC_OVER_S:
                self._traffic.popleft()
        self._used.append(metrics.get("swarm/groups_used") or 0.0)
        self._met_others = self._met_others or bool(metrics.get("swarm/trainers"))
        if not self._on_terminal and self._line_due():
            self._print_line()

    def say(self, text: str, lasting: bool = True) -> None:
        """Print a line at once, from any thread. On a terminal it is broken between words, and the last `lasting` line
        stays in view."""
        if lasting:
            self._last = self._clock(), text
        self._print(text)

    def paragraphs(self, lines: Sequence[str], indent: int) -> None:
        """Print lines. A terminal breaks them between words, and indents the rest by `indent` columns."""
        for line in lines:
            self._print(line, indent)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str | float]]) -> None:
        """Print a table: the first column left, the others right, floats with three decimals. Without room for it,
        print its rows as sentences."""
        cells = [[f"{cell:.3f}" if isinstance(cell, float) else visible(str(cell)) for cell in row] for row in rows]
        widths = [max(map(cell_len, [*column.split(), *(row[n] for row in cells)])) for n, column in enumerate(columns)]
        if self._as_lines or sum(widths) + 3 * len(widths) + 1 > self._console.width:  # the space between, and lines
            named = ([f"{column} {cell}" for column, cell in zip(columns, row, strict=True)] for row in cells)
            self.say(f"{title}:", lasting=False)
            self.paragraphs([", ".join(words) for words in named], indent=2)
            return
        table = Table(title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for number, column in enumerate(columns):
            heading = Text("\n".join(column.split()))  # rich would cut columns off while it looks where to break them
            table.add_column(heading, justify="right" if number else "left", no_wrap=True)
        for row in cells:
            table.add_row(*map(Text, row))
        self._console.print(table)
        self._stream.flush()

    def tell_how_to_stop(self, run: str) -> None:
        """Show how to stop and to pause the run directory `run`, quoted as a command takes it."""
        self.hint = f"Ctrl-C saves and stops; {own_command()} pause {run} waits"
        self.paused_hint = f"Ctrl-C saves and stops; {own_command()} unpause {run} goes on"

    def stop(self) -> None:
        """End; the last state stays on the terminal."""
        self._last = None  # the sentence stands above, and its age would be wrong in a moment
        self.hint = self.paused_hint = ""
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif not self._on_terminal and not self.quiet and self._round != self._printed_round and len(self._ended) > 1:
            self._print_line()

    def _share(self) -> float:
        """The share of the run that is done, in [0, 1], by rounds or by minutes, whichever ends it first."""
        return min(1.0, max(self._round / self._total, self._elapsed() / self._limit_s))

    def _now(self) -> float:
        """The time in seconds, on a clock that stands still in pauses."""
        return self._clock() - self.paused_s()

    def _elapsed(self) -> float:
        """Seconds of the minutes that have passed."""
        return self.spent_s + (0.0 if self._rounds_at is None else self._now() - self._rounds_at)

    def _tenth(self) -> int:
        return int(10 * self._share() + 1e-9)

    def _line_due(self) -> bool:
        if self.quiet:
            return False
        since = self._ended[-1] - self._printed_at
        most = LINE_MOST_S if self._clock() - self._started_at < EARLY_S else LINE_LATER_S
        if self._printed_round is None or self._round >= self._total or since >= most:
            return True
        return since >= LINE_LEAST_S and self._tenth() > self._printed_tenth

    def _print_line(self) -> None:
        self._printed_round, self._printed_at = self._round, self._ended[-1]
        self._printed_tenth = self._tenth()
        reward = [*self._reward()[:1], cut_off(self._metrics), *self._latest_held_out()]
        figures = [f"round {self._round}{self._of}", *filter(None, reward), *self._speed(), *self._peers()[:1]]
        rest = [self._averaged, f"{self._seconds_per_round():.2f} s/round", self._time_left(), self.usage()]
        lines = ["  ".join(filter(None, [*figures, *traffic, *rest])) for traffic in (self._rates(), [])]
        self._plain(lines[0] if len(lines[0]) <= MAX_PLAIN else lines[1])

    def _print(self, text: str, indent: int = 0) -> None:
        lines = [visible(line) for line in text.split("\n")]
        if self._on_terminal:
            wide = max(indent + 10, self._console.width)
            self._console.print(Text("\n".join(wrapped(line, wide, indent) for line in lines)), soft_wrap=True)
        else:
            self._plain("\n".join(lines))

    def view(self) -> Group:
        """The lines that stay on a terminal, none wider than it. Also called from Rich's thread."""
        width, waiting = self._console.width, self.waiting()
        traffic, averaged = self._fitting(self._traffic_words(waiting)), self._averaged
        both = "  ".join(filter(None, [traffic, averaged]))
        below = [both] if cell_len(both) <= width else [traffic, averaged]
        lines = [self._reward_line(waiting), self._fitting(self._peers()), *below, *self._usage_lines(waiting)]
        shown = (Text(_cut(line, self._console), no_wrap=True) for line in [*lines, self._last_event()] if line)
        return Group(self._head("" if waiting else self._time_left()), *shown)

    def _head(self, left: str) -> Table | Text:
        round = f"round {self._round}{self._of}"
        if math.isinf(self._total) and math.isinf(self._limit_s):  # a run without end has no share of it
            return Text(_cut(self._fitting([f"{round}{self._so_far()}", round]), self._console))
        share = f"{self._share():4.0%}"
        rest = self._console.width - len(round) - len(share) - len(left) - 2 - bool(left)
        if rest < LEAST_SPARK:
            texts = f"{round} {share} {left}".rstrip(), f"{round} {share}", round
            return Text(_cut(self._fitting(texts), self._console))
        head = Table.grid(padding=(0, 1))
        head.add_row(round, ProgressBar(total=1.0, completed=self._share(), width=min(BAR_WIDTH, rest)), share, left)
        return head

    def _so_far(self) -> str:
        """How long a round takes and how long the run has been going; empty before its first round."""
        if len(self._ended) < 2:
            return ""
        return f", {self._seconds_per_round():.2f} s each, {clock_face(self._clock() - self._started_at)} {self._since}"

    def _reward_line(self, waiting: str) -> str:
        figures = [waiting] if waiting else [*self._latest_held_out(), *self._speed()]  # the speed is of before that
        rewards = ["  ".join(filter(None, [reward, cut_off(self._metrics)])) for reward in self._reward()]
        lines = ["  ".join([reward, *figures]) for reward in rewards]
        if lines and (rest := self._console.width - cell_len(lines[0]) - 1) >= LEAST_SPARK:
            curve = sparkline(self._rewards_shown, min(SPARK_WIDTH, rest), self._console.options.ascii_only)
            return "  ".join([f"{rewards[0]} {curve}", *figures])
        return self._fitting([*lines, "  ".join(figures), *figures])

    def _latest_held_out(self) -> list[str]:
        return [] if self._held_out is None else [f"held-out {self._held_out:.3f}"]

    def _reward(self) -> list[str]:
        """Texts about the reward, ever shorter."""
        if self._tenths is None:
            return []
        first, last = (f"{mean:.3f}" for mean in self._tenths)
        return [*([f"reward {first} -> {last}"] if self._rewards.count >= ENOUGH_ROUNDS else []), f"reward {last}"]

    def _speed(self) -> list[str]:
        speed = self._metrics.get("perf/generated_tok_s")
        return [*([] if speed is None else [f"samples {speed:,.0f} tokens/s"]), *_in_functions(self._metrics)]

    def _peers(self) -> list[str]:
        """Texts about others that train and how much of their work is used, ever shorter."""
        crew, there = self.crew(), self._metrics.get("swarm/trainers")
        if there is None:
            return [] if crew is None else [f"crew of {crew + 1}"]
        return others_words(there, crew, fmean([*self._used] or [0.0]), self._metrics, self._met_others)

    def _rates(self) -> list[str]:
        if not self._traffic or (seconds := self._traffic[-1][0] - self._traffic[0][0]) <= 0:
            return []
        if self._traffic[-1][0] - self._started_at < RATE_AFTER_S:
            return []
        (_, in_0, out_0), (_, in_1, out_1) = self._traffic[0], self._traffic[-1]
        inward, outward = (volume(3600 * size / seconds) for size in (in_1 - in_0, out_1 - out_0))
        return [f"{inward} in, {outward} out an hour"]

    def _traffic_words(self, waiting: str) -> list[str]:
        if not self._traffic:
            return []
        _, inward, outward = self._traffic[-1]
        if waiting or not (rates := self._rates()):
            return [f"{volume(inward)} in, {volume(outward)} out"]
        since = "in all" if self._since == "so far" else self._since
        return [f"{rates[0]}, {volume(inward + outward)} {since}", *rates]

    def _usage_lines(self, waiting: str) -> list[str]:
        """What the run takes, and how to stop it, on one line or on two."""
        usage, fits = self.usage(), self._console.width
        hint = self.paused_hint if waiting.startswith("paused") else self.hint
        both = "; ".join(filter(None, [usage, hint]))
        return [both] if cell_len(both) <= fits else [usage, hint if cell_len(hint) <= fits else ""]

    def _last_event(self) -> str:
        if self._last is None:
            return ""
        when, text = self._last
        line = f"{_age(self._clock() - when)} ago: {printable(text)}"
        return line if cell_len(line) <= self._console.width else ""  # the whole sentence stands above

    def _fitting(self, texts: Sequence[str]) -> str:
        """The first text that fits on a line, or the last one."""
        return next((text for text in texts if cell_len(text) <= self._console.width), texts[-1] if texts else "")

    def _seconds_per_round(self) -> float:
        return (self._ended[-1] - self._ended[0]) / (len(self._ended) - 1)

    def _time_left(self) -> str:
        if self._round >= self._total:
            this = " in this start" * (self._since != "so far")
            return f"took {clock_face(self._updated_at - self._started_at)}{this}"
        left = self.left_s
        return "" if math.isinf(left) else f"{clock_face(left)} left"

    @property
    def left_s(self) -> float:
        """Seconds until the run has done its rounds or minutes; infinite if it has no end, or if that is not known
        yet. From any thread."""
        left = self._limit_s - self._elapsed()
        if len(self._ended) > 1:
            since_last = self._now() - self._ended[-1]
            left = min(left, (self._total - self._round) * self._seconds_per_round() - since_last)
        return left


def _cut(text: str, console: Console) -> str:
    """The part of `text` that fits on a line."""
    text = text.encode(console.encoding, "backslashreplace").decode(console.encoding)
    if cell_len(text) <= console.width:
        return text
    end = "..." if console.options.ascii_only else "…"
    return set_cell_size(text, max(0, console.width - len(end))) + end[: console.width]


def _age(seconds: float) -> str:
    """Seconds in the greatest whole unit: 150.0 -> 2 min"""
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def clock_face(seconds: float) -> str:
    """Seconds as a clock shows them: 3725.0 -> 1:02:05; from four days on, in days."""
    if seconds >= LONG_S:
        return f"{seconds / 86400:,.0f} days"
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def volume(size: float) -> str:
    """Bytes with two or three digits: 9120.0 -> 9.1 kB"""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5 or unit == "GB":
            break
        size /= 1000
    return f"{size:.1f} {unit}" if size < 9.95 and unit != "B" else f"{size:.0f} {unit}"


def sparkline(values: Sequence[float], width: int = SPARK_WIDTH, ascii_only: bool = False) -> str:
    """`values` as at most `width` blocks; each is the mean of an equal share of them, between minimum and maximum."""
    blocks = ASCII_BLOCKS if ascii_only else BLOCKS
    count = min(width, len(values))
    if not count:
        return ""
    edges = [len(values) * i // count for i in range(count + 1)]
    means = [fmean(values[a:b]) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    step = (high - low) / (len(blocks) - 1) or 1.0
    return "".join(blocks[round((mean - low) / step)] for mean in means)


def _in_functions(metrics: Mapping[str, float | None]) -> list[str]:
    """The part of the last round that reward functions took, if it is worth a word."""
    share = metrics.get("perf/reward_share") or 0.0
    return [f"{share:.0%} in reward functions"] if share >= LEAST_SHARE else []
