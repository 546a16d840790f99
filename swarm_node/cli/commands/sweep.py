"""`swarm-node sweep FILE`: real `local` runs over a grid of settings, or a search with Optuna, several at a time.

    FILE.toml -> settings (each combination, or what Optuna asks for) x seeds -> processes `swarm-node local` -> table

The run of a setting and a seed has a directory of its own, named after both, below the sweep's folder. So a later call
resumes runs that are not complete, and starts those that are missing. The processes end when their standard input
does, so also when this process is killed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import tomli_w
from pydantic import Field, PositiveInt, ValidationError

from swarm_node.config import NodeConfig
from swarm_node.config.explaining import did_you_mean
from swarm_node.config.figures import WORDS, figure_of
from swarm_node.config.keys import Table, all_keys, flat, merged, nest
from swarm_node.config.loading import load_run_config
from swarm_node.config.own import HOW_LONG, read_toml
from swarm_node.config.section import Section
from swarm_node.config.trl_names import trl_hint
from swarm_node.errors import TEMPORARY, USER_ERROR, UserError
from swarm_node.install import extra_command
from swarm_node.observability.comparing import half_95, read_run
from swarm_node.observability.evaluations import newest_checkpoint
from swarm_node.observability.jsonl import last_record
from swarm_node.observability.progress import clock_face
from swarm_node.runtime.children import close_input, end_children, start_child
from swarm_node.storage.rundir import RunDir, os_errors_explained

LEAVE_S = 20.0  # time that a run has to save when the sweep is stopped
MAX_SLUG = 60  # most characters of the settings in a directory's name


class SearchRange(Section):
    """The values between two numbers."""

    low: float
    high: float
    log: bool = False  # evenly spread by their logarithm
    steps: PositiveInt | None = None  # for a grid: so many values, both ends included

    @property
    def whole(self) -> bool:
        """Whether only whole numbers are meant: both ends are."""
        return self.low.is_integer() and self.high.is_integer() and not self.log

    def values(self) -> list[float]:
        """The values of a grid."""
        n = self.steps or 1
        shares = [i / max(1, n - 1) for i in range(n)]
        if self.log:
            return [float(f"{self.low * (self.high / self.low) ** share:.6g}") for share in shares]
        found = [self.low + (self.high - self.low) * share for share in shares]
        return list(dict.fromkeys(round(value) for value in found)) if self.whole else found


class SweepFile(Section):
    """What a sweep's file may say."""

    folder: str | None = None  # directory of the runs; unset = runs/NAME, after the file
    method: Literal["grid", "optuna"] = "grid"
    objective: Literal["held_out", "reward"] = "held_out"
    """Figure that the table is ordered by, and that Optuna raises: the held-out one, or the reward of training."""
    trials: PositiveInt = 20  # `optuna`: number of settings that are tried
    seeds: list[int] = Field([0], min_length=1)
    parallel: PositiveInt = 1  # runs at a time
    config: dict[str, Any] = {}  # as in a configuration file
    search: dict[str, list[Any] | SearchRange]  # key -> its values


@dataclass
class SweepSetting:
    """One setting, and the directories of its runs."""

    values: dict[str, Any]  # key -> value, for the keys that are searched
    table: Table  # the whole configuration but the seed
    name: str
    scores: list[float] = field(default_factory=list)  # the objective of each complete run
    failed: list[str] = field(default_factory=list)  # what went wrong

    @property
    def score(self) -> float | None:
        """The mean of the objective over seeds; None if a run failed or has no such figure."""
        return fmean(self.scores) if self.scores and not self.failed else None


