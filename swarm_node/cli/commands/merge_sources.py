"""What `swarm-node merge` is given: found wrong before anything heavy is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from swarm_node.errors import UserError
from swarm_node.storage.rundir import RunDir, os_errors_explained
from swarm_node.swarm.download import is_url


def is_swarm(named: str) -> bool:
    """Whether `merge` is to look for members, rather than take `named` for a run directory."""
    return named.startswith("swarm:") or is_url(named) or Path(named).expanduser().is_file()


def runs_of(sources: Sequence[str]) -> list[RunDir]:
    """The runs to be merged. UserError unless there are two or more."""
    runs = [RunDir(source) for source in sources]
    for run in runs:
        if not run.exists:
            raise UserError(f"no run in {run.path} (it has no config.toml)")
    if len({run.path.resolve() for run in runs}) < max(2, len(runs)):
        raise UserError("a merge takes at least two different run directories, each of them once")
    return runs


def check_sources(sources: Sequence[str], out: Path) -> None:
    """UserError for what nothing can come of; touches nothing."""
    if any(map(is_swarm, sources)):
        if len(sources) > 1:
            raise UserError("a merge is of one swarm, or of run directories")
    else:
        runs_of(sources)
    with os_errors_explained(out):
        if out.exists() and any(out.iterdir()):
            raise UserError(f"{out} is not empty; choose another directory")
