"""The reward curve of a run as a picture."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from colorsys import hls_to_rgb
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from swarm_node.config.figures import WORDS
from swarm_node.config.figures import Figure as HeldOutFigure
from swarm_node.errors import UserError
from swarm_node.install import extra_command
from swarm_node.observability.curves import Curves
from swarm_node.storage.rundir import os_errors_explained

CAN_DRAW = bool(find_spec("matplotlib") and find_spec("PIL"))
BLUE, ORANGE = "#2563eb", "#ea580c"
SMOOTHED_SHARE = 20  # each point of the smooth line is the mean over a twentieth of the run
DRAWN = ("round", "rounds", "reward", "eval")  # first parts of the names of what is drawn
READ = 256  # records in memory at once: a line becomes 6 kB of Python objects


def plot_reward(
    metrics: Iterable[Mapping[str, Any]],
    out: Path,
    title: str,
    held_out: tuple[float, float] | None = None,
    named: HeldOutFigure = "pass_1",
) -> None:
    """Draw training reward over rounds into the PNG file `out`; `metrics` are records of metrics.jsonl.

    In a run of more than a thousand rounds, each point is the mean of equally many rounds. Thin lines are the tasks
    (`reward/<label>`), if there are several. `held_out` is the figure `named` on held-out questions before and after,
    drawn as two points; where it was measured in between (`eval/<named>`), a line goes through all of them. Raises
    UserError if there is nothing to draw, `out` cannot be written, or the extra `plots` is not installed.
    """
    if not CAN_DRAW:
        raise UserError(no_picture())
    curves = _curves(metrics)
    points = curves.points()
    rounds, rewards = _series(points, "reward")
    if not rounds:
        raise UserError("no round with a reward yet: nothing to plot")

    # Imported when needed; the object interface needs no display and keeps no global state.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
    from PIL import Image

    window = max(1, len(rounds) // SMOOTHED_SHARE)
    figure = Figure(figsize=(8, 4.5), dpi=100, layout="constrained")
    axes = figure.subplots()
    labels = sorted(name for name in points if name.startswith("reward/"))
    tasks = []
    for number, label in enumerate(labels if len(labels) > 1 else []):
        color = hls_to_rgb(number / len(labels), 0.5, 0.5)
        at, values = _series(points, label)
        name = label.removeprefix("reward/")
        tasks += axes.plot(at, moving_average(values, 2 * window), color=color, lw=1, alpha=0.6, label=name)
    axes.plot(rounds, rewards, color=BLUE, lw=0.8, alpha=0.25)
    smoothed = window * curves.per_row
    name = f"training reward, mean of {smoothed} rounds" if smoothed > 1 else "training reward"
    marker = "o" if len(rounds) < 10 else None
    lines = axes.plot(rounds, moving_average(rewards, window), color=BLUE, lw=2.4, marker=marker, label=name)
    if held_out is not None:
        form = ".1%" if named == "pass_1" else ".3f"
        name = f"held-out {WORDS[named]}: {held_out[0]:{form}} before, {held_out[1]:{form}} after"
        ends = [rounds[0], rounds[-1]]
        between = [point for point in zip(*_series(points, f"eval/{named}"), strict=True) if point[0] < ends[1]]
        along = [(ends[0], held_out[0]), *between, (ends[1], held_out[1])]
        if between:
            axes.plot(*zip(*along, strict=True), color=ORANGE, lw=1.2, marker="o", ms=3)
        lines += axes.plot(ends, held_out, color=ORANGE, ls="", marker="D", ms=8, label=name, clip_on=False)
    axes.set_title(title, loc="left", fontsize=12, pad=28)
    axes.set_xlabel("round")
    axes.set_ylabel("reward per answer (mean)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=min(0.0, *rewards))
    axes.margins(x=0.01)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(handles=lines, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, borderaxespad=0)
    if tasks:
        figure.legend(handles=tasks, loc="outside lower center", ncols=4, fontsize=8.5, frameon=False)
    drawn = io.BytesIO()
    figure.savefig(drawn)
    with os_errors_explained(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        palette = Image.open(drawn).convert("RGB").quantize(128)  # a third of the size
        palette.save(out, optimize=True)


def no_picture() -> str:
    """The sentence about what is not installed."""
    return f"no picture of the rewards without matplotlib; to install it: {extra_command('plots')}"


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Mean over the `window` values around each; fewer at both ends, so that the line spans the whole run."""
    before, after = (window - 1) // 2, window // 2
    return [fmean(values[max(0, i - before) : i + after + 1]) for i in range(len(values))]


def _curves(metrics: Iterable[Mapping[str, Any]]) -> Curves:
    """The rewards of all rounds, in a bounded number of points."""
    curves, records = Curves(), iter(metrics)
    while some := list(islice(records, READ)):
        curves.add([{name: r[name] for name in r if name.split("/")[0] in DRAWN} for r in some])
    return curves


def _series(points: Mapping[str, Mapping[str, list[float | None]]], name: str) -> tuple[list[float], list[float]]:
    """(the rounds in which `name` was measured, its values)"""
    if name not in points:
        return [], []
    both = zip(points["round"]["mean"], points[name]["mean"], strict=True)
    measured = [(round, value) for round, value in both if round is not None and value is not None]
    return [round for round, _ in measured], [value for _, value in measured]
