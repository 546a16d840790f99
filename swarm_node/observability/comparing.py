"""Runs side by side: settings that differ, final figures, and curves with bands over seeds.

    config.toml, metrics.jsonl, newest checkpoint's state.json -> RunFigures -> groups -> tables, CSV, picture

Runs whose settings differ in nothing but the seed are one group. Its band is the 95 % interval of the mean by Student's
t over its runs, m +- t s / sqrt(n). Only files are read, and of metrics.jsonl a bounded part is kept in memory.
"""

from __future__ import annotations

import csv
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import islice
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from swarm_node.config.figures import WORDS, reports_reward
from swarm_node.config.keys import flat
from swarm_node.config.own import GIVEN_ANEW, HOW_LONG, MAX_VALUE_CHARS, in_brief, read_own, shown
from swarm_node.errors import UserError
from swarm_node.observability.curves import Curves
from swarm_node.observability.evaluations import NOT_MEASURED, newest_checkpoint, record_of
from swarm_node.observability.jsonl import each_record
from swarm_node.observability.plots import moving_average
from swarm_node.observability.tally import Tally
from swarm_node.observability.thinning import rounds_of
from swarm_node.storage.best import read_best
from swarm_node.storage.nearby import names_near
from swarm_node.storage.plain_files import as_a_node_writes
from swarm_node.storage.run_settings import KEPT as KEPT_NAME
from swarm_node.storage.rundir import RunDir, os_errors_explained

READ = 256  # records in memory at once
COUNTS = {"rounds", "tokens", "held-out questions"}  # figures that are counted: no interval is shown of them
GRID = 200  # points of a group's curve
SMOOTHED_SHARE = 20  # a point of a run's reward is the mean over a twentieth of the run
ALIKE = (GIVEN_ANEW - HOW_LONG) | {"seed"}
"""Top-level keys that neither separate groups nor count as differences."""
AUTOMATIC = {"null", "0", '"auto"'}  # JSON of values in whose place a run chooses one
SAMPLED = (
    *("rollouts.max_new_tokens", "rollouts.temperature", "rollouts.top_p"),
    *("rewards.answer", "rewards.kind", "policy.system_prompt", "policy.prompt_template", "eval.samples"),
    *("policy.chat_template", "policy.chat_template_kwargs"),
)
"""Settings with which held-out questions are asked."""
REWARDS = ("rewards.functions", "rewards.checker_weight", "rewards.partial")  # settings of a mean reward
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Quantiles of Student's t at 0.975 for 1, 2, … degrees of freedom; beyond them, the normal one."""
T_BEYOND = 1.96
AXES = {"round": "round", "seconds": "seconds in rounds"}
MEASURES = {"reward": "training reward", "pass_1": "held-out pass@1", "held_out_reward": "held-out mean reward"}
MEASURED = {"pass_1": "pass_1", "held_out_reward": "reward"}  # measure -> held-out figure

Curve = tuple[np.ndarray, np.ndarray]  # (x, y), both [n], x ascending


@dataclass
class RunFigures:
    """One run, as its files tell it."""

    path: Path
    seed: int | None
    settings: dict[str, Any]  # flat, without the keys in ALIKE
    final: dict[str, float]  # figure -> value; what was not measured is missing
    curves: dict[tuple[str, str], Curve]  # (axis, measure) -> curve
    asked: tuple[Any, ...] | None = None  # equal for equal held-out questions; None = not known
    in_effect: Mapping[str, Any] = field(default_factory=dict)  # key -> what it stands for where it is automatic
    earlier: str = ""  # the newest file with earlier settings, if rounds were trained under others than `settings`


@dataclass
class RunGroup:
    """Runs that differ by nothing but the seed."""

    runs: list[RunFigures]
    name: str = ""
    final: dict[str, tuple[float, float | None]] = field(default_factory=dict)
    """Figure -> (mean, half of its 95 % interval; None for fewer than two runs that have it)."""


