"""Run a grid of settings in the simulator, and write one tidy CSV: `swarm-node bench sweep grid.toml`.

    grid.toml -> settings (every combination of the values in [grid]) x seeds -> Simulation -> rows

One row for each setting, seed, peer and round. Columns: `commit` (of this code, `+` = with changes; its version if
there is no git), `config` (hash of a setting without its seed), the keys of [grid], `seed`, `peer`, `round`, `metrics`.
All rows of a simulation are written at its end. A later call runs the simulations that are missing.

    peers = 4
    rounds = 100
    seeds = [0, 1, 2]
    metrics = ["reward", "swarm/groups_used"]

    [config]                        # as in a configuration file
    tasks = ["small"]
    rollouts.max_new_tokens = 8

    [link]                          # of every peer: fields of LinkModel
    latency_s = 0.1

    [speed]                         # of every peer: fields of Speed
    generate_tok_s = 2000

    [grid]                          # keys of [config]; or peers, rounds, link.…, speed.…
    "sharing.own" = [8, 4]
    "sharing.foreign" = [0, 4]
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
import os
import subprocess
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import Field, PositiveInt, TypeAdapter, ValidationError

from protocol.transports.memory import LinkModel
from swarm_node import __version__
from swarm_node.config import NodeConfig, load_config
from swarm_node.config.section import Section
from swarm_node.errors import UserError
from swarm_node.runtime.simulation import Peer, Simulation, Speed, manifest_for
from swarm_node.storage.rundir import os_errors_explained

METRICS = ["reward", "frac_reward_zero_std", "num_tokens", "swarm/groups_sent", "swarm/groups_received"]
METRICS += ["swarm/groups_admitted", "swarm/groups_used", "swarm/staleness_mean"]


class SweepGrid(Section):
    """A grid file."""

    peers: PositiveInt = 4
    rounds: PositiveInt = 100
    seeds: list[int] = Field([0], min_length=1)
    metrics: list[str] = METRICS
    config: dict[str, Any] = {}
    link: dict[str, Any] = {}
    speed: dict[str, Any] = {}
    grid: dict[str, list[Any]] = {}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One combination of the grid's values."""

    values: dict[str, Any]
    """Key -> value, as in [grid]."""
    peers: int
    rounds: int
    config: NodeConfig
    link: LinkModel
    speed: Speed

    @property
    def digest(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of the whole setting."""
        parts = {
            "peers": self.peers,
            "rounds": self.rounds,
            "config": self.config.model_dump(mode="json"),
            "link": dataclasses.asdict(self.link),
            "speed": dataclasses.asdict(self.speed),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def sweep(path: Path, out: Path, say: Callable[[str], None] = print) -> int:
    """Run the simulations of the grid in `path` that are missing in `out`. Returns their number.

    Raises UserError for a wrong grid, or if `out` has other columns.
    """
    grid = read_grid(path)
    settings = list(grid_settings(grid))
    columns = ["commit", "config", *grid.grid, "seed", "peer", "round", *grid.metrics]
    wanted = [(setting, seed) for setting in settings for seed in grid.seeds]
    done = _keep_whole(out, columns, {setting.digest: setting.peers * setting.rounds for setting in settings})
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
    try:
        return SweepGrid.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UserError(f"cannot read the grid {path}: {error.strerror}") from None
    except ValidationError as error:
        raise UserError(_explain(error)) from None
    except ValueError as error:  # TOMLDecodeError, UnicodeDecodeError
        raise UserError(f"{path} is not valid TOML: {error}") from None


def grid_settings(grid: SweepGrid) -> Iterator[Setting]:
    """Every combination of the grid's values; the last key changes fastest. Raises UserError."""
    for values in product(*grid.grid.values()):
        chosen = dict(zip(grid.grid, values, strict=True))
        table: dict[str, Any] = {"link": dict(grid.link), "speed": dict(grid.speed)}
        keys: dict[str, Any] = {}
        for key, value in chosen.items():
            section, _, name = key.partition(".")
            if key in ("peers", "rounds"):
                table[key] = value
            elif section in table:
                table[section][name] = value
            else:
                keys[key] = value
        try:
            one = grid.model_validate({**grid.model_dump(include={"peers", "rounds"}), **table})
        except ValidationError as error:
            raise UserError(_explain(error)) from None
        yield Setting(
            values=chosen,
            peers=one.peers,
            rounds=one.rounds,
            config=load_config(flags={**grid.config, **keys}),
            link=_made(LinkModel, "link", one.link),
            speed=_made(Speed, "speed", one.speed),
        )


def simulate(setting: Setting, seed: int, metrics: Sequence[str]) -> list[list[Any]]:
    """[peer, round, *metrics] for every round of every peer; an absent metric is empty."""
    peers = [Peer(setting.config, setting.speed, setting.link) for _ in range(setting.peers)]
    Simulation(manifest_for(setting.config), peers, seed).run(setting.rounds)
    return [
        [number, line["round"], *(line.get(name, "") for name in metrics)]
        for number, peer in enumerate(peers)
        for line in peer.metrics
    ]


def code_version() -> str:
    """Commit of the repository that this code runs from, with `+` if there are changes; else the version."""
    folder = Path(__file__).parent
    try:
        git = ["git", "-C", str(folder)]
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True)
        tracked = subprocess.run([*git, "ls-files", "--error-unmatch", __file__], capture_output=True, timeout=10)
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return __version__
    if tracked.returncode:  # this package is installed inside another repository
        return __version__
    return commit.stdout.strip()[:12] + ("+" if changed.stdout else "")


