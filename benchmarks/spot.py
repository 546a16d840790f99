"""How soon a spot machine is of use, how soon it has left, and how soon another is in its place.

    python -m benchmarks.spot [--policies starter members] [--repeats 5] [--report]

Real processes on this machine, no image: a bootstrap and two nodes that train and average in pairs (NoLoCo). Their
policy is the starter, which each has in its package; or, in `members`, one of 6 million random parameters (24 MB, its
rewards are chance), which the manifest names, no hub gives and each node has to fetch from the members. Then, as often
as said, with an empty disk each time, models included:

    cold start     `swarm-node join LINK`, of a name that nobody has had: to the end of its first round (all of whose
                   rollouts it sampled itself), to the first foreign group admitted, and to when it goes on with the
                   weights of its cohort
    leaving        SIGTERM some updates after an exchange, none being due: to exit 0, with what it learned since handed
                   over or not
    replacement    the same command again, its disk empty: to when it goes on with the cohort's weights, how many
                   updates and exchanges those are behind the newest that anybody has at that moment, and to its first
                   update

Wall seconds from the start of the process, imports included. Goals: 60 s to the first rollout, 10 s to leave, 30 s to
train on the swarm's weights (60 s with the model to be fetched). What a container adds, tests/image measures.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import RESULTS, table, write
from benchmarks.late_join import CHANCE, FUNCTIONS, SETTINGS, WENT_ON
from benchmarks.overhead import LOCAL, commands, link_of, metrics, until
from benchmarks.processes import merged, mind_signals, other_load, tree
from benchmarks.resources import make_policy

EVERY = 10
PERIOD_S = 5.0
"""At most one exchange in so many seconds and updates."""
GOALS = {
    "starter": {"first round": 60.0, "exit 0": 10.0, "cohort's weights": 30.0},
    "members": {"first round": 60.0, "exit 0": 10.0, "cohort's weights": 60.0},
}
"""Policy -> step -> seconds."""
PATIENCE_S = 240.0
PACE_S = 0.2
"""Of the two that are there already: leaves the machine to the one that is timed."""
Row = dict[str, Any]


def measure(policy: str, repeats: int) -> list[Row]:
    """A row for each repeat."""
    rows = []
    with commands() as (folder, run):
        text = SETTINGS.format(model="starter", own=4, every=EVERY).replace("foreign = 0", "foreign = 4")
        model: tuple[str, ...] = ()
        if policy == "members":
            model = "--model", make_policy(folder)
            (folder / "rewards.py").write_text(FUNCTIONS)
            text = text.replace('model = "starter"', "") + CHANCE.format(functions=folder / "rewards.py")
        (folder / "settings.toml").write_text(text)
        manifest = str(folder / "swarm.toml")
        new = "new", "--name", "bench", "--tasks", "small", "--averaging-period-s", str(PERIOD_S), "--out", manifest
        assert run(*new, *model).wait(PATIENCE_S) == 0
        run("bootstrap", manifest, *LOCAL, *model, "--run-dir", str(folder / "hub"))
        until(lambda: (folder / "hub" / "swarm.json").exists(), PATIENCE_S)
        link = link_of(folder / "hub")

        def join(path: Path, pace_s: float = 0.0) -> subprocess.Popen[str]:
            settings = "--config", str(folder / "settings.toml"), "--set", f"pace_s={pace_s}", "--spot", "off"
            disk = {"HF_HOME": str(path.with_suffix(".models")), "HF_HUB_OFFLINE": "1"}
            return run("join", link, "--name", path.name, *LOCAL, *settings, "--run-dir", str(path), **disk)

        others = [folder / "a", folder / "b"]
        for path in others:
            join(path, PACE_S)
        for path in others:
            until(lambda path=path: _last(path, "averaging/exchanges") > 0, PATIENCE_S)  # type: ignore[misc]
        for i in range(repeats):
            rows.append(_repeat(lambda path: join(path), folder / f"spot{i}", others))
            print(rows[-1], flush=True)
    return rows


def _repeat(join: Callable[[Path], subprocess.Popen[str]], path: Path, others: list[Path]) -> Row:
    cold, process = _started(join, path, others)
    until(lambda: _learned(path), PATIENCE_S)
    left = _left(process, path)
    shutil.rmtree(path)
    shutil.rmtree(path.with_suffix(".models"), ignore_errors=True)  # there if a model was fetched
    replaced, process = _started(join, path, others)
    _left(process, path)
    return {"cold start": cold, "leaving": left, "replacement": replaced}


def _started(
    join: Callable[[Path], subprocess.Popen[str]], path: Path, others: list[Path]
) -> tuple[Row, subprocess.Popen[str]]:
    """Start a node, note when it gets where."""
    began = time.time()
    process = join(path)
    until(lambda: _event(path, WENT_ON) or process.poll() is not None, PATIENCE_S)
    event = _event(path, WENT_ON)
    if event is None:
        raise RuntimeError(f"{path.name} ended with {process.wait()}")
    newest = max(int(_last(other, "step")) for other in others)
    version = int(event["text"].rpartition(" ")[2])
    admitted = until(lambda: _line(path, lambda line: line.get("swarm/groups_admitted", 0) > 0), PATIENCE_S)
    update = until(
        lambda: _line(path, lambda line: line["time"] > event["time"] and "perf/trained_tok_s" in line), PATIENCE_S
    )
    times = {
        "first round": metrics(path)[0]["time"],
        "first foreign group": admitted["time"],
        "cohort's weights": event["time"],
        "first update with them": update["time"],
    }
    seconds = {what: round(at - began, 2) for what, at in times.items()}
    return {"seconds": seconds, "version": version, "behind": newest - version}, process


def _learned(path: Path) -> bool:
    """Whether it has averaged, and had updates since, but not as many as exchanges are apart at least."""
    lines = metrics(path)
    exchanges = lines[-1].get("averaging/exchanges", 0.0)
    since = next(line["step"] for line in lines if line.get("averaging/exchanges", 0.0) == exchanges)
    return bool(exchanges) and 0 < lines[-1]["step"] - since < EVERY


def _left(process: subprocess.Popen[str], path: Path) -> Row:
    """SIGTERM; to exit 0."""
    kin = tree(process.pid)
    began = time.monotonic()
    process.terminate()
    code = process.wait(PATIENCE_S)
    seconds = round(time.monotonic() - began, 2)
    assert code == 0, f"{path.name} ended with {code}"
    for relative in kin:
        if relative.is_running():
            relative.wait(20)  # p2pd and gossip end with their node
    return {"seconds": {"exit 0": seconds}, "handed over": _event(path, "averaged a last time") is not None}


def _event(path: Path, text: str) -> Row | None:
    file = path / "events.jsonl"
    said = file.read_text() if file.exists() else ""
    events = [json.loads(line) for line in said[: said.rfind("\n") + 1].splitlines()]
    return next((event for event in events if event["text"].startswith(text)), None)


def _line(path: Path, fits: Callable[[Row], bool]) -> Row | None:
    return next((line for line in metrics(path) if fits(line)), None)


def _last(path: Path, name: str) -> float:
    lines = metrics(path)
    return float(lines[-1].get(name, 0.0)) if lines else 0.0


def summary(rows: list[Row]) -> dict[str, dict[str, float]]:
    """Case -> step -> median seconds."""
    return {
        case: {step: median(row[case]["seconds"][step] for row in rows) for step in rows[0][case]["seconds"]}
        for case in rows[0]
    }


def report(policy: str, rows: list[Row]) -> str:
    """The table of a policy, and what of it are no seconds."""
    goals = GOALS[policy]
    lines = [
        [case, step, f"{value:.1f}", f"{max(row[case]['seconds'][step] for row in rows):.1f}", str(goals.get(step, ""))]
        for case, steps in summary(rows).items()
        for step, value in steps.items()
    ]
    handed = sum(row["leaving"]["handed over"] for row in rows)
    behind = [row["replacement"]["behind"] for row in rows]
    rest = f"handed over in {handed} of {len(rows)}; updates and exchanges behind at the replacement: {behind}"
    return f"{policy}\n\n{table(['', 'seconds to', 'median', 'at most', 'goal'], lines)}\n\n{rest}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", choices=list(GOALS), default=list(GOALS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--report", action="store_true", help="only print the tables")
    args = parser.parse_args()
    path = RESULTS / "spot.json"
    if not args.report:
        mind_signals()
        for policy in args.policies:
            load = other_load()
            print(f"{policy}: {load}", flush=True)
            write("spot", merged(path, policy, {"other load": load, "rows": measure(policy, args.repeats)}))
    if not path.exists():
        parser.error(f"there are no figures in {path} yet: run it without --report")
    for policy, figures in json.loads(path.read_text()).items():
        if policy in GOALS:
            print(report(policy, figures["rows"]))


if __name__ == "__main__":
    main()