@dataclass(frozen=True)
class Band:
    """A curve of a group: arrays [n]; `low` and `high` are nan where fewer than two runs were measured."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    runs: int
    measured: bool = True  # whether all runs were measured at each point, so that none is interpolated


class Comparison:
    """Several runs, in groups, in the order in which they were named."""

    def __init__(self, paths: Sequence[Path], apart: bool = False) -> None:
        """`apart`: each run is a group of its own. Raises UserError for a directory that is not a run."""
        groups: dict[str, RunGroup] = {}
        for path in dict.fromkeys(path.resolve() for path in paths):
            run = read_run(path)
            alike = str(path) if apart else json.dumps(run.settings, sort_keys=True)
            groups.setdefault(alike, RunGroup([])).runs.append(run)
        self.groups = list(groups.values())
        self.differences = self._differences()
        for group in self.groups:
            group.final = _final(group.runs)
        self.heads = self._name(apart)
        """The head of each group's column in a table: a number where groups are named by settings, else its name."""

    def _differences(self) -> dict[str, list[Any]]:
        """Key -> its value in each group, for keys whose values differ."""
        settings = [group.runs[0].settings for group in self.groups]
        keys = {key: None for each in settings for key in each}
        values = {key: [each.get(key) for each in settings] for key in keys}
        return {key: found for key, found in values.items() if any(value != found[0] for value in found)}

    @property
    def different_texts(self) -> dict[str, list[str]]:
        """`differences` in words."""
        chosen = [group.runs[0].in_effect for group in self.groups]
        return {key: _in_words(key, values, chosen) for key, values in self.differences.items()}

    def _name(self, by_run: bool) -> list[str]:
        """Name groups by their settings; by their first run if told so, or if those are too many or too long. Returns
        the heads of their columns."""
        for number, group in enumerate(self.groups):
            words = [f"{key.rpartition('.')[2]}={texts[number]}" for key, texts in self.different_texts.items()]
            text = " ".join(words)
            group.name = text if text and not by_run and len(text) <= MAX_VALUE_CHARS else group.runs[0].path.name
        names = [group.name for group in self.groups]
        for number, group in enumerate(self.groups):
            if names.count(group.name) > 1:
                group.name = f"{number + 1}: {group.name}"
        numbered = bool(self.differences) and not by_run
        return [str(number + 1) if numbered else group.name for number, group in enumerate(self.groups)]

    @property
    def meanings(self) -> list[str]:
        """What each column's head stands for, where that is a number."""
        found = []
        for head, group in zip(self.heads, self.groups, strict=True):
            more = f" and {len(group.runs) - 1} more" if len(group.runs) > 1 else ""
            found.append(f"{head} = {_from_here(group.runs[0].path)}{more}")
        return found if self.heads == [str(number + 1) for number in range(len(self.groups))] else []

    @property
    def changed(self) -> list[str]:
        """A remark on each run whose settings changed while it trained."""
        return [
            f"{_from_here(run.path)}: its settings changed while it trained, and only the last ones are compared; "
            f"earlier ones are in {run.earlier}, and its first rewards may be under other tasks or rewards"
            for group in self.groups
            for run in group.runs
            if run.earlier
        ]

    @property
    def not_comparable(self) -> list[str]:
        """A remark on each kind of figure that stands side by side and measures something else in each run."""
        runs = [run for group in self.groups for run in group.runs]
        asked = {run.asked for run in runs if run.asked is not None}
        rewards = {json.dumps([run.settings.get(key) for key in REWARDS]) for run in runs}
        measured = [run for run in runs if any(name.startswith("held-out") for name in run.final)]
        chosen = {key: {json.dumps(run.settings.get(key), sort_keys=True) for run in measured} for key in SAMPLED}
        differs = [key.rpartition(".")[2] for key, values in chosen.items() if len(values) > 1]
        differs = [*(["questions"] if len(asked) > 1 else []), *differs]
        found = [f"held-out figures are not comparable: different {', '.join(differs)}"] if differs else []
        return found + (["rewards differ: mean rewards are not comparable"] if len(rewards) > 1 else [])

    def bands(self, axis: str, measure: str) -> list[tuple[RunGroup, Band]]:
        """The curve of each group in which the measure was taken."""
        found = []
        for group in self.groups:
            having = [run.curves for run in group.runs if (axis, measure) in run.curves]
            curves = [each[axis, measure] for each in having]
            if curves and measure in MEASURED:
                found.append((group, measured_band([each["round", measure][0] for each in having], curves)))
            elif curves:
                found.append((group, band(curves)))
        return found

    def write_csv(self, path: Path) -> None:
        """Write all curves as one tidy table. Raises UserError."""
        with os_errors_explained(path), open(path, "w", newline="", encoding="utf-8") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(["group", "measure", "axis", "x", "mean", "low", "high", "runs", "measured"])
            for measure in MEASURES:
                for axis in AXES:
                    for group, curve in self.bands(axis, measure):
                        for row in zip(curve.x, curve.mean, curve.low, curve.high, strict=True):
                            cells = ["" if math.isnan(value) else f"{value:.6g}" for value in row]
                            table.writerow([group.name, measure, axis, *cells, curve.runs, int(curve.measured)])

    def document(self) -> dict[str, Any]:
        """All but the curves, for JSON."""
        return {
            "not_comparable": self.not_comparable,
            "differences": {key: [_hidden(key, each) for each in values] for key, values in self.differences.items()},
            "groups": [
                {
                    "name": group.name,
                    "runs": [
                        {"path": str(run.path), "seed": run.seed, "earlier_settings": run.earlier or None, **run.final}
                        for run in group.runs
                    ],
                    "in_effect": group.runs[0].in_effect,
                    "final": {name: {"mean": mean, "half": half} for name, (mean, half) in group.final.items()},
                }
                for group in self.groups
            ],
        }