def _made(kind: type[Any], section: str, values: Mapping[str, Any]) -> Any:
    """The dataclass `kind` with these fields. Raises UserError."""
    unknown = values.keys() - {field.name for field in dataclasses.fields(kind)}
    if unknown:
        raise UserError(f"unknown key {section}.{min(unknown)} in the grid")
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        raise UserError(_explain(error, section)) from None


def _explain(error: ValidationError, *where: str) -> str:
    problem = error.errors(include_url=False)[0]
    key = ".".join(map(str, (*where, *problem["loc"])))
    return f"{key} = {problem['input']!r} in the grid: {problem['msg']}"


def _keep_whole(out: Path, columns: Sequence[str], whole: Mapping[str, int]) -> set[tuple[str, str]]:
    """(config, seed) of the complete simulations in `out`. Drops other rows, and creates the file if there is none.

    Raises UserError if it has other columns.
    """
    kept: list[list[str]] = []
    done: set[tuple[str, str]] = set()
    with os_errors_explained(out):
        text = out.read_text(encoding="utf-8") if out.exists() else ""
        rows = list(csv.reader(io.StringIO(text)))
        if rows and rows[0] != list(columns):
            raise UserError(f"{out} has other columns than this grid: give another --out")
        place = {name: i for i, name in enumerate(columns)}
        entire = [row for row in rows[1:] if len(row) == len(columns)]
        counts = Counter((row[place["config"]], row[place["seed"]]) for row in entire)
        for row in entire:
            key = row[place["config"]], row[place["seed"]]
            if counts[key] == whole.get(key[0], counts[key]):
                kept.append(row)
                done.add(key)
        half = out.with_name(out.name + ".part")
        half.write_text(_csv([columns, *kept]), encoding="utf-8")
        half.replace(out)
    return done


def _append(out: Path, rows: Sequence[Sequence[Any]]) -> None:
    with os_errors_explained(out), out.open("a", encoding="utf-8") as file:
        file.write(_csv(rows))
        file.flush()
        os.fsync(file.fileno())


def _csv(rows: Sequence[Sequence[Any]]) -> str:
    """Rows as text; a list or table in a cell becomes JSON."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        writer.writerow([json.dumps(cell) if isinstance(cell, list | dict | bool) else cell for cell in row])
    return text.getvalue()
