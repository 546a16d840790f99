"""What becomes of training when machines with a stage of the policy vanish, and what it costs to go on.

    python -m benchmarks.recovery [--part lm] [--arms checkfree …] [--rates 0.0013 …] [--seeds 0 1 2]
    python -m benchmarks.recovery --report

lm    from scratch (`recovery_lm`): 2 M parameters, 8 layers in 4 stages, 1500 steps of 256 bytes
rl    GRPO with an adapter, from a taught policy (`recovery_rl`): 8 layers in 4 stages, 200 steps

One JSON for each (part, rate, arm, seed) under results/recovery; what is there already is not run again, and what
matters most comes first. Each stage is lost with probability `rate` at the beginning of each step; all arms of a rate
and a seed lose the same stages at the same steps. The paper's hourly rates of 5, 10 and 16 % are 0.0013, 0.0025 and
0.004 at 91 s a step.

Arms that rebuild a stage from others (`recovery_methods`) are trained. At the ends, where CheckFree has
no rule, all of them copy the neighbour; the paper lets ends be lost only under CheckFree+. `replica, k` is the weights
of that very stage as a neighbour copied them at the last multiple of k steps, while all others stay where they are.
Exact ones (checkpoint, redundant computation, a neighbour's replica of weights and moments) are not trained: they have
the figures of `none` of their seed, later. Figures:

    excess    loss of steps 45 to 55 after a loss (fresh text, before the update) less that of `none` in the same steps
              and seed; of `none, swapped` where the arm swaps. Of middle stages and of ends
    final     loss on held-out text after the last step
    hours     in the costs of `recovery_costs`, to the last step, and until a target loss is reached on held-out text
    target    the loss of `none` of the same seed at 60 %, and at 80 %, of its steps; "> " if not reached: at least the
              hours to the last step

Of rl, whose rewards are means over the samples of a step:

    cum       reward, summed over steps
    last 20   reward, mean over the last 20 steps
    pass@1    on held-out questions, after the last step; 8 samples each, right = rewarded
    at once   pass@1 on some held-out questions right after a loss, less the same right before it
    later     reward of steps 10 to 20 after a loss, less that of `none` (`none, swapped`) in the same steps
    steps     run in all, those done again among them
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks import recovery_costs as costs
from benchmarks import recovery_rl as rl
from benchmarks.common import RESULTS, machine, table, write_row
from benchmarks.recovery_lm import Arm, Run, Task, failures

FOLDER = RESULTS / "recovery"
TASK = Task()
RATES = (0.0013, 0.0025, 0.004, 0.01)
SEEDS = (0, 1, 2)
SEARCHED_FROM = 100
"""Seeds from here on were used to search settings, and are not reported."""
ARMS = {
    "none": Arm(),
    "none, swapped": Arm(swapped=True),
    "checkfree": Arm("checkfree"),
    "checkfree+": Arm("checkfree", swapped=True),
    "uniform": Arm("uniform"),
    "copy": Arm("copy"),
    "random": Arm("random"),
    "checkfree, clipped": Arm("checkfree", norms="clipped"),
    "checkfree, squared": Arm("checkfree", norms="squared"),
    "replica, 1": Arm("replica"),
    "replica, 20": Arm("replica", every=20),
    "replica, 100": Arm("replica", every=100),
    "checkfree+, twins": Arm("checkfree", swapped=True, twins=True),
}
WITHOUT = tuple(name for name, arm in ARMS.items() if not arm.method)
PLAN: Sequence[tuple[Sequence[float], Sequence[str]]] = (
    ((0.0,), WITHOUT),
    (RATES, ("checkfree", "checkfree+")),
    ((0.0025, 0.01), ("replica, 1", "replica, 20")),
    ((0.0025, 0.01), ("uniform", "copy")),
    ((0.0025,), ("random",)),
    ((0.004,), ("checkfree, clipped", "checkfree, squared", "replica, 20")),
    ((0.0025, 0.01), ("replica, 100",)),
    ((0.0013, 0.004), ("uniform", "copy", "replica, 1", "replica, 100")),
    ((0.0013,), ("replica, 20",)),
    ((0.004,), ("checkfree+, twins",)),
    ((0.0013, 0.004, 0.01), ("random",)),
)
"""In this order: rates, arms."""
RL_TASK = rl.Task()
RL_ARMS = {
    "none": rl.Arm(),
    "none, swapped": rl.Arm(swapped=True),
    "replica": rl.Arm("replica"),
    "weights": rl.Arm("weights"),
    "fresh": rl.Arm("fresh"),
    "checkfree": rl.Arm("checkfree"),
    "checkfree+": rl.Arm("checkfree", swapped=True),
}
RL_PLAN: Sequence[tuple[Sequence[float], Sequence[str]]] = (
    ((0.0,), ("none", "none, swapped")),
    ((0.01, 0.0025), ("replica", "weights", "fresh", "checkfree", "checkfree+")),
)
PLANS = {"lm": PLAN, "rl": RL_PLAN}
CHECKPOINTS = (40, 50, 100)
"""Steps between them in the paper; the best number for the rate is shown besides."""
LONGEST = 200
"""Times its steps may a run with checkpoints take."""
TARGETS = (0.6, 0.8)
AFTER, RL_AFTER = range(45, 55), range(10, 20)
"""Steps after a loss of which `excess`, or `later`, is the mean."""


# --------------------------------------------------------------------- files


def path_of(part: str, rate: float, arm: str, seed: int) -> Path:
    return FOLDER / part / f"{rate:g}" / f"{arm.replace(',', '').replace(' ', '_')}-{seed}.json"


def run_missing(args: argparse.Namespace) -> None:
    for rates, arms in PLANS[args.part]:
        for seed in args.seeds:
            for rate in rates:
                for name in arms:
                    path = path_of(args.part, rate, name, seed)
                    wanted = (not args.arms or name in args.arms) and (not rate or rate in args.rates)
                    if wanted and not path.exists():
                        write(path, {"lm": run_lm, "rl": run_rl}[args.part](rate, name, seed))


def run_lm(rate: float, name: str, seed: int) -> dict[str, Any]:
    trace = failures(rate, seed, TASK.steps, TASK.stages)
    figures = Run(TASK, ARMS[name], trace, seed).figures()
    print(
        f"lm  {rate:g}  {name}  seed {seed}  loss {figures['loss']:.4f}  rebuilt {len(figures['rebuilt'])}"
        f"  cpu_s {figures['cpu_s']:.0f}",
        flush=True,
    )
    return {"part": "lm", "rate": rate, "arm": name, "seed": seed, "task": vars(TASK)} | figures


def run_rl(rate: float, name: str, seed: int) -> dict[str, Any]:
    trace = failures(rate, seed, RL_TASK.steps, RL_TASK.stages)
    figures = rl.Run(RL_TASK, RL_ARMS[name], trace, seed).figures()
    print(
        f"rl  {rate:g}  {name}  seed {seed}  cum {figures['cum']:.2f}  last_20 {figures['last_20']:.3f}"
        f"  pass@1 {figures['held_out']['pass_1']:.3f}  cpu_s {figures['cpu_s']:.0f}",
        flush=True,
    )
    return {"part": "rl", "rate": rate, "arm": name, "seed": seed, "task": vars(RL_TASK)} | figures


def write(path: Path, figures: dict[str, Any]) -> None:
    write_row(path, figures | {"machine": machine()})


def load(part: str, rate: float) -> dict[str, dict[int, dict[str, Any]]]:
    """Arm -> seed -> figures, arms in the order they are written in."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for path in sorted(path_of(part, rate, "", 0).parent.glob("*.json")):
        figures = json.loads(path.read_text())
        if figures["seed"] < SEARCHED_FROM:
            found.setdefault(figures["arm"], {})[figures["seed"]] = figures
    return {arm: found[arm] for arm in {"lm": ARMS, "rl": RL_ARMS}[part] if arm in found}