def _from_here(path: Path) -> str:
    """A path as it is named from here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _in_words(key: str, values: Sequence[Any], in_effect: Sequence[Mapping[str, Any]]) -> list[str]:
    """Values of one setting as texts, different ones as different texts. Tables in a list have their names and weights,
    as `brevity×0.2`, where that tells them apart. An automatic value is told as the one `in_effect` in that run."""
    raw, names = [shown(key, value) for value in values], [in_brief(key, value) for value in values]
    texts = names if len(set(names)) >= len(set(raw)) else raw
    return [_chosen(key, *each) for each in zip(values, texts, in_effect, strict=True)]


def _chosen(key: str, value: Any, text: str, in_effect: Mapping[str, Any]) -> str:
    if json.dumps(value) in AUTOMATIC and key in in_effect:
        return f"{shown(key, in_effect[key])} (default)"
    return text


def read_run(path: Path) -> RunFigures:
    """The figures of the run in a directory. Raises UserError if it is not one, or has no round yet."""
    with as_a_node_writes(path):
        return _read_run(path)


def _read_run(path: Path) -> RunFigures:
    run = RunDir(path)
    if not run.exists:
        wants = "name directories that have a config.toml, as runs/local"
        raise UserError(f"no run in {path}: {wants}{names_near(path)}")
    config = read_own(run.config)
    table = config.model_dump(mode="json", exclude=ALIKE)
    table |= {"rounds": None if math.isinf(config.total_rounds) else config.total_rounds}
    curves, tally, processor = Curves(), Tally(), ProcessorTime()
    records = each_record(run.metrics) if run.metrics.exists() else iter(())
    while some := list(islice(records, READ)):
        for record in some:
            tally.add(record)
            processor.add(record)
        curves.add([{name: record.get(name) for name in (*KEPT, "rounds") if name in record} for record in some])
    if not tally.rounds:
        raise UserError(f"{path} has no round yet, so there is nothing to compare")
    state = newest_checkpoint(run)[1]
    held = _held_out(state, tally.round, reports_reward(config.rewards))
    final = _figures(tally, processor, held, config.eval.samples)
    best = read_best(path)
    if best is not None and best.value > held.get(0, {}).get(best.figure, -math.inf):
        final |= {f"held-out {WORDS[best.figure]}, best checkpoint": best.value}
    earlier = max((file.name for file in path.glob("config-*.toml") if KEPT_NAME.fullmatch(file.name)), default="")
    asked, in_effect = _asked(state, held), state.get("in_effect")
    in_effect = in_effect if isinstance(in_effect, dict) else {}  # an earlier version's checkpoint has none
    return RunFigures(path, config.seed, flat(table), final, _curves(curves, held), asked, in_effect, earlier)


KEPT = ("round", "time", "reward", "step_time", "eval/pass_1", "eval/reward")  # metrics that become curves
HeldOut = Mapping[int, Mapping[str, float]]  # round -> questions, pass_1, pass_k and reward, as far as measured


def _held_out(state: Mapping[str, Any], last: int, with_reward: bool) -> HeldOut:
    """Held-out figures of all tasks from before training and from the end, as the state of a checkpoint has them."""
    try:
        found = record_of(state).by_round(with_reward)
    except NOT_MEASURED:
        return {}
    return {round: figures for round, figures in found.items() if round <= last}


def _asked(state: Mapping[str, Any], held: HeldOut) -> tuple[Any, ...] | None:
    """A value that is equal for equal held-out questions: their tasks, whether each file is asked whole, and how many
    they are. None if the state does not have it."""
    conditions = state.get("held_out")
    counts = sorted({figures["questions"] for figures in held.values() if "questions" in figures})
    if not counts or not isinstance(conditions, dict) or not isinstance(tasks := conditions.get("tasks"), list):
        return None
    return (*sorted(map(str, tasks)), bool(conditions.get("whole")), *counts)


@dataclass
class ProcessorTime:
    """CPU time of a run's rounds: seconds times cores in use, which metrics.jsonl has for all but the first."""

    known_s: float = 0.0  # seconds in rounds that say how many cores were in use
    cpu_s: float = 0.0  # CPU seconds of these

    def add(self, record: Mapping[str, Any]) -> None:
        if (cores := record.get("machine/cpu_cores")) is not None:
            seconds = rounds_of(record) * (record.get("step_time") or 0.0)
            self.known_s += seconds
            self.cpu_s += cores * seconds

    def during(self, seconds: float) -> dict[str, float]:
        """CPU seconds as a figure, if all of these seconds are like the known ones; empty if none is known."""
        return {"CPU seconds": self.cpu_s * seconds / self.known_s} if self.known_s else {}


