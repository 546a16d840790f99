"""What README's swarm walk leaves: two members that join by link, for the time that README gives them.

    python -m benchmarks.walk [--arms readme default] [--seeds 0 1 2 3 4] [--cpu-s 400] [--missing]
    python -m benchmarks.walk --report

`new --tasks small`, a bootstrap and two `join LINK`, as README types them, with the settings of an arm. A member is
told to stop (SIGINT) once all its processes have taken `--cpu-s` CPU seconds since its first round: seven minutes of
one core, less what the bootstrap takes. Its own held-out figures, before and after, are the row. The report says
whether pass@8 falls by more than noise (the 95 % interval of the change is below 0), and whether pass@1 rises.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

from benchmarks.common import RESULTS, machine, spent, table, write_row
from benchmarks.joined import stop_after
from benchmarks.overhead import LOCAL, commands, link_of
from benchmarks.processes import mind_signals

FOLDER = RESULTS / "walk"
ARMS: dict[str, tuple[str, ...]] = {
    "readme": ("--set", "grpo.advantage=pass_k"),
    "default": (),
}
"""Name -> what is typed behind `join LINK --name …`."""
NAMES = ("alice", "bob")
Row = dict[str, Any]


def run(arm: str, seed: int, cpu_s: float) -> list[Row]:
    """The held-out figures of both members."""
    with commands() as (folder, start):
        new = ["new", "--name", "demo", "--tasks", "small", "--out", str(folder / "demo.toml")]
        subprocess.run([sys.executable, "-m", "swarm_node", *new], check=True, capture_output=True)
        start("bootstrap", str(folder / "demo.toml"), *LOCAL, "--run-dir", str(folder / "hub"))
        link, places = link_of(folder / "hub"), [folder / name for name in NAMES]
        running = [
            start(
                *("join", link, *LOCAL, "--name", place.name, "--run-dir", str(place), "--json"),
                *("--seed", str(1000 * seed + number), "--set", "rounds=1000000", *ARMS[arm]),
            )
            for number, place in enumerate(places)
        ]
        stop_after(running, places, cpu_s)
        for process in running:
            process.wait(300)
        lines = [line for log in sorted(folder.glob("*.log")) for line in log.read_text().splitlines()]
        summaries = [json.loads(line) for line in lines if line.startswith('{"')]
        found = [each for each in summaries if "held_out" in each]
        return [{"rounds": each["rounds"], **each["held_out"]} for each in found]


def report() -> str:
    """A Markdown table with a row for each member, and how many of them fell or rose in each arm."""
    rows, cpu_s, judged = [], 0.0, dict[str, list[tuple[bool, bool]]]()
    for path in sorted(FOLDER.glob("*.json")):
        row = json.loads(path.read_text())
        cpu_s += row["cpu_s"] * len(row["nodes"])
        for name, node in zip(NAMES, row["nodes"], strict=True):
            change = [f"{before:.3f} -> {after:.3f}" for before, after in (node["pass_1"], node["pass_k"])]
            low, high = node["interval_k"]
            told = ["yes" if found else "no" for found in judge(node)]
            judged.setdefault(row["arm"], []).append(judge(node))
            rows.append([row["arm"], row["seed"], name, node["rounds"], *change, f"{low:+.3f} to {high:+.3f}", *told])
    columns = ["arm", "seed", "member", "rounds", "pass@1", "pass@8", "95 % interval of pass@8's change"]
    text = table([*columns, "pass@8 falls", "pass@1 rises"], rows)
    for arm, members in judged.items():
        falls, rises = map(sum, zip(*members, strict=True))
        text += f"\n\n{arm}: pass@8 falls for {falls}, pass@1 rises for {rises} of {len(members)} members."
    return f"{text}\n\n{spent(cpu_s)}"


def judge(node: Row) -> tuple[bool, bool]:
    """Whether the pass@8 of a member fell by more than noise, and whether its pass@1 rose."""
    before, after = node["pass_1"]
    return node["interval_k"][1] < 0, after > before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", default=["readme"], choices=ARMS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--cpu-s", type=float, default=400.0)
    parser.add_argument("--missing", action="store_true", help="leave out rows that are there")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    mind_signals()
    for seed in options.seeds if not options.report else []:
        for arm in options.arms:
            path = FOLDER / f"{arm}-{seed}.json"
            if options.missing and path.exists():
                continue
            nodes = run(arm, seed, options.cpu_s)
            row = {"machine": machine(), "arm": arm, "seed": seed, "cpu_s": options.cpu_s, "nodes": nodes}
            write_row(path, row, indent=1)
            print(arm, seed, [(n["rounds"], n["pass_1"], n["pass_k"]) for n in nodes], flush=True)
    print(report())


if __name__ == "__main__":
    main()
