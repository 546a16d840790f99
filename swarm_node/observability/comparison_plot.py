"""The curves of compared runs as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from swarm_node.errors import UserError
from swarm_node.install import check_package
from swarm_node.observability.comparing import AXES, MEASURES, Comparison
from swarm_node.storage.rundir import os_errors_explained

ENDINGS = (".png", ".svg", ".pdf")
MARKED = 40  # points of a curve from which on they have no dots


def check_picture(out: Path) -> None:
    """Raise UserError, before anything is read, if `out` is no picture's name, or if nothing draws here."""
    check_package("matplotlib", "plots", "a picture (--csv needs none)")
    if out.suffix.lower() not in ENDINGS:
        raise UserError(f"cannot draw into {out}: its name must end in {', '.join(ENDINGS)}")


def plot_comparison(comparison: Comparison, out: Path) -> None:
    """Draw every measure against every axis; the ending of `out` decides the format. Raises UserError."""
    from matplotlib.figure import Figure  # the object interface needs no display and keeps no global state

    measures = [measure for measure in MEASURES if comparison.bands("round", measure)]
    figure = Figure(figsize=(10, 3.6 * len(measures)), dpi=120, layout="constrained")
    grid = figure.subplots(len(measures), len(AXES), squeeze=False)
    lines = {}
    for measure, row in zip(measures, grid, strict=True):
        for (axis, label), axes in zip(AXES.items(), row, strict=True):
            curves = comparison.bands(axis, measure)
            for group, curve in curves:
                color = f"C{comparison.groups.index(group) % 10}"
                marker = "o" if curve.measured and len(curve.x) < MARKED else None
                (lines[group.name],) = axes.plot(curve.x, curve.mean, color=color, lw=2, marker=marker, ms=4)
                axes.fill_between(curve.x, curve.low, curve.high, color=color, alpha=0.2, lw=0)
            axes.set_ylim(*_limits([curve.mean for _, curve in curves]))
            axes.set_xlabel(label)
            axes.set_ylabel(MEASURES[measure])
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
    names = [f"{group.name} ({len(group.runs)})" if len(group.runs) > 1 else group.name for group in comparison.groups]
    handles = [lines[group.name] for group in comparison.groups]
    figure.legend(handles, names, loc="outside upper left", ncols=2, frameon=False, fontsize=9)
    with os_errors_explained(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, format=out.suffix[1:].lower())


def _limits(means: Sequence[np.ndarray]) -> tuple[float, float]:
    """Limits that show the means well: a band of two runs may be many times as wide."""
    least, most = min(float(mean.min()) for mean in means), max(float(mean.max()) for mean in means)
    room = 0.4 * (most - least) or 0.1
    return least - room, most + room
