"""A crew of real processes on this machine: killed again and again, and against the clock.

    python -m benchmarks.crew --part kills [--settings default checkfree swap] [--seeds 0 1 2] [--no-kills]
    python -m benchmarks.crew --part speed [--seeds 0 1 2]
    python -m benchmarks.crew --report

kills   (`crew_kills`) Four stages of a starter of eight layers learn the small tasks by GRPO. Every 30 s for 10 minutes
        the holder of a random stage is killed (SIGKILL, with its network processes) and the same command started again.
        And the control: as long, and nobody is killed. `default`: a neighbour keeps a copy of each stage, renewed every
        20 updates, and each writes checkpoints; `copies`: without checkpoints, as if each process began on a new
        machine; `checkfree`: copies of the ends only, so a lost middle stage is the mean of its neighbours; `swap`:
        ends are copies of their neighbours. In the last two nobody writes checkpoints either.
speed   (`crew_speed`) A crew of one stage against the plain policy, part by part; crews of 1, 2 and 4 stages.

One JSON for each run under results/crew; what is there already is not run again. A kill for which it is time while the
crew has not finished a round since the last one is left out, and counted. Figures of kills:

    detected   seconds from the kill until a survivor says that the peer is lost
    whole      until every stage is held again
    round      until a round ends, the first after that
    by         how the lost stage came back; `own` = its holder is the victim's new process
    rounds     done in all; some, after a lead was lost, twice
    reward     mean over windows: of time, all rounds that ended in it; of rounds, each as it was done last

Of speed: `bubble` is the share of update time (from the first microbatch to the sum of squares) in which the lead, that
is stage 0, neither computed nor handled messages; what it waits for is the other stages, the network between, and a
core: there are fewer cores than stages. `theory` = (K - 1) / (M + K - 1) for K stages and M microbatches, as many as
the plain policy has with the same seeds and settings. Bytes are those of the lead's messages to other peers, for each
token that is sampled or passes through in training.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import crew_kills as kills
from benchmarks import crew_speed as speed
from benchmarks.common import RESULTS, machine, median, table, write_row
from benchmarks.processes import mind_signals, other_load

FOLDER = RESULTS / "crew"
SEEDS = (0, 1, 2)
STAGES, SECONDS, EVERY_S = 4, 600.0, 30.0
ROUNDS = 40
WINDOWS = 10
Row = dict[str, Any]
Rounds = Sequence[Sequence[float]]
"""[seconds since the first round, number, reward]"""


# --------------------------------------------------------------------- files


def write(path: Path, figures: Row) -> None:
    write_row(path, figures | {"machine": machine()})
    print(f"written to {path}", flush=True)


def load(folder: Path) -> list[Row]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def kills_folder(stages: int, seconds: float) -> Path:
    return FOLDER / "kills" / f"{stages}-{seconds:g}"


def run_kills(args: argparse.Namespace) -> None:
    for seed in args.seeds:
        for settings in args.settings:
            for killed in (False,) if args.no_kills else (True, False):
                name = f"{settings}-{'killed' if killed else 'control'}-{seed}.json"
                path = kills_folder(args.stages, args.seconds) / name
                if path.exists():
                    continue
                before = other_load()
                print(f"{path.stem}: {before}", flush=True)
                figures = kills.run_one(settings, seed, args.stages, args.seconds, EVERY_S, killed)
                write(path, figures | {"other load": before})


def run_speed(args: argparse.Namespace) -> None:
    for seed in args.seeds:
        for model, size in speed.MODELS.items():
            path = FOLDER / "overhead" / f"{model}-{seed}.json"
            if not path.exists():
                before = other_load()
                print(f"overhead {path.stem}: {before}", flush=True)
                write(path, speed.overhead(model, seed, args.rounds) | {"other load": before})
            for arm, (stages, _) in speed.ARMS.items():
                path = FOLDER / "processes" / f"{model}-{arm.replace(', ', '_')}-{seed}.json"
                if not path.exists() and stages <= size.layers:
                    before = other_load()
                    print(f"processes {path.stem}: {before}", flush=True)
                    write(path, speed.processes(model, arm, seed, args.rounds) | {"other load": before})


# --------------------------------------------------------------------- report


def report_kills(runs: Sequence[Row], seconds: float) -> str:
    """Times, ways, rewards."""
    if not runs:
        return ""
    times, ways, curves = [], [], []
    for settings in kills.SETTINGS:
        killed = [run for run in runs if run["settings"] == settings and run["killed"]]
        control = {run["seed"]: run for run in runs if run["settings"] == settings and not run["killed"]}
        every = [kill for run in killed for kill in run["kills"]]
        if every:
            cells = [settings, len(killed), len(every), sum(kill["lead"] for kill in every)]
            cells += [sum(len(kill["stages"]) > 1 for kill in every)]
            cells += [_quantiles([kill[what] for kill in every]) for what in ("detected", "whole", "round")]
            cells += [sum(run["skipped"] for run in killed), sum(run["survivors_restarted"] for run in killed)]
            times.append(cells)
            counted = Counter(
                ("end" if int(stage) in (0, run["stages"] - 1) else "middle", way, kill["name"] in kill["by"])
                for run in killed
                for kill in run["kills"]
                for stage, way in kill["ways"].items()
            )
            ways += [
                [settings, where, way, "own" if own else "neighbour", n]
                for (where, way, own), n in sorted(counted.items())
            ]
        both = {run["seed"] for run in killed} & control.keys()
        pairs = [(run["rounds"], control[run["seed"]]["rounds"]) for run in killed if run["seed"] in both]
        alone = [(run["rounds"],) for run in killed if run["seed"] not in both]
        curves += _curves(settings, pairs, seconds) + _curves(settings, alone, seconds)
    parts = [
        f"**kills**: a stage every {runs[0]['every']:g} s for {seconds:g} s, {runs[0]['stages']} stages",
        table(
            [
                "settings",
                "seeds",
                "kills",
                "of the lead",
                "of several stages at once",
                *_PERCENTILES,
                "left out",
                "survivors restarted",
            ],
            times,
        ),
        table(["settings", "stage", "way", "by", "times"], ways),
        table(["settings", "seeds", "run", "rounds", *(f"{k + 1}" for k in range(WINDOWS))], curves),
    ]
    return "\n\n".join(parts) + "\n"


_PERCENTILES = ("detected: p50, p95, most (s)", "whole", "round")


def _quantiles(values: Sequence[float | None]) -> str:
    return ", ".join(f"{kills.quantile(values, q):.1f}" for q in (0.5, 0.95, 1.0))


def _curves(settings: str, pairs: Sequence[tuple[Rounds, ...]], seconds: float) -> list[list[Any]]:
    """Reward of (killed, control), or of (killed,), by windows of equal time, and of equal rounds (as many as both have
    done): means over seeds."""
    rows: list[list[Any]] = []
    for name, column in (("time", 0), ("rounds", 1)):
        for i, which in enumerate(("killed", "control")[: len(pairs[0]) if pairs else 0]):
            means, done = [], []
            for pair in pairs:
                end = seconds if column == 0 else min(max(line[1] for line in lines) for lines in pair)
                ends = [end * (k + 1) / WINDOWS for k in range(WINDOWS)]
                means.append(kills.curve(pair[i] if column == 0 else kills.final(pair[i]), ends, column))
                done.append(len(pair[i]) if column == 0 else end)
            windows = [_mean([m for m in window if not math.isnan(m)]) for window in zip(*means, strict=True)]
            rows.append([settings, len(pairs), f"{which}, by {name}", f"{fmean(done):.0f}", *windows])
    return rows


def _mean(values: Sequence[float]) -> str:
    return f"{fmean(values):.3f}" if values else ""


def report_overhead(runs: Sequence[Row]) -> str:
    rows = []
    for model in speed.MODELS:
        for size in ("usual", "processes"):
            mine = [run[size] for run in runs if run["model"] == model]
            if not mine:
                continue
            cells: list[Any] = [model, len(mine), f"{fmean(m for one in mine for m in one['microbatches']):.1f}"]
            for part in speed.PARTS:
                for clock in ("cpu", "wall"):
                    key = f"{part}_{clock}"
                    ratios = [speed.ratio(one["times"][key], one["tokens"]) for one in mine]
                    plain = 1000 * median([t for one in mine for t in one["times"][key][0]])
                    cells.append(f"{100 * (median(ratios) - 1):+.0f} % of {plain:.0f} ms")
            rows.append(cells)
    columns = [
        "model",
        "seeds",
        "microbatches",
        *(f"{part}, {clock}" for part in speed.PARTS for clock in ("CPU", "wall")),
    ]
    return f"**a crew of one over the plain policy**, per token\n\n{table(columns, rows)}\n" if rows else ""


def report_processes(runs: Sequence[Row], overheads: Sequence[Row]) -> str:
    rows = []
    for model in speed.MODELS:
        plans = [m for run in overheads if run["model"] == model for m in run["processes"]["microbatches"]]
        for arm, (stages, codec) in speed.ARMS.items():
            mine = [run for run in runs if run["model"] == model and run["arm"] == arm]
            if not mine:
                continue
            network = [run["cpu_s"]["p2pd"] + run["cpu_s"]["gossip"] for run in mine]
            rows.append(
                [
                    model,
                    stages or "local",
                    codec if stages > 1 else "",
                    len(mine),
                    *(_middle(mine, name) for name in ("perf/generated_tok_s", "perf/trained_tok_s")),
                    _middle(mine, "step_time", 3),
                    f"{fmean(run['cpu_s']['node'] for run in mine):.2f} + {fmean(network):.2f}",
                    _middle(mine, "stages/bubble", 2) if stages > 1 else "",
                    f"{speed.theory(stages, plans):.2f} (M = {fmean(plans):.1f})" if stages > 1 and plans else "",
                    _middle(mine, "stages/bytes_per_token") if stages > 1 else "",
                ]
            )
    columns = [
        "model",
        "stages",
        "codec",
        "seeds",
        "sampled/s",
        "trained/s",
        "round (s)",
        "CPU s a round: nodes + network",
    ]
    columns += ["bubble", "theory", "bytes a token"]
    return f"**crews of real processes**, medians over rounds\n\n{table(columns, rows)}\n" if rows else ""


def _middle(runs: Sequence[Row], name: str, digits: int = 0) -> str:
    values = [value for run in runs for value in run[name]]
    return f"{median(values):.{digits}f}" if values else ""


def report(stages: int, seconds: float) -> str:
    overheads = load(FOLDER / "overhead")
    parts = [
        report_kills(load(kills_folder(stages, seconds)), seconds),
        report_overhead(overheads),
        report_processes(load(FOLDER / "processes"), overheads),
    ]
    return "\n".join(filter(None, parts))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("kills", "speed"), default="kills")
    parser.add_argument("--settings", nargs="+", choices=list(kills.SETTINGS), default=list(kills.SETTINGS))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--stages", type=int, default=STAGES, help="of kills")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of kills")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of speed")
    parser.add_argument("--no-kills", action="store_true", help="only the controls")
    parser.add_argument("--report", action="store_true", help="tables of all that has been run")
    args = parser.parse_args(argv)
    if args.report:
        text = report(args.stages, args.seconds)
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / "report.md").write_text(text)
        print(text)
        return
    mind_signals()
    {"kills": run_kills, "speed": run_speed}[args.part](args)


if __name__ == "__main__":
    main()
