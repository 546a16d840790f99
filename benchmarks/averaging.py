"""How well weights come together for how many bytes: a language model trained by eight replicas, and liars among them.

    python -m benchmarks.averaging [--parts lm attackers] [--arms "per_step" …] [--seeds 0 1 2] [--steps 1000]
    python -m benchmarks.averaging --report

One JSON for each (part, arm, seed) under results/averaging; what is there already is not run again. All arms of a seed
begin with the same weights and see the same text in the same order (`averaging_lm`). Figures:

    own        loss of the replicas' own models on held-out text, nats per byte, mean over (honest) replicas
    merged     loss of the mean of their weights
    gap        own, against per_step of the same seed
    spread     root mean square difference to the mean of the weights, as part of what training changed (root mean
               square of mean - start)
    MB         sent by a replica, mean over replicas: bodies and heads of exchanges
    peak       most bytes that a replica sent in any second of virtual time, looked at four times a second
    CPU s      process time of everything but the evaluation, all replicas together; one thread

lm          8 replicas, 1000 steps; H = 50 inner steps between two exchanges of the same weights where nothing else is
            said, with the papers' outer optimisers
attackers   320 steps, pairs as in `8bit streaming, mean, H=16`; the last 0, 1 or 2 of 8 lie
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.averaging_lm import Arm, Run, Task
from benchmarks.common import RESULTS, machine, table, write_row

FOLDER = RESULTS / "averaging"
PLOT = Path(__file__).parent.parent / "docs" / "images" / "averaging.png"
SEARCHED_FROM = 100
"""Seeds from here on were used to search settings, and are not reported."""

PAIRS = {"method": "noloco", "alpha": 0.5, "beta": 0.7, "gamma": 0.7}
"""The paper's outer step."""
STREAMING = {**PAIRS, "fragments": 4}
MEAN = {"alpha": 0.0, "beta": 1.0, "gamma": 1.0}
"""Both take the mean of the pair: no momentum, no step beyond it."""
LM = {
    "none": Arm(),
    "per_step": Arm({"method": "per_step"}, every=1),
    "diloco": Arm({"method": "diloco"}),
    "noloco": Arm(PAIRS),
    "noloco 8bit streaming": Arm({**STREAMING, "codec": "8bit"}),
    "noloco 4bit streaming": Arm({**STREAMING, "codec": "4bit"}),
    "noloco 8bit streaming, mean, H=16": Arm({**STREAMING, **MEAN, "codec": "8bit"}, every=16),
    "noloco 4bit streaming, mean, H=8": Arm({**STREAMING, **MEAN, "codec": "4bit"}, every=8),
}
DEFENCES: dict[str, dict[str, Any]] = {
    "off": {},
    "clip": {"clip": 1.5},
    "gates": {"gates": True},
    "all": {"clip": 1.5, "gates": True, "probe": True},
}
LIES = ("flip", "noise", "stale", "drift")
ATTACKERS = {
    f"{liars} {lie} {defence}".replace("  ", " "): Arm(
        {**STREAMING, **MEAN, "codec": "8bit", **options}, every=16, liars=liars, lie=lie
    )
    for liars, lies in ((0, ("",)), (1, LIES), (2, LIES))
    for lie in lies
    for defence, options in DEFENCES.items()
}
PARTS: dict[str, tuple[Task, dict[str, Arm]]] = {
    "lm": (Task(), LM),
    "attackers": (Task(steps=320), ATTACKERS),
}
SEEDS = {"lm": (0, 1, 2), "attackers": (0,)}


def path_of(part: str, task: Task, arm: str, seed: int) -> Path:
    usual = PARTS[part][0]
    size = "" if task == usual else f"-{task.replicas}x{task.steps}{'' if task.alike else '-unlike'}"
    return FOLDER / f"{part}{size}" / f"{arm.replace(',', '').replace(' ', '_')}-{seed}.json"


def run_missing(part: str, task: Task, arms: Sequence[str], seeds: Sequence[int]) -> None:
    for seed in seeds:
        for name in arms:
            path = path_of(part, task, name, seed)
            if path.exists():
                continue
            figures = Run(task, PARTS[part][1][name], seed).figures(lambda text: print(f"  {text}", flush=True))
            head = {"part": part, "arm": name, "seed": seed, "task": vars(task)}
            write_row(path, head | figures | {"machine": machine()})
            keys = ("loss", "loss_of_mean", "spread_of_progress", "bytes", "peak_bytes_per_s", "cpu_s")
            print(f"{part}  {name}  seed {seed}  " + "  ".join(f"{key} {figures[key]:.4g}" for key in keys), flush=True)


