"""A real model learns: held-out share right over minutes, from the stored rows of `benchmarks.real_learning`.

    python -m benchmarks.real_plot [--part default] [--out docs/images/real-model.png]

One thin line for each seed, and their mean as a thick one, as far as all of them go.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.intervals import Point
from benchmarks.real_learning import FOLDER, NODE, PARTS, TRL, Row
from benchmarks.sharing_plot import draw_seeds

PLOT = Path(__file__).parent.parent / "docs" / "images" / "real-model.png"
DRAWN = {NODE: ("swarm-node local", "#00796b"), TRL[0]: ("TRL 1.16", "#37474f")}
"""Who is drawn: its label and colour."""


def curve_of(row: Row) -> list[Point]:
    """(minutes since the command was typed, held-out share right)."""
    return [(look["seconds"] / 60, look["right"]) for look in row["curve"]]


def plot(rows: Sequence[Row], out: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.2), dpi=110, layout="constrained")
    axes = figure.subplots()
    for who, (label, colour) in DRAWN.items():
        curves = [curve_of(row) for row in rows if row["who"] == who]
        seeds = "1 seed" if len(curves) == 1 else f"{len(curves)} seeds"
        draw_seeds(axes, curves, colour, f"{label}, {seeds}")
    axes.set(xlabel="minutes since the command was typed", ylabel="right, of held-out questions")
    axes.set(xlim=(0, None), ylim=(0, 1))
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.legend(frameon=False, loc="upper left")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, default="default")
    parser.add_argument("--out", type=Path, default=PLOT)
    args = parser.parse_args(argv)
    rows = [json.loads(file.read_text()) for file in sorted(FOLDER.glob(f"{args.part}-*.json"))]
    plot(rows, args.out)


if __name__ == "__main__":
    main()