# --------------------------------------------------------------------- report


def excess(figures: dict[str, Any], without: dict[str, Any], stages: Sequence[int]) -> list[float]:
    """Of each loss of one of `stages` that was early enough to be looked at."""
    lost = [r["step"] for r in figures["rebuilt"] if r["stage"] in stages and r["step"] + AFTER.stop <= TASK.steps]
    return [fmean(figures["losses"][step + k] - without["losses"][step + k] for k in AFTER) for step in lost]


def hours_of(rate: float, seed: int) -> dict[str, list[float]]:
    """Seconds after 0, 1, ... steps of whatever is not trained, by its name."""
    trace = failures(rate, seed, LONGEST * TASK.steps, TASK.stages)
    own = trace[: TASK.steps]
    best = costs.best_interval(rate, TASK.stages)
    return {
        "redundant": costs.rebuilt_s(own, costs.REDUNDANT_S),
        **{f"checkpoint, {k}": costs.checkpoint_s(trace, TASK.steps, k) for k in CHECKPOINTS},
        f"checkpoint, best ({best})": costs.checkpoint_s(trace, TASK.steps, best),
        "checkpoint, 50, free": costs.checkpoint_s(trace, TASK.steps, 50, save_s=0.0),
        "replica": costs.replica_s(own),
    }


