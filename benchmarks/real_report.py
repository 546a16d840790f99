"""Tables of `benchmarks.real_learning`, from its rows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from benchmarks.common import table
from benchmarks.intervals import Point, first_reach, value_at

Row = dict[str, Any]
NOISE = 0.1
"""A run whose share rose by less has not learned: twice the standard error of a difference of two looks, and more."""
GAIN, FIRST_REWARD_S = 0.5, 90.0
"""What the part `default` is held to: held-out share above the base at its end, and when its first reward is there."""
NODE = "node"
SAID = re.compile(r"a round takes about ([\d.]+) (s|min) with answers of")
FIRST_ROUNDS = 5  # rounds whose mean time an estimate is compared with


def points(row: Row) -> list[Point]:
    """(seconds, share right) of a run."""
    return [(look["seconds"], look["right"]) for look in row["curve"]]


def base(row: Row) -> float:
    return points(row)[0][1]


def last(row: Row) -> float:
    return points(row)[-1][1]


def strongest_trl(rows: Iterable[Row]) -> Row | None:
    """The run of TRL that ends highest."""
    return max((row for row in rows if row["who"] != NODE), key=last, default=None)


def holds(row: Row) -> bool:
    """Whether a run of `default` does what is asked of it."""
    first = row["first_reward_s"]
    return first is not None and first <= FIRST_REWARD_S and last(row) - base(row) >= GAIN


COLUMNS = ["questions", "", "seeds", "right at the start", "at the end", "s to TRL's end", "times as soon"]
COLUMNS += ["first reward, s", "peak MiB"]


def report(rows: Sequence[Row]) -> str:
    """Markdown: a table of all runs by part, and what became of the bar of `default`."""
    lines: list[list[str]] = []
    for part in sorted({row["part"] for row in rows}):
        mine = [row for row in rows if row["part"] == part]
        arms = sorted({row["who"] for row in mine}, key=lambda who: (who != NODE, who))
        lines += [line_of(part, [row for row in mine if row["who"] == who], mine) for who in arms]
    texts = [table(COLUMNS, lines)] if lines else ["no rows yet"]
    if runs := [row for row in rows if (row["part"], row["who"]) == ("default", NODE)]:
        texts += [bar(runs), estimates(runs), curves([row for row in rows if row["part"] == "default"])]
    return "\n\n".join(texts)


def line_of(part: str, runs: Sequence[Row], all_rows: Sequence[Row]) -> list[str]:
    """A line of the table: an arm's runs beside the strongest run of TRL with the same seed."""
    reached, ratios = [], []
    for row in runs:
        rival = strongest_trl(each for each in all_rows if each["seed"] == row["seed"])
        if rival is None:
            continue
        if last(rival) - base(rival) < NOISE:
            reached.append("TRL has not learned")
            continue
        seconds = first_reach(points(row), last(rival))
        theirs = first_reach(points(rival), last(rival))
        assert theirs is not None
        reached.append("never" if seconds is None else f"{seconds:.0f}")
        ratios.append(0.0 if not seconds else theirs / seconds)
    each = [row["first_reward_s"] for row in runs if row["first_reward_s"] is not None]
    return [
        f"{part} ({runs[0]['set']}, {runs[0]['minutes']:g} min)",
        runs[0]["who"],
        ", ".join(str(row["seed"]) for row in runs),
        ranged([base(row) for row in runs], ".3f"),
        ranged([last(row) for row in runs], ".3f"),
        ", ".join(reached),
        ranged(ratios, ".2f"),
        ranged(each, ".0f"),
        ranged([row["peak_rss_mib"] for row in runs], ",.0f"),
    ]


def ranged(values: Sequence[float], form: str) -> str:
    """Median with the range, if there are several values."""
    if not values:
        return ""
    text = f"{median(values):{form}}"
    return text if len(values) == 1 else f"{text} ({min(values):{form}} to {max(values):{form}})"


def bar(runs: Sequence[Row]) -> str:
    """What became of the bar: one sentence."""
    asked = f"first reward within {FIRST_REWARD_S:g} s, {GAIN:+g} held out within {runs[0]['minutes']:g} minutes"
    each = ", ".join(
        f"seed {row['seed']}: {row['first_reward_s']} s, {last(row) - base(row):+.3f}, {GAIN:+g} {_gained(row)}"
        for row in runs
    )
    return f"{asked}: {sum(map(holds, runs))} of {len(runs)} runs ({each})."


def estimates(runs: Sequence[Row]) -> str:
    """The time of a round that each run said before its first one, beside that of its first rounds: one sentence."""
    each = []
    for row in runs:
        found = [SAID.search(line) for line in row["screen"]]
        said = next((float(m[1]) * (60.0 if m[2] == "min" else 1.0) for m in found if m), None)
        ends = [seconds for seconds, _ in row["rewards"][: FIRST_ROUNDS + 1]]
        if said is None or len(ends) < 2:
            continue
        took = (ends[-1] - ends[0]) / (len(ends) - 1)
        each.append(f"seed {row['seed']}: {said:.1f} s, {took:.1f} s, {said / took - 1:+.0%}")
    return f"A round, as said before training and in the mean of rounds 2 to {FIRST_ROUNDS + 1}: {'; '.join(each)}."


def curves(runs: Sequence[Row]) -> str:
    """The share right of each run at each minute, linear between looks, and at its end."""
    minutes = [*range(2, int(runs[0]["minutes"]))]
    lines = []
    for row in runs:
        between = [value_at(points(row), 60.0 * minute) for minute in minutes]
        shown = [base(row), *between, last(row)]
        lines.append([f"{row['who']}, seed {row['seed']}", *("" if each is None else f"{each:.2f}" for each in shown)])
    return table(["held-out share right after, minutes", "0", *map(str, minutes), "end"], lines)


def _gained(row: Row) -> str:
    seconds = first_reach(points(row), base(row) + GAIN)
    return "never" if seconds is None else f"after {seconds:.0f} s"
