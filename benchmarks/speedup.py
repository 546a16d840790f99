"""How much sooner is a member where a node alone ends, with N peers? CPU seconds of one member, by N.

    python -m benchmarks.speedup [--settings steps-8 plain] [--peers 2 4 8 16] [--seeds 0 1 2]
    python -m benchmarks.speedup --report
    python -m benchmarks.speedup --quick         # one seed of `format`, two peers, few rounds; nothing is stored

`alone` is the arm `silo` of `benchmarks.sharing`; `swarm` its arm `new` with N peers, each with a virtual clock. These
two, with N = 8, are rows of that benchmark: what it has run is read, and what is run here it reads.
`pooled` is one learner that samples 32 N groups a round and trains on all of them, as if N machines were one: its CPU
seconds are divided by N. Speed-up = CPU seconds that `alone` takes to the level at which it ends / those of a member.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from math import nan
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from benchmarks import sharing
from benchmarks.common import RESULTS, machine, spent, table, write_row
from benchmarks.intervals import first_reach
from benchmarks.sharing_arms import ARMS, Arm
from benchmarks.sharing_report import end_level, levels, paired, ranged, times
from benchmarks.sharing_settings import SETTINGS

FOLDER = RESULTS / "speedup"
PLOT = Path(__file__).parent.parent / "docs" / "images" / "speedup.png"
PEERS = (2, 4, 8, 16)
SHARED = {("alone", 1): "silo", ("swarm", sharing.PEERS): "new"}
"""(kind, N) -> the arm of `benchmarks.sharing` whose rows these are."""
LABELS = {"steps-8": "long answers", "plain": "bare answers"}
Row = dict[str, Any]


def arm_of(kind: str, peers: int) -> Arm:
    if kind == "swarm":
        return ARMS["new"]
    silo = ARMS["silo"]
    return silo if kind == "alone" else replace(silo, own=silo.own * peers, peers=1)


def row_of(setting: str, kind: str, peers: int, seed: int, rounds: int) -> Row:
    simulated = sharing.SILOS if kind == "alone" else peers
    figures = sharing.run(SETTINGS[setting], arm_of(kind, peers), seed, simulated, rounds)
    head = {"setting": setting, "kind": kind, "n": peers, "seed": seed}
    return head | {"arm": "new" if kind == "swarm" else "silo"} | figures | {"machine": machine()}


def path_of(setting: str, kind: str, peers: int, seed: int) -> Path:
    if (kind, peers) in SHARED:
        return sharing.path_of(setting, SHARED[kind, peers], seed)
    return FOLDER / setting / f"{kind}-{peers}-{seed}.json"


def load(setting: str) -> dict[tuple[str, int], dict[int, Row]]:
    """(kind, N) -> seed -> row."""
    rows = sharing.load(setting)
    found = {key: rows[arm] for key, arm in SHARED.items() if arm in rows}
    for path in sorted((FOLDER / setting).glob("*.json")):
        row = json.loads(path.read_text())
        found.setdefault((row["kind"], row["n"]), {})[row["seed"]] = row
    return found


def speedups(found: dict[tuple[str, int], dict[int, Row]], kind: str, peers: int) -> dict[int, float]:
    """By seed; 0 = the level was not reached."""
    ratios = {}
    for seed, (alone, row) in paired(found.get(("alone", 1), {}), found.get((kind, peers), {})).items():
        goal = end_level(alone)
        mine = first_reach(levels(row), goal)
        share = peers if kind == "pooled" else 1
        ratios[seed] = times(first_reach(levels(alone), goal), None if mine is None else mine / share)
    return ratios


def report(setting: str) -> str:
    """A Markdown table: speed-up of a member and of pooling, and what a member sends, by N."""
    found = load(setting)
    rows = []
    for peers in sorted({n for kind, n in found if kind == "swarm"}):
        swarm, pooled = (speedups(found, kind, peers) for kind in ("swarm", "pooled"))
        runs = found["swarm", peers].values()
        sent = fmean(run["swarm"]["swarm/bytes_out"] / run["cpu_s"] for run in runs) / 1000
        both = [swarm[seed] / pooled[seed] for seed in swarm if pooled.get(seed)]
        share = f"{100 * fmean(both):.0f} %" if both else ""
        cell = ranged(list(swarm.values())), ranged(list(pooled.values()))
        rows.append([peers, len(swarm), *cell, share, f"{sent:.1f}"])
    columns = ["N", "seeds", "a member, times as soon", "pooled", "of pooling", "kB sent a CPU second"]
    cost = spent(sum(row["cpu_s"] * row["peers"] for runs in found.values() for row in runs.values()))
    return f"**{setting}**\n\n{table(columns, rows)}\n\n{cost}\n"


def plot(settings: Sequence[str], out: Path) -> None:
    """Speed-up over N, median with range over seeds; dotted: pooling. A level that one seed never reaches has none."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), dpi=100, layout="constrained")
    axes = figure.subplots()
    for number, setting in enumerate(settings):
        found = load(setting)
        for kind, style in (("swarm", "o-"), ("pooled", ":")):
            by_size = {
                n: list(speedups(found, kind, n).values()) for n in sorted({n for one, n in found if one == kind})
            }
            sizes, values = [n for n in by_size if by_size[n]], [v for v in by_size.values() if v]
            middle = [1.0, *(median(v) if min(v) else nan for v in values)]
            label = f"{LABELS.get(setting, setting)}: {'a member' if kind == 'swarm' else 'all machines as one'}"
            axes.plot([1, *sizes], middle, style, color=f"C{number}", label=label)
            if kind == "swarm":
                axes.fill_between([1, *sizes], [1.0, *map(min, values)], [1.0, *map(max, values)], alpha=0.15)
    axes.set(xlabel="peers in the swarm", xscale="log")
    axes.set(ylabel="times as soon as a node alone with the defaults", ylim=(0, None))
    axes.set_xticks([1, *PEERS], [str(n) for n in (1, *PEERS)])
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=["steps-8", "plain"], metavar="SETTING")
    parser.add_argument("--peers", type=int, nargs="+", default=list(PEERS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--report", action="store_true", help="tables and plot of all that has been run")
    parser.add_argument("--quick", action="store_true", help="a short look; nothing is stored")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if args.report:
        settings = [setting for setting in SETTINGS if (FOLDER / setting).exists()]
        text = "\n".join(map(report, settings))
        (FOLDER / "report.md").write_text(text)
        print(text)
        plot(settings, PLOT)
    elif args.quick:
        for kind, peers in (("alone", 1), ("swarm", 2), ("pooled", 2)):
            row = row_of("format", kind, peers, 0, rounds=6)
            print(f"{kind} {peers}: {row['cpu_s']:.1f} CPU s, reward {end_level(row):.3f}", flush=True)
    else:
        for seed in args.seeds:
            for setting in args.settings:
                sizes = [("alone", 1), *((kind, n) for n in args.peers for kind in ("swarm", "pooled"))]
                for kind, peers in sizes:
                    path = path_of(setting, kind, peers, seed)
                    if not path.exists():
                        row = row_of(setting, kind, peers, seed, SETTINGS[setting].rounds)
                        write_row(path, row)
                        print(f"{setting} {kind} {peers} seed {seed}: {row['cpu_s']:.1f} CPU s a peer", flush=True)


if __name__ == "__main__":
    main()