Times = list[tuple[float, bool]]
"""Hours of each seed, and whether the target was reached by then."""


def to_target(curve: Sequence[Sequence[float]], ends: Sequence[float], target: float) -> tuple[float, bool]:
    step = costs.reached(curve, target)
    return (ends[-1] / 3600, False) if step is None else (costs.at(ends, step) / 3600, True)


def shown(times: Times) -> str:
    return f"{'' if all(ok for _, ok in times) else '> '}{fmean(hours for hours, _ in times):.1f}"


def faster(times: Times, rival: Times) -> str:
    """Percent less time than the rival, mean over seeds."""
    percent = [100 * (1 - mine / theirs) for (mine, _), (theirs, _) in zip(times, rival, strict=True)]
    return f"{'' if all(ok for _, ok in times) else '< '}{fmean(percent):+.0f}"


@dataclass(frozen=True)
class Rate:
    """All that was run at a rate."""

    seeds: list[int]
    arms: dict[str, dict[int, tuple[dict[str, Any], list[float]]]]
    """Name -> seed -> figures, and the seconds after 0, 1, ... steps. Exact ones have the figures of `none`."""
    targets: dict[int, list[float]]
    """Seed -> losses."""
    best: str
    """Which of them is the checkpoint at the best interval."""

    def times(self, name: str, target: int, seeds: Sequence[int] | None = None) -> Times:
        runs = self.arms[name]
        return [to_target(runs[s][0]["curve"], runs[s][1], self.targets[s][target]) for s in seeds or runs]


def runs_at(rate: float) -> Rate | None:
    found, none = load("lm", rate), load("lm", 0.0).get("none", {})
    seeds = sorted({seed for runs in found.values() for seed in runs.keys() & none.keys()} or none)
    if not seeds:
        return None
    clocks = {seed: hours_of(rate, seed) for seed in seeds}
    arms = {}
    for arm, runs in found.items():
        both = sorted(runs.keys() & none.keys())
        if both:
            arms[arm] = {s: (runs[s], costs.rebuilt_s(failures(rate, s, TASK.steps, TASK.stages))) for s in both}
    for name in clocks[seeds[0]]:
        arms[name] = {s: (none[s], clocks[s][name]) for s in seeds}
    targets = {seed: [value(none[seed]["curve"], share * TASK.steps) for share in TARGETS] for seed in seeds}
    return Rate(seeds, arms, targets, next(name for name in arms if "best" in name))


