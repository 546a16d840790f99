"""Run a grid of settings in the simulator, and write one tidy CSV: `python -m benchmarks.sweep grid.toml`.

    grid.toml -> settings (every combination of the values in [grid]) x seeds -> Simulation -> rows

One row for each setting, seed, peer and round. Columns: `commit` (of this code, `+` = with changes; its version if
there is no git), `config` (hash of a setting without its seed), the keys of [grid], `seed`, `peer`, `round`, `metrics`.
All rows of a simulation are written at its end. A later call runs the simulations that are missing. docs/sharing.md
shows a grid.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import ConfigDict, Field, PositiveInt, ValidationError

from swarm_node import __version__
from swarm_node.config import NodeConfig, load_config
from swarm_node.config.keys import Table, merged, nest
from swarm_node.config.own import read_toml
from swarm_node.config.section import Section
from swarm_node.errors import UserError
from swarm_node.runtime.simulation import Peer, Simulation, Speed, manifest_for
from swarm_node.storage.rundir import os_errors_explained
from swarm_protocol.transports.memory import LinkModel

METRICS = ["reward", "frac_reward_zero_std", "num_tokens", "swarm/groups_sent", "swarm/groups_received"]
METRICS += ["swarm/groups_admitted", "swarm/groups_used", "swarm/staleness_mean"]
S = TypeVar("S", bound=Section)


class Scene(Section):
    """What is simulated, besides the configuration of the peers."""

    model_config = ConfigDict(allow_inf_nan=True)

    peers: PositiveInt = 4
    rounds: PositiveInt = 100
    link: LinkModel = LinkModel()  # of every peer
    speed: Speed = Speed()  # of every peer


class SweepGrid(Scene):
    """A grid file."""

    seeds: list[int] = Field([0], min_length=1)
    metrics: list[str] = METRICS
    config: dict[str, Any] = {}  # as in a configuration file
    grid: dict[str, list[Any]] = {}  # key of `config`, or of the scene -> values


class Setting(NamedTuple):
    """One combination of the grid's values."""

    values: dict[str, Any]  # key -> value, as in [grid]
    scene: Scene
    config: NodeConfig

    @property
    def digest(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of the whole setting."""
        parts = {"config": self.config.model_dump(mode="json"), **self.scene.model_dump()}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def sweep(path: Path, out: Path, say: Callable[[str], None] = print) -> int:
    """Run the simulations of the grid in `path` that are missing in `out`. Returns their number. Raises UserError."""
    grid = read_grid(path)
    settings = list(grid_settings(grid))
    columns = ["commit", "config", *grid.grid, "seed", "peer", "round", *grid.metrics]
    wanted = [(setting, seed) for setting in settings for seed in grid.seeds]
    done = _keep_whole(out, columns, {one.digest: one.scene.peers * one.scene.rounds for one in settings})
    missing = [(setting, seed) for setting, seed in wanted if (setting.digest, str(seed)) not in done]
    say(f"{len(wanted)} simulations, {len(wanted) - len(missing)} of them in {out} already")
    commit = code_version()
    for number, (setting, seed) in enumerate(missing, start=1):
        rows = simulate(setting, seed, grid.metrics)
        head = [commit, setting.digest, *setting.values.values(), seed]
        _append(out, [head + row for row in rows])
        shown = ", ".join(f"{key} = {value}" for key, value in setting.values.items())
        say(f"{number}/{len(missing)}  {shown}  seed {seed}")
    say(f"{out} is complete")
    return len(missing)


def read_grid(path: Path) -> SweepGrid:
    """Read a grid from a TOML file. Raises UserError."""
    return _valid(SweepGrid, read_toml(path, "the grid"))


def grid_settings(grid: SweepGrid) -> Iterator[Setting]:
    """Every combination of the grid's values; the last key changes fastest. Raises UserError."""
    for values in product(*grid.grid.values()):
        chosen = dict(zip(grid.grid, values, strict=True))
        table, keys = grid.model_dump(include=set(Scene.model_fields)), dict(grid.config)
        for key, value in chosen.items():
            if key.partition(".")[0] in Scene.model_fields:
                table = merged(table, nest(key, value))
            else:
                keys[key] = value
        yield Setting(chosen, _valid(Scene, table), load_config(flags=keys))


def simulate(setting: Setting, seed: int, metrics: Sequence[str]) -> list[list[Any]]:
    """[peer, round, *metrics] for every round of every peer; an absent metric is empty."""
    scene = setting.scene
    peers = [Peer(setting.config, scene.speed, scene.link) for _ in range(scene.peers)]
    Simulation(manifest_for(setting.config), peers, seed).run(scene.rounds)
    return [
        [number, line["round"], *(line.get(name, "") for name in metrics)]
        for number, peer in enumerate(peers)
        for line in peer.metrics
    ]


def code_version() -> str:
    """Commit of the repository that this code runs from, with `+` if there are changes; else the version."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout

    try:
        git("ls-files", "--error-unmatch", __file__)  # fails if this package is installed inside another repository
        return git("rev-parse", "HEAD")[:12] + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return __version__


def _valid(kind: type[S], table: Table) -> S:
    """The table as a section. Raises UserError."""
    try:
        return kind.model_validate(table)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = ".".join(map(str, problem["loc"]))
        if problem["type"] == "unexpected_keyword_argument":
            raise UserError(f"unknown key {key} in the grid") from None
        raise UserError(f"{key} = {problem['input']!r} in the grid: {problem['msg']}") from None


def _keep_whole(out: Path, columns: Sequence[str], whole: Mapping[str, int]) -> set[tuple[str, str]]:
    """(config, seed) of the complete simulations in `out`. Drops other rows, and creates the file if there is none.
    Raises UserError if it has other columns."""
    with os_errors_explained(out):
        text = out.read_text(encoding="utf-8") if out.exists() else ""
        rows = list(csv.reader(io.StringIO(text)))
        if rows and rows[0] != list(columns):
            raise UserError(f"{out} has other columns than this grid: give another --out")
        found: dict[tuple[str, str], list[list[str]]] = {}
        for row in rows[1:]:
            if len(row) == len(columns):
                found.setdefault((row[columns.index("config")], row[columns.index("seed")]), []).append(row)
        done = {key: rows for key, rows in found.items() if len(rows) == whole.get(key[0], len(rows))}
        half = out.with_name(out.name + ".part")
        half.write_text(_csv([columns, *chain.from_iterable(done.values())]), encoding="utf-8")
        half.replace(out)
    return set(done)


def _append(out: Path, rows: Sequence[Sequence[Any]]) -> None:
    with os_errors_explained(out), out.open("a", encoding="utf-8") as file:
        file.write(_csv(rows))
        file.flush()
        os.fsync(file.fileno())


def _csv(rows: Sequence[Sequence[Any]]) -> str:
    """Rows as text; a list or table in a cell becomes JSON."""
    text = io.StringIO()
    cells = ([json.dumps(cell) if isinstance(cell, list | dict | bool) else cell for cell in row] for row in rows)
    csv.writer(text, lineterminator="\n").writerows(cells)
    return text.getvalue()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grid", type=Path, help="grid file (TOML)")
    parser.add_argument("--out", type=Path, help="table to write or to continue; by default the grid's name with .csv")
    args = parser.parse_args(argv)
    try:
        sweep(args.grid, args.out or args.grid.with_suffix(".csv"))
    except UserError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
