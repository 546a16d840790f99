"""Does joining pay with real processes? Members of a swarm joined by link, and silos, for the same CPU seconds.

    python -m benchmarks.joined [--settings steps-8 tags] [--seeds 0 1 2] [--nodes 4]
    python -m benchmarks.joined --report
    python -m benchmarks.joined --quick          # one seed of `tags`, two nodes, few seconds; nothing is stored

A bootstrap and `--nodes` processes of `swarm-node join LINK`; then as many of `swarm-node local`, on the same cores and
from the same warm starts. A node is told to stop (SIGINT) once all its processes, p2pd and gossip included, have
taken CPU_S seconds since its first round. `swarm-node eval` then measures the weights that it left. Members have the
arm `new` of `benchmarks.sharing`, silos the arm `silo`. Beside them stands what the simulator's rows of these arms have
after as many CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import tomli_w

from benchmarks import sharing
from benchmarks.common import RESULTS, machine, spent, table, write_row
from benchmarks.intervals import interval, value_at
from benchmarks.overhead import LOCAL, commands, link_of, metrics
from benchmarks.processes import mind_signals, tree
from benchmarks.sharing_arms import ARMS
from benchmarks.sharing_report import passes
from benchmarks.sharing_settings import SETTINGS, Setting
from swarm_node.config import NodeConfig

FOLDER = RESULTS / "joined"
KINDS = {"joined": "new", "silos": "silo"}
"""What is run -> its arm."""
CPU_S = {"steps-8": 24.0, "tags": 10.0}
"""CPU seconds of each node: about as many as a member takes to the level at which the strongest silo ends, and more."""
QUESTIONS, SAMPLES = 96, 8
START_S = 180.0  # longest wait for first rounds on a busy machine
LOOK_S = 0.1
Row = dict[str, Any]


def settings_of(setting: Setting, kind: str, seed: int, number: int) -> NodeConfig:
    """The configuration file of node `number`. A member's tasks and form of answers are the manifest's."""
    made = sharing.config(setting, ARMS[KINDS[kind]], seed, number)
    evaluation = made.eval.model_copy(update={"questions": QUESTIONS, "samples": SAMPLES})
    policy = made.policy.model_copy(update={"threads": 1})
    return made.model_copy(
        update={"eval": evaluation, "policy": policy, "rounds": 1_000_000, "seed": 1000 * seed + number}
    )


def run(setting: Setting, kind: str, seed: int, nodes: int, cpu_s: float) -> list[Row]:
    """What each node got for `cpu_s`: held-out pass@1 before and after, reward at the end, rounds, groups used."""
    with commands() as (folder, start):
        link = ""
        if kind == "joined":
            first = folder / "manifest.toml"
            first.write_text(as_toml(settings_of(setting, kind, seed, 0)))
            new = ["new", "--config", str(first), "--out", str(folder / "swarm.toml")]
            subprocess.run([sys.executable, "-m", "swarm_node", *new], check=True, capture_output=True)
            start("bootstrap", str(folder / "swarm.toml"), *LOCAL, "--run-dir", str(folder / "hub"))
            link = link_of(folder / "hub")
        places = [folder / f"node{number}" for number in range(nodes)]
        running = []
        for number, place in enumerate(places):
            file = folder / f"{place.name}.toml"
            file.write_text(as_toml(settings_of(setting, kind, seed, number), tasks=not link))
            verb = ["join", link, *LOCAL, "--name", place.name] if link else ["local"]
            running.append(start(*verb, "--config", str(file), "--run-dir", str(place), "--json"))
        stop_after(running, places, cpu_s)
        return [outcome(process, folder, place) for process, place in zip(running, places, strict=True)]


def as_toml(config: NodeConfig, tasks: bool = True) -> str:
    """The keys that are set; without `tasks`, a member has all of its swarm's."""
    return tomli_w.dumps(config.model_dump(exclude_unset=True, exclude_none=True, exclude=None if tasks else {"tasks"}))


def stop_after(running: Sequence[subprocess.Popen[str]], places: Sequence[Path], cpu_s: float) -> None:
    """Interrupt each process `cpu_s` CPU seconds after its first round."""
    began: dict[int, float] = {}
    waiting, deadline = set(range(len(running))), time.monotonic() + START_S
    while waiting:
        for i in sorted(waiting):
            if running[i].poll() is not None:
                raise RuntimeError(f"{places[i].name} ended with {running[i].returncode} before its time")
            spent = sum(sum(process.cpu_times()[:2]) for process in tree(running[i].pid))
            if i not in began and metrics(places[i]):
                began[i] = spent
            if spent - began.get(i, spent) >= cpu_s:
                running[i].send_signal(signal.SIGINT)
                waiting.remove(i)
        if len(began) < len(running) and time.monotonic() > deadline:
            raise TimeoutError(f"no first round within {START_S:g} s")
        time.sleep(LOOK_S)