def load(part: str, task: Task) -> dict[str, dict[int, dict[str, Any]]]:
    """Arm -> seed -> figures, arms in the order of PARTS."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for path in sorted(path_of(part, task, "", 0).parent.glob("*.json")):
        figures = json.loads(path.read_text())
        if figures["seed"] < SEARCHED_FROM:
            found.setdefault(figures["arm"], {})[figures["seed"]] = figures
    return {arm: found[arm] for arm in PARTS[part][1] if arm in found}


# --------------------------------------------------------------------- report


def spanned(values: Sequence[float], form: str) -> str:
    """Mean, smallest and largest."""
    if len(values) == 1:
        return f"{values[0]:{form}}"
    return f"{fmean(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def against(runs: dict[int, Any], base: dict[int, Any], ratio: Callable[[Any, Any], float], form: str) -> str:
    both = sorted(runs.keys() & base.keys())
    return spanned([ratio(runs[s], base[s]) for s in both], form) if both else ""


def report_lm(task: Task) -> str:
    found = load("lm", task)
    dense, group = found.get("per_step", {}), found.get("diloco", {})
    rows = []
    for arm, runs in found.items():
        mean = lambda key, runs=runs: fmean(f[key] for f in runs.values())  # noqa: E731
        rows.append(
            [
                arm,
                len(runs),
                f"{mean('loss'):.4f}",
                against(runs, dense, lambda a, b: 100 * (a["loss"] / b["loss"] - 1), "+.2f"),
                f"{mean('loss_of_mean'):.4f}",
                against(runs, dense, lambda a, b: 100 * (a["loss_of_mean"] / b["loss_of_mean"] - 1), "+.2f"),
                f"{100 * mean('spread_of_progress'):.1f}",
                f"{mean('bytes') / 1e6:.4g}",
                against(runs, dense, lambda a, b: b["bytes"] / max(a["bytes"], 1), ".0f") if mean("bytes") else "",
                f"{mean('peak_bytes_per_s') / 1e6:.3g}",
                against(runs, group, lambda a, b: b["peak_bytes_per_s"] / max(a["peak_bytes_per_s"], 1), ".3g")
                if mean("bytes")
                else "",
                f"{fmean(f['counts'].get('exchanges', 0) for f in runs.values()):.0f}",
                f"{mean('cpu_s'):.0f}",
            ]
        )
    columns = ["arm", "seeds", "own", "gap, %", "merged", "gap, %", "spread, %", "MB"]
    columns += ["x fewer than per_step", "peak, MB/s", "x lower than diloco", "exchanges", "CPU s"]
    some = next(iter(next(iter(found.values())).values()))
    says = f"{some['parameters']:,} parameters, {task.replicas} replicas, {task.steps} steps of"
    says += f" {task.batch} x {task.length} bytes; loss before {some['loss_before']:.3f}"
    return f"**lm**: {says}\n\n{table(columns, rows)}\n"


def report_attackers(task: Task) -> str:
    found = load("attackers", task)
    rows = []
    for who in ["0", *(f"{liars} {lie}" for lie in LIES for liars in (1, 2))]:
        for merged in ("loss", "loss_of_mean"):
            cells = []
            for defence in DEFENCES:
                runs = found.get(f"{who} {defence}", {})
                cells.append(spanned([f[merged] for f in runs.values()], ".3f") if runs else "")
            refused = found.get(f"{who} all", {}).values()
            shown = ""
            if merged == "loss" and refused:
                of = [f["counts"] for f in refused]
                shown = ", ".join(
                    f"{fmean(c.get(name, 0) for c in of):.3g} {name.removeprefix('skipped/')}"
                    for name in ("exchanges", "skipped/gates", "skipped/probe", "skipped/values")
                )
            if any(cells):
                rows.append([who, {"loss": "own", "loss_of_mean": "merged"}[merged], *cells, shown])
    columns = ["liars", "loss of", *DEFENCES, "with all, per honest replica"]
    return f"**attackers**: {task.replicas} replicas, {task.steps} steps\n\n{table(columns, rows)}\n"


def plot(task: Task, out: Path) -> None:
    """Loss over steps and over bytes, mean of the seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), dpi=100, layout="constrained")
    steps, sent = figure.subplots(1, 2, sharey=True)
    for number, (arm, runs) in enumerate(load("lm", task).items()):
        curves = [f["curve"] for f in runs.values()]
        points = [[fmean(column) for column in zip(*at, strict=True)] for at in zip(*curves, strict=True)]
        style = {"lw": 2.2 if arm == "per_step" else 1.4, "color": f"C{number}", "label": arm}
        steps.plot([p[0] for p in points], [p[1] for p in points], **style)
        if points[-1][2]:
            seen = [p for p in points if p[2]]
            sent.plot([p[2] / 1e6 for p in seen], [p[1] for p in seen], **style)
    steps.set(xlabel="inner step", ylabel="held-out loss of own models, nats per byte")
    sent.set(xlabel="MB sent by a replica", xscale="log")
    steps.legend(frameon=False, fontsize=8)
    for axes in (steps, sent):
        axes.spines[["top", "right"]].set_visible(False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="of those of the parts")
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--unlike", action="store_true", help="replicas have text of different kinds")
    parser.add_argument("--report", action="store_true", help="tables and plot of all that has been run")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    texts = []
    for part in args.parts:
        task, arms = PARTS[part]
        task = replace(task, steps=args.steps or task.steps, alike=not args.unlike)
        if not args.report:
            wanted = [arm for arm in arms if args.arms is None or arm in args.arms]
            run_missing(part, task, wanted, args.seeds or SEEDS[part])
        elif load(part, task):
            texts.append({"lm": report_lm, "attackers": report_attackers}[part](task))
            if part == "lm":
                plot(task, PLOT)
    if args.report:
        (FOLDER / "report.md").write_text("\n".join(texts))
        print("\n".join(texts))


if __name__ == "__main__":
    main()