def report(rate: float) -> str:
    at, plain = runs_at(rate), load("lm", 0.0)
    if at is None:
        return ""
    none, last = plain["none"], len(TARGETS) - 1
    rivals = ("checkpoint, 50", at.best, "redundant")
    rows = []
    for name, runs in at.arms.items():
        cells: list[Any] = [name, len(runs)]
        for stages in (range(1, TASK.stages - 1), (0, TASK.stages - 1)):
            base = plain.get("none, swapped", {}) if name in ARMS and ARMS[name].swapped else none
            each = [x for s in runs if s in base for x in excess(runs[s][0], base[s], stages)] if name in ARMS else []
            cells.append(f"{fmean(each):.3f} ({len(each)})" if each else "" if name in ARMS else "0")
        cells.append(f"{fmean(f['loss'] for f, _ in runs.values()):.4f}")
        cells.append(f"{fmean(f['loss'] - none[s]['loss'] for s, (f, _) in runs.items()):+.4f}")
        cells.append(f"{fmean(ends[-1] for _, ends in runs.values()) / 3600:.1f}")
        cells += [shown(at.times(name, i)) for i in range(len(TARGETS))]
        for rival in rivals:
            cells.append("" if rival == name else faster(at.times(name, last), at.times(rival, last, list(runs))))
        rows.append(cells)
    lost = fmean(sum(map(len, failures(rate, s, TASK.steps, TASK.stages))) for s in at.seeds)
    columns = ["arm", "seeds", "excess, middle", "excess, ends", "final", "- none", "hours"]
    columns += [f"h to {100 * share:.0f} %" for share in TARGETS]
    columns += [f"% less than {rival}" for rival in rivals]
    says = f"**{rate:g} a stage and step**: {lost:.1f} stages lost in {TASK.steps} steps, mean over seeds {at.seeds}"
    return f"{says}\n\n{table(columns, rows)}\n"


def report_rates() -> str:
    """All rates beside each other: final loss less that of none, and hours to the last target."""
    found = {rate: at for rate in RATES if (at := runs_at(rate)) is not None}
    names = [name for name in ARMS if any(name in at.arms for at in found.values())]
    exact = ["redundant", *(f"checkpoint, {k}" for k in CHECKPOINTS), "checkpoint, best", "replica"]
    final, hours = [], []
    for name in [*names, *exact]:
        losses, times = [], []
        for at in found.values():
            runs = at.arms.get(at.best if name == "checkpoint, best" else name, {})
            none = at.arms["replica"]
            losses.append(f"{fmean(f['loss'] - none[s][0]['loss'] for s, (f, _) in runs.items()):+.3f}" if runs else "")
            losses[-1] += f" ({len(runs)})" if runs and len(runs) < len(at.seeds) else ""
            key = at.best if name == "checkpoint, best" else name
            times.append(shown(at.times(key, len(TARGETS) - 1)) if runs else "")
        final += [[name, *losses]] if name in ARMS else []
        hours.append([name, *times])
    rates = [f"{rate:g}" for rate in found]
    says = f"hours to the loss that `none` has after {100 * TARGETS[-1]:.0f} % of its steps"
    return (
        f"**final loss less that of `none`**, by rate; (seeds, where not all)\n\n{table(['arm', *rates], final)}\n\n"
        f"**{says}**, by rate\n\n{table(['arm', *rates], hours)}\n"
    )


def report_none() -> str:
    """Without losses: what swapping costs."""
    found = load("lm", 0.0)
    none = found.get("none", {})
    rows = []
    for arm, runs in found.items():
        both = sorted(runs.keys() & none.keys())
        if both:
            steps = [costs.reached(runs[s]["curve"], value(none[s]["curve"], 0.8 * TASK.steps)) for s in both]
            later = f"{fmean(s for s in steps if s is not None):.0f}" if None not in steps else f"> {TASK.steps}"
            loss = fmean(runs[s]["loss"] for s in both)
            rows.append([arm, len(both), f"{loss:.4f}", f"{loss - fmean(none[s]['loss'] for s in both):+.4f}", later])
    return f"**no losses**\n\n{table(['arm', 'seeds', 'final', '- none', 'steps to 80 %'], rows)}\n"