def _figures(tally: Tally, processor: ProcessorTime, held: HeldOut, samples: int) -> dict[str, float]:
    """The final figures of a run, with so many samples to each held-out question."""
    found = {"rounds": float(tally.rounds), "seconds": tally.seconds, **processor.during(tally.seconds)}
    found["tokens"] = float(tally.num_tokens)
    if (tenths := tally.rewards.tenths()) is not None:
        found |= {"reward, first tenth": tenths[0], "reward, last tenth": tenths[1]}
    last = max(held, default=0)
    if "questions" in held.get(last, {}):
        found["held-out questions"] = float(held[last]["questions"])
    ends = {"before": held.get(0, {})}
    if last:  # after an earlier round if the evaluation at the end was interrupted
        ends["at the end" if last == tally.round else f"after round {last}"] = held[last]
    for when, figures in ends.items():
        named = {"pass_1": "pass@1", "reward": "mean reward"} | ({"pass_k": f"pass@{samples}"} if samples > 1 else {})
        found |= {f"held-out {word}, {when}": figures[name] for name, word in named.items() if name in figures}
    return found


def _curves(curves: Curves, held: HeldOut) -> dict[tuple[str, str], Curve]:
    """The curves of a run by axis and measure."""
    points = curves.points()
    rounds = _column(points, "round")
    took = np.nan_to_num(_column(points, "step_time"))
    seconds = np.cumsum(took * np.diff(rounds, prepend=0.0))
    reward = _column(points, "reward")
    measured = ~np.isnan(reward)
    smooth = np.asarray(moving_average(reward[measured].tolist(), max(1, int(measured.sum()) // SMOOTHED_SHARE)))
    series = {"reward": (rounds[measured], smooth)} if measured.any() else {}
    for measure, figure in MEASURED.items():
        between = _column(points, f"eval/{figure}")
        at = {float(r): float(value) for r, value in zip(rounds, between, strict=True) if not math.isnan(value)}
        at |= {float(r): float(figures[figure]) for r, figures in held.items() if figure in figures}
        if at:
            series[measure] = (np.asarray(sorted(at)), np.asarray([at[r] for r in sorted(at)]))
    found = {}
    for measure, (x, y) in series.items():
        found["round", measure] = (x, y)
        found["seconds", measure] = (np.interp(x, np.r_[0.0, rounds], np.r_[0.0, seconds]), y)
    return found


def _column(points: Mapping[str, Mapping[str, list[float | None]]], name: str) -> np.ndarray:
    rows = len(points["round"]["mean"])
    values = points[name]["mean"] if name in points else [None] * rows
    return np.asarray([math.nan if value is None else value for value in values])


def band(curves: Sequence[Curve]) -> Band:
    """The mean of several curves with its 95 % interval, from where all have begun to where the first one ends. Between
    its points, each curve is interpolated."""
    start, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    own = curves[0][0] if len(curves) == 1 else np.unique(np.concatenate([x for x, _ in curves]))
    grid = own[(own >= start) & (own <= end)]
    if not len(grid) or len(grid) > GRID:
        grid = np.linspace(start, max(start, end), GRID if end > start else 1)
    measured = all(bool(np.isin(grid, x).all()) for x, _ in curves)
    return _band(grid, np.stack([np.interp(grid, x, y) for x, y in curves]), measured)


def measured_band(rounds: Sequence[np.ndarray], curves: Sequence[Curve]) -> Band:
    """The mean of curves at the rounds that all of them have, and of their ends where these differ, with its 95 %
    interval. `rounds` has the rounds of each curve's points; x is the mean over the curves. Nothing is interpolated."""
    common = reduce(np.intersect1d, rounds)
    at = [np.searchsorted(each, common) for each in rounds]
    if not len(common) or any(each[-1] > common[-1] for each in rounds):
        at = [np.append(each, -1) for each in at]
    x = np.stack([curve[0][points] for curve, points in zip(curves, at, strict=True)]).mean(0)
    return _band(x, np.stack([curve[1][points] for curve, points in zip(curves, at, strict=True)]))


def _band(x: np.ndarray, values: np.ndarray, measured: bool = True) -> Band:
    """The band of the values [curve, point] at x [point]."""
    n, mean = len(values), values.mean(0)
    half = t_95(n) * values.std(0, ddof=1) / math.sqrt(n) if n > 1 else np.full_like(mean, math.nan)
    return Band(x, mean, mean - half, mean + half, n, measured)


def t_95(n: int) -> float:
    """Factor on the standard error of a mean of `n` >= 2 values for its 95 % interval."""
    return T_95[n - 2] if n - 2 < len(T_95) else T_BEYOND


def _final(runs: Sequence[RunFigures]) -> dict[str, tuple[float, float | None]]:
    values: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        for name, value in run.final.items():
            values[name].append(value)
    return {name: (fmean(each), half_95(each)) for name, each in values.items()}


def half_95(values: Sequence[float]) -> float | None:
    """Half of the 95 % interval of the mean; None for fewer than two values."""
    n = len(values)
    return t_95(n) * stdev(values) / math.sqrt(n) if n > 1 else None


def _hidden(key: str, value: Any) -> Any:
    """The value of a setting, unless it is a secret."""
    return shown(key, value) if shown(key, "x") != "x" else value


def figure_rows(comparison: Comparison) -> Iterator[list[str]]:
    """Rows of the table of final figures: a figure, and for each group its mean with half of the 95 % interval."""
    names = {name: None for group in comparison.groups for name in group.final}
    yield ["runs", *(str(len(group.runs)) for group in comparison.groups)]
    for name in names:
        yield [name, *(_cell(group.final.get(name), name not in COUNTS) for group in comparison.groups)]


def _cell(figure: tuple[float, float | None] | None, with_half: bool) -> str:
    if figure is None:
        return "-"
    mean, half = figure
    form = ",.0f" if abs(mean) >= 100 or mean.is_integer() and mean > 1 else ".3f"
    return f"{mean:{form}}" + (f" ± {half:{form}}" if half is not None and with_half else "")