class Sweep:
    """Runs the settings of one file."""

    def __init__(self, path: Path, say: Callable[[str], None] = print) -> None:
        """Raises UserError for a file that makes no sense."""
        self.plan = _read(path)
        self.folder = Path(self.plan.folder or f"runs/{path.stem}")
        self._say = say
        self._ended = threading.Event()
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._runs, self._done = 0, 0  # runs in all, and those that are over
        self._took: list[float] = []  # seconds of each run of this call
        figures = {self._checked(setting) for setting in self._first_settings()}
        if len(figures) > 1:
            raise UserError(
                "rewards.checker_weight is 0 in some settings, which have mean reward as held-out figure, and not in "
                'others, which have pass@1: no table compares them; set objective = "reward", or search without it'
            )
        self.objective = figures.pop()  # as `read_run` names it

    def run(self) -> list[SweepSetting]:
        """Run all that is missing; the settings, the best first. What failed stands in them. Raises UserError."""
        with os_errors_explained(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        settings = self._search() if self.plan.method == "optuna" else self._grid()
        return sorted(settings, key=lambda each: -math.inf if each.score is None else each.score, reverse=True)

    def setting(self, values: dict[str, Any]) -> SweepSetting:
        """The setting with these values. Its name depends on all that the runs are told, except how long they last."""
        values = {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in values.items()}
        table: Table = self.plan.config
        for key, value in values.items():
            table = merged(table, nest(key, value))
        told = {key: value for key, value in table.items() if key not in HOW_LONG}
        digest = hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:8]
        words = "_".join(f"{key.rpartition('.')[2]}-{value}" for key, value in values.items())
        return SweepSetting(values, table, f"{re.sub(r'[^A-Za-z0-9._-]+', '-', words)[:MAX_SLUG]}-{digest}")

    def directory(self, setting: SweepSetting, seed: int) -> Path:
        return self.folder / f"{setting.name}-{seed}"

    def _first_settings(self) -> Iterator[SweepSetting]:
        """Settings that show mistakes in the file: all of a grid, or the ends of a search."""
        if self.plan.method == "grid":
            yield from self._combinations()
            return
        ends = [each if isinstance(each, list) else [each.low, each.high] for each in self.plan.search.values()]
        for pick in (0, -1):
            yield self.setting(dict(zip(self.plan.search, [values[pick] for values in ends], strict=True)))

    def _combinations(self) -> Iterator[SweepSetting]:
        values = [each if isinstance(each, list) else each.values() for each in self.plan.search.values()]
        for chosen in product(*values):
            yield self.setting(dict(zip(self.plan.search, chosen, strict=True)))

    def _checked(self, setting: SweepSetting) -> str:
        """The figure that is the objective in this setting. Raises UserError for a setting that no run would take, or
        one whose runs have no end."""
        config = self._config(setting, self.plan.seeds[0])
        if math.isinf(config.total_rounds):
            raise UserError("a run of a sweep ends after a number of rounds: set `rounds` in [config]")
        if self.plan.objective == "reward":
            return "reward, last tenth"
        if not config.eval.questions:
            raise UserError('eval.questions = 0 leaves no held-out figure: set objective = "reward"')
        return f"held-out {WORDS[figure_of(config.rewards)]}, at the end"

    def _config(self, setting: SweepSetting, seed: int) -> NodeConfig:
        own = {"seed": seed, "run_dir": str(self.directory(setting, seed))}
        return load_run_config([("the sweep", setting.table | own)], False, lambda sentence: None)

    def _grid(self) -> list[SweepSetting]:
        settings = list(self._combinations())
        runs = [(setting, seed) for setting in settings for seed in self.plan.seeds]
        self._runs, self._done = len(runs), sum(self.is_complete(*run) for run in runs)
        self._say(f"runs in {self.folder}: {self._runs}, complete already: {self._done}")
        with ThreadPoolExecutor(self.plan.parallel) as pool, self._children():
            list(pool.map(lambda run: self._one(*run), runs))
        return settings

    def _search(self) -> list[SweepSetting]:
        study = study_in(self.folder)
        take_up(study, self.plan.search.keys())
        tried = [trial.params for trial in study.trials if trial.value is not None]
        settings = [self.setting(found) for found in tried if found.keys() == self.plan.search.keys()]
        self._say(f"trials in {self.folder}: {self.plan.trials}, complete already: {len(settings)}")
        self._runs = max(self.plan.trials, len(settings)) * len(self.plan.seeds)
        self._done = sum(self.is_complete(each, seed) for each in settings for seed in self.plan.seeds)

        def one(_: int) -> SweepSetting:
            with self._lock:
                trial = study.ask()
                setting = self.setting({key: _suggest(trial, key, each) for key, each in self.plan.search.items()})
            self._all_seeds(setting)
            if not self._ended.is_set():
                with self._lock:
                    study.tell(trial, setting.score, state=_trial_state("FAIL") if setting.score is None else None)
            return setting

        with ThreadPoolExecutor(self.plan.parallel) as pool, self._children():
            list(pool.map(self._all_seeds, settings))
            return settings + list(pool.map(one, range(len(settings), self.plan.trials)))

    def _all_seeds(self, setting: SweepSetting) -> None:
        for seed in self.plan.seeds:
            self._one(setting, seed)

    def _one(self, setting: SweepSetting, seed: int) -> None:
        """Run one setting with one seed to its end, unless that was done, and note the objective."""
        took = None
        if not self.is_complete(setting, seed):
            began = time.monotonic()
            problem = self._process(setting, seed)
            took = time.monotonic() - began
            if problem:
                setting.failed.append(problem)
                self._tell(took, f"failed after {clock_face(took)}: {problem}")
                return
        if not self._ended.is_set():
            figure = read_run(self.directory(setting, seed)).final.get(self.objective)
            setting.scores += [] if figure is None else [figure]
            if took is not None:
                self._tell(took, f"{setting.name} seed {seed}: {_number(figure)}, took {clock_face(took)}")

    def _tell(self, took: float, how: str) -> None:
        """Say how a run of so many seconds went, and how long the others take if they are like those so far."""
        with self._lock:
            self._done += 1
            self._took.append(took)
            if left := self._runs - self._done:
                seconds = fmean(self._took) * left / min(self.plan.parallel, left)
                end = time.strftime("%a %H:%M", time.localtime(time.time() + seconds))
                how += f"; {clock_face(seconds)} left, until {end}"
            self._say(f"{self._done}/{self._runs} {how}")

    def is_complete(self, setting: SweepSetting, seed: int) -> bool:
        """Whether all rounds are over and saved, with held-out figures of the last one if these are the objective."""
        run, rounds = RunDir(self.directory(setting, seed)), self._config(setting, seed).total_rounds
        last = last_record(run.metrics) if run.metrics.exists() else None
        saved, state = newest_checkpoint(run)
        if last is None or min(last["round"], saved) < rounds:
            return False
        return self.plan.objective != "held_out" or state.get("held_out_figures", {}).get("round", 0) >= rounds

    def _process(self, setting: SweepSetting, seed: int) -> str:
        """Run `swarm-node local` to its end. Returns what went wrong, if anything."""
        folder = self.directory(setting, seed)
        config, log = folder.with_name(f"{folder.name}.toml"), folder.with_name(f"{folder.name}.log")
        table = setting.table
        if self.plan.parallel > 1 and "policy.threads" not in flat(table):
            table = merged(table, {"policy": {"threads": max(1, (os.cpu_count() or 1) // self.plan.parallel)}})
        with os_errors_explained(config):
            config.write_text(tomli_w.dumps(table), encoding="utf-8")
        arguments = ["local", "--config", str(config), "--run-dir", str(folder), "--seed", str(seed)]
        with self._lock:
            if self._ended.is_set():
                return ""
            process = start_child(arguments, log)
            self._processes.add(process)
        code = process.wait()
        with self._lock:
            self._processes.discard(process)
        close_input(process)
        if self._ended.is_set() or (not code and self.is_complete(setting, seed)):
            return ""
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        if not code:
            return f"{folder}: the last round has no checkpoint or no figure of the objective, see {log}"
        return f"{folder}: {last[0] if last and code in (USER_ERROR, TEMPORARY) else f'exit code {code}, see {log}'}"

    @contextmanager
    def _children(self) -> Iterator[None]:
        """Context in which the processes of runs live; none outlives it."""
        try:
            yield
        finally:
            self._ended.set()
            with self._lock:
                processes = list(self._processes)
            end_children(processes, LEAVE_S)


def table_of(sweep: Sweep, settings: Sequence[SweepSetting]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the numbered settings, the best first, with the mean of the objective, half of its 95 %
    interval over seeds, and whether that mean is within noise of the best."""
    columns = ["", *sweep.plan.search, sweep.objective, "against the best", "runs"]
    return columns, [
        [
            str(number),
            *(str(value) for value in each.values.values()),
            _number(each.score, None if each.score is None else half_95(each.scores)),
            "best" if each is settings[0] and each.score is not None else _noise(settings[0], each),
            str(len(each.scores)),
        ]
        for number, each in enumerate(settings, 1)
    ]


def _noise(best: SweepSetting, other: SweepSetting) -> str:
    """Whether the difference of two means is within the noise of their seeds, which at least two runs each show."""
    if best.score is None or other.score is None:
        return "-"
    halves = half_95(best.scores), half_95(other.scores)
    if halves[0] is None or halves[1] is None:
        return "unknown, one seed"
    return "within noise" if best.score - other.score <= math.hypot(halves[0], halves[1]) else "worse"


def _number(score: float | None, half: float | None = None) -> str:
    return "-" if score is None else f"{score:.3f}" + ("" if half is None else f" ± {half:.3f}")


def _read(path: Path) -> SweepFile:
    try:
        plan = SweepFile.model_validate(read_toml(path, "the sweep"))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in problem["loc"] if part not in ("SearchRange", "list[any]"))
        if problem["type"] == "extra_forbidden":
            known = ", ".join(SweepFile.model_fields)
            raise UserError(f"unknown key {key} in {path}; known are {known}") from None
        raise UserError(f"{key} in {path}: {problem['msg'].replace('Input should be', 'must be')}") from None
    for key, each in plan.search.items():
        if key not in all_keys():
            hint = trl_hint(key) or did_you_mean(key, all_keys(), ".")
            raise UserError(f"unknown key {key} in [search]{hint}")
        if isinstance(each, list) and not each:
            raise UserError(f"{key} in [search] has no value")
        if isinstance(each, SearchRange):
            if each.low >= each.high or (each.log and each.low <= 0):
                raise UserError(f"{key} in [search]: low must be less than high, and above 0 with log")
            if plan.method == "grid" and each.steps is None:
                raise UserError(f"{key} in [search]: a grid needs `steps`, the number of values between low and high")
    return plan


def study_in(folder: Path) -> Any:
    """Optuna's study, kept in the folder."""
    try:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend
    except ModuleNotFoundError:
        raise UserError(f'method = "optuna" needs a package: {extra_command("optuna")}') from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = JournalStorage(JournalFileBackend(str(folder / "optuna.log")))
    study = optuna.create_study(storage=storage, study_name=folder.name, direction="maximize", load_if_exists=True)
    study.sampler = optuna.samplers.TPESampler(seed=len(study.trials))  # a sweep that goes on asks for something new
    return study


def take_up(study: Any, keys: Collection[str]) -> None:
    """Let the trials that a stopped sweep left begin again with their settings, so that their runs are resumed. Those
    that wait to begin stay as they are; one without a value for each of `keys` is given up."""
    for trial in study.trials:
        if trial.state == _trial_state("RUNNING"):
            study.tell(trial.number, state=_trial_state("FAIL"))
            if trial.params.keys() == set(keys):
                study.enqueue_trial(trial.params)


def _trial_state(name: str) -> Any:
    import optuna

    return optuna.trial.TrialState[name]


def _suggest(trial: Any, key: str, each: list[Any] | SearchRange) -> Any:
    if isinstance(each, list):
        return trial.suggest_categorical(key, each)
    if each.whole:
        return trial.suggest_int(key, int(each.low), int(each.high))
    return trial.suggest_float(key, each.low, each.high, log=each.log)