def report_norms() -> str:
    """Gradient norms before clipping of the stages beside a lost middle one, at the moment it is lost."""
    rows = []
    for rate in RATES:
        lost = [r for run in load("lm", rate).get("checkfree", {}).values() for r in run["rebuilt"]]
        pairs = [(r["norms"][r["stage"] - 1], r["norms"][r["stage"] + 1]) for r in lost if r["stage"] in (1, 2)]
        if pairs:
            shares = sorted(max(a, b) / (a + b) for a, b in pairs)
            clipped = sum(max(pair) > 1 for pair in pairs)
            rows.append([f"{rate:g}", len(pairs), f"{shares[len(shares) // 2]:.2f}", f"{shares[-1]:.2f}", clipped])
    columns = ["rate", "middle stages lost", "larger weight, median", "largest", "norm of a neighbour > 1"]
    return f"**norms of neighbours**\n\n{table(columns, rows)}\n"


def report_rl() -> str:
    plain = load("rl", 0.0)
    none, steps = plain.get("none", {}), RL_TASK.steps
    if not none:
        return ""
    rows = []
    for rate in (0.0, *(rate for rates, _ in RL_PLAN for rate in rates if rate)):
        found = load("rl", rate)
        for arm, runs in found.items():
            base = plain.get("none, swapped", {}) if RL_ARMS[arm].swapped else none
            both = sorted(runs.keys() & none.keys())
            losses = [(r, runs[s], base[s]) for s in both if s in base for r in runs[s]["rebuilt"]]
            later = [
                fmean(mine["rewards"][r["step"] + k] - theirs["rewards"][r["step"] + k] for k in RL_AFTER)
                for r, mine, theirs in losses
                if r["step"] + RL_AFTER.stop <= steps
            ]
            rows.append(
                [
                    f"{rate:g}",
                    arm,
                    len(both),
                    f"{len(losses) / max(1, len(both)):.1f}",
                    *(f"{fmean(runs[s][key] for s in both):.3f}" for key in ("cum", "last_20")),
                    f"{fmean(runs[s]['last_20'] - none[s]['last_20'] for s in both):+.3f}",
                    f"{fmean(runs[s]['held_out']['pass_1'] for s in both):.3f}",
                    f"{fmean(r['after'] - r['before'] for r, _, _ in losses):+.3f}" if losses else "",
                    f"{fmean(later):+.3f} ({len(later)})" if later else "",
                    steps,
                ]
            )
        for every in (10, 50) if rate else ():
            traces = {s: failures(rate, s, LONGEST * steps, RL_TASK.stages) for s in none}
            run = [costs.checkpoint_s(t, steps, every, 0.0, 0.0)[-1] / costs.STEP_S for t in traces.values()]
            rows.append([f"{rate:g}", f"checkpoint, {every}", len(none), *[""] * 7, f"{fmean(run):.0f}"])
    columns = ["rate", "arm", "seeds", "losses", "cum", "last 20", "- none", "pass@1", "at once", "later", "steps"]
    some = next(iter(none.values()))
    before = fmean(f["curve"][0][1] for f in none.values())
    says = f"{some['parameters']:,} parameters, {some['trained']:,} of them trained; {rl.SETTING.says}"
    return f"**rl**: {says}; pass@1 before {before:.3f}\n\n{table(columns, rows)}\n"


def value(curve: Sequence[Sequence[float]], step: float) -> float:
    """Of a curve of [step, value], linear in between."""
    for (s0, v0), (s1, v1) in zip(curve, curve[1:], strict=False):
        if s0 <= step <= s1:
            return v0 + (v1 - v0) * (step - s0) / (s1 - s0)
    raise ValueError(f"the curve does not cover step {step}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PLANS, default="lm")
    parser.add_argument("--arms", nargs="+", choices=[*ARMS, *RL_ARMS], metavar="ARM")
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--report", action="store_true", help="tables of all that has been run")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if not args.report:
        run_missing(args)
        return
    text = "\n".join([report_none(), report_rates(), *filter(None, map(report, RATES)), report_norms(), report_rl()])
    (FOLDER / "report.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
