"""Alone against in a swarm: curves over CPU seconds, from the stored rows of `benchmarks.sharing`.

    python -m benchmarks.sharing_plot [--setting steps-8] [--out docs/images/alone-or-swarm.png]

One thin line for each seed, and their mean as a thick one, as far as all of them go. Reward is the level that
`benchmarks.sharing_report` explains. Held-out pass@1 is measured at twelve moments of a run, which cost it nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.intervals import Point, first_reach, value_at
from benchmarks.sharing import load
from benchmarks.sharing_report import MEMBER, SILO, Row, end_level, levels, paired, passes, strongest
from benchmarks.sharing_settings import SETTINGS

PLOT = Path(__file__).parent.parent / "docs" / "images" / "alone-or-swarm.png"
STEPS = 60  # points of a mean curve


def mean_curve(curves: Sequence[Sequence[Point]]) -> list[Point]:
    """The mean over seeds at equal CPU seconds, from where all curves have begun to where the first ends."""
    low, high = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    places = [low + (high - low) * i / STEPS for i in range(STEPS)] + [high]
    return [(x, fmean(y for curve in curves if (y := value_at(curve, x)) is not None)) for x in places]


def draw_seeds(axes: Any, curves: Sequence[Sequence[Point]], colour: str, label: str) -> None:
    """A thin line for each seed, and their mean as a thick one."""
    for curve in curves:
        axes.plot(*zip(*curve, strict=True), color=colour, linewidth=0.8, alpha=0.4)
    if curves:
        axes.plot(*zip(*mean_curve(curves), strict=True), color=colour, linewidth=2.2, label=label)
    axes.spines[["top", "right"]].set_visible(False)


def arms(setting: str) -> dict[str, tuple[str, dict[int, Row]]]:
    """Label -> (colour, rows by seed) of a member, the strongest silo, and a silo with the settings of `local`."""
    found = load(setting)
    best = strongest(found)
    seeds = paired(found[best], found[MEMBER]).keys()
    drawn = {
        MEMBER: ("a member of a swarm of eight", "#00796b"),
        best: ("alone, the strongest of six ways", "#37474f"),
    }
    drawn.setdefault(SILO, ("alone, as local comes", "#b0793a"))
    return {
        label: (colour, {seed: found[arm][seed] for seed in seeds if seed in found[arm]})
        for arm, (label, colour) in drawn.items()
    }


def plot(setting: str, out: Path) -> None:
    """Two panels, reward and held-out pass@1; dotted: when a member and the strongest silo are where that one ends."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.9), dpi=110, layout="constrained")
    reward, held_out = figure.subplots(1, 2, sharey=True)
    parts = arms(setting)
    panels: tuple[tuple[Any, str, Callable[[Row], list[Point]]], ...] = (
        (reward, "training reward", levels),
        (held_out, "held-out pass@1", passes),
    )
    for axes, title, curve_of in panels:
        for label, (colour, rows) in parts.items():
            draw_seeds(axes, [curve_of(row) for row in rows.values()], colour, label)
        axes.set(title=title, xlabel="CPU seconds of one machine", xlim=(0, None), ylim=(0, 1))
    member, strongest_silo = list(parts.values())[:2]
    goal = fmean(map(end_level, strongest_silo[1].values()))
    reward.axhline(goal, color="#888888", linewidth=0.8, linestyle=":")
    for colour, rows in member, strongest_silo:
        there = first_reach(mean_curve([levels(row) for row in rows.values()]), goal)
        if there is not None:
            reward.vlines(there, 0, goal, color=colour, linewidth=0.8, linestyle=":")
            reward.text(there + 0.4, 0.03, f"{there:.0f} s", color=colour)
    held_out.legend(frameon=False, fontsize=8.5, loc="lower right")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=SETTINGS, default="steps-8")
    parser.add_argument("--out", type=Path, default=PLOT)
    args = parser.parse_args(argv)
    plot(args.setting, args.out)


if __name__ == "__main__":
    main()
