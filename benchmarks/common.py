"""What all benchmarks share: what machine this is, and where figures go."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """Date, processor, cores, versions."""
    from swarm_node.cli.commands.bench import processor

    return {
        "date": date.today().isoformat(),
        "cpu": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "transformers")},
    }


def folder_of(model: str) -> str:
    """The directory of the model that a user calls so; `smollm2` is fetched. For programs that are not this package."""
    from swarm_node.policy.model_path import located

    return located(model, print)


def write(name: str, figures: dict[str, Any]) -> Path:
    """Write `results/<name>.json`: the machine and the figures."""
    path = RESULTS / f"{name}.json"
    write_row(path, {"machine": machine(), **figures}, indent=1)
    print(f"\nwritten to {path}")
    return path


def write_row(path: Path, row: Mapping[str, Any], indent: int | None = None) -> None:
    """Write a row of a report as JSON, all of it or nothing: a cut one would count as there for `--missing`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f"{path.name}.part")
    half.write_text(json.dumps(row, indent=indent) + "\n")
    half.replace(path)


def table(columns: list[str], rows: list[list[Any]]) -> str:
    """A Markdown table."""
    cells = [columns, ["---"] * len(columns), *[[str(c) for c in row] for row in rows]]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def spent(cpu_s: float) -> str:
    """What the rows of a report cost."""
    return f"All rows together took {cpu_s / 3600:.1f} CPU hours."


def interleaved(contestants: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """CPU seconds of each contestant, `repeats` times in turn after one warm-up: a noisy machine hits all alike."""
    for run in contestants.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, run in contestants.items():
            start = time.process_time()
            run()
            times[name].append(time.process_time() - start)
    return times


def median(values: list[float]) -> float:
    return statistics.median(values)