def outcome(process: subprocess.Popen[str], folder: Path, place: Path) -> Row:
    """The node's summary, once it has ended."""
    process.wait(300)
    lines = [line for log in sorted(folder.glob("*.log")) for line in log.read_text().splitlines()]
    summaries = [json.loads(line) for line in lines if line.startswith('{"') and f'"{place}"' in line]
    (summary,) = [found for found in summaries if "held_out_after" in found]
    measured = subprocess.run(
        [sys.executable, "-m", "swarm_node", "eval", str(place), "--json"], check=True, capture_output=True, text=True
    )
    rounds = metrics(place)
    last = rounds[-max(1, len(rounds) // 6) :]
    return {
        "rounds": len(rounds),
        "reward": round(fmean(line["reward"] for line in last), 4),
        "groups_used": round(fmean(line.get("swarm/groups_used", 0.0) for line in rounds), 2),
        "before": summary["held_out_before"]["all"],
        "after": json.loads(measured.stdout)["held_out"]["all"],
    }


def path_of(setting: str, kind: str, seed: int) -> Path:
    return FOLDER / setting / f"{kind}-{seed}.json"


def rows_of(setting: str, kind: str) -> dict[int, Row]:
    """Seed -> row."""
    rows = (json.loads(path.read_text()) for path in (FOLDER / setting).glob(f"{kind}-*.json"))
    return {row["seed"]: row for row in rows}


def show(setting: str, kind: str, seed: int, nodes: Sequence[Row]) -> None:
    mean = lambda when, key: fmean(node[when][key] for node in nodes)  # noqa: E731
    print(
        f"{setting}  {kind}  seed {seed}  {fmean(node['rounds'] for node in nodes):.0f} rounds  "
        f"pass@1 {mean('before', 'pass_1'):.3f} -> {mean('after', 'pass_1'):.3f}  "
        f"pass@8 {mean('before', 'pass_k'):.3f} -> {mean('after', 'pass_k'):.3f}",
        flush=True,
    )


def report() -> str:
    """A Markdown table: pass@1 of members and silos, the difference over seeds, and the simulator's difference."""
    rows, cpu_s = [], 0.0
    for setting in CPU_S:
        found = {kind: rows_of(setting, kind) for kind in KINDS}
        seeds = sorted(set.intersection(*(set(runs) for runs in found.values())))
        if not seeds:
            continue
        cpu_s += sum(CPU_S[setting] * len(row["nodes"]) for runs in found.values() for row in runs.values())
        means = {
            (kind, key): [fmean(node["after"][key] for node in runs[seed]["nodes"]) for seed in seeds]
            for kind, runs in found.items()
            for key in ("pass_1", "pass_k")
        }
        more = [a - b for a, b in zip(means["joined", "pass_1"], means["silos", "pass_1"], strict=True)]
        pass_1, pass_k = ([f"{fmean(means[kind, key]):.3f}" for kind in KINDS] for key in ("pass_1", "pass_k"))
        cell = interval(more, "+.3f"), interval(simulated(setting, CPU_S[setting]), "+.3f")
        rows.append([setting, len(seeds), f"{CPU_S[setting]:g}", *pass_1, *cell, *pass_k])
    columns = ["setting", "seeds", "CPU s", "joined, pass@1", "silos", "difference", "simulated"]
    return f"{table([*columns, 'joined, pass@8', 'silos'], rows)}\n\n{spent(cpu_s)}"


def simulated(setting: str, cpu_s: float) -> list[float]:
    """How much more pass@1 a simulated member has than a silo after `cpu_s`, or at its end, by seed."""
    found = sharing.load(setting)
    joined, silos = (found.get(arm, {}) for arm in KINDS.values())

    def pass_1(row: Row) -> float:
        looks = passes(row)
        return value_at(looks, min(cpu_s, looks[-1][0])) or 0.0

    return [pass_1(joined[seed]) - pass_1(silos[seed]) for seed in sorted(joined.keys() & silos.keys())]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=CPU_S, default=list(CPU_S), metavar="SETTING")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--report", action="store_true", help="the table of all that has been run")
    parser.add_argument("--quick", action="store_true", help="a short look; nothing is stored")
    args = parser.parse_args(argv)
    mind_signals()
    if args.report:
        text = report()
        (FOLDER / "report.md").write_text(text + "\n")
        print(text)
        return
    if args.quick:
        for kind in KINDS:
            show("tags", kind, 0, run(SETTINGS["tags"], kind, 0, 2, 8.0))
        return
    for seed in args.seeds:
        for setting in args.settings:
            for kind in KINDS:
                path = path_of(setting, kind, seed)
                if not path.exists():
                    nodes = run(SETTINGS[setting], kind, seed, args.nodes, CPU_S[setting])
                    row = {"setting": setting, "kind": kind, "seed": seed, "cpu_s": CPU_S[setting], "nodes": nodes}
                    write_row(path, row | {"machine": machine()})
                    show(setting, kind, seed, nodes)


if __name__ == "__main__":
    main()
