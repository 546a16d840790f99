"""`swarm-node compare`: settings that differ, final figures side by side, curves as CSV and as a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from swarm_node.observability.comparing import Comparison, figure_rows
from swarm_protocol.errors import visible


def compare_runs(
    paths: Sequence[Path], picture: Path | None, table: Path | None, json_output: bool, apart: bool = False
) -> None:
    """Compare the runs in `paths`; `apart`: each by itself, also those that differ only by seed. Raises UserError."""
    from swarm_node.observability.comparison_plot import check_picture, plot_comparison

    if picture is not None:
        check_picture(picture)
    folders = [path for path in paths if not path.is_file()]  # `runs/sweep/*` names files of the sweep too
    comparison = Comparison(folders or paths, apart)
    if table is not None:
        comparison.write_csv(table)
    if picture is not None:
        plot_comparison(comparison, picture)
    if json_output:
        print(json.dumps(comparison.document(), indent=2))
        return
    show(comparison)
    for out in (table, picture):
        if out is not None:
            print(f"wrote {out}")


def show(comparison: Comparison) -> None:
    """Print both tables."""
    heads = comparison.heads
    if comparison.differences:
        settings = [[key, *texts] for key, texts in comparison.different_texts.items()]
        for line in comparison.meanings:
            print(visible(line))
        print_table("settings that differ", ["", *heads], settings)
    elif len(comparison.groups) > 1:
        print("the settings differ in nothing but the seed")
    elif len(comparison.groups[0].runs) > 1:
        print("the settings differ in nothing but the seed, so the runs are averaged; --apart shows them side by side")
    several = any(len(group.runs) > 1 for group in comparison.groups)
    title = "figures, with half of the 95 % interval over seeds" if several else "figures"
    print_table(title, ["", *heads], list(figure_rows(comparison)))
    for remark in [*comparison.not_comparable, *comparison.changed]:
        print(visible(remark))


def print_table(title: str, columns: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """Print a table: the first column left, the others right."""
    heading = Text(visible(title), style="bold")
    table = Table(title=heading, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(Text(visible(column)), justify="right" if number else "left", overflow="fold")
    for row in cells:
        table.add_row(*map(Text, map(visible, row)))
    Console(highlight=False, markup=False).print(table)
