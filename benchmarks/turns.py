"""Does a policy learn a dialogue of two turns, and does it use what is said in between?

    python -m benchmarks.turns [--model smollm2] [--digits 2] [--rounds 40] [--arms hint "no hint"] [--seeds 31]

Runs `swarm-node local` on the task `second_try`, with a model from its stored weights, and the same where every wrong
answer is answered with a bare "No.": what is gained by a second try alone. Reported: held-out pass@1 (right at the
first or at the second try) before and after, wall time and CPU time of the whole command.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.common import table, write
from swarm_node.tasks.base import Messages
from swarm_node.tasks.second_try import SecondTry
from swarm_node.types import Task


class NoHint(SecondTry):
    """A wrong answer gets no hint."""

    generator = "no-hint 1"

    def __init__(self, name: str, options: dict[str, Any], path: str = "") -> None:
        super().__init__("no_hint", options, path)

    def step(self, task: Task, messages: Messages, answer: str) -> tuple[Messages, float | None, bool]:
        said, reward, over = super().step(task, messages, answer)
        return said if over else [*said[:-1], {"role": "user", "content": "No."}], reward, over


ARMS = {"hint": "second_try", "no hint": f"{__file__}:NoHint"}
SETS = ("policy.threads=1", "policy.dtype=float32", "rollouts.max_new_tokens=24", "rollouts.groups=8")


def run(env: str, args: argparse.Namespace, seed: int, folder: Path) -> dict[str, Any]:
    """The summary of a run, and what it took."""
    command = [sys.executable, "-m", "swarm_node", "local", "--model", args.model, "--rounds", str(args.rounds)]
    command += ["--json", "--seed", str(seed), "--run-dir", str(folder)]
    tasks = f'tasks=[{{env="{env}", config={{digits={args.digits}}}}}]'
    command += [word for pair in (tasks, *SETS) for word in ("--set", pair)]
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout and process.stderr
    out, err = process.stdout.read(), process.stderr.read()  # a few kilobytes each: neither pipe fills up
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"seed {seed} failed:\n{err}")
    return json.loads(out) | {"seconds": time.monotonic() - began, "cpu_s": usage.ru_utime + usage.ru_stime}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--digits", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[31])
    args = parser.parse_args()
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            for arm in args.arms:
                found = run(ARMS[arm], args, seed, Path(folder) / f"{arm}-{seed}")
                before, after = (found[f"held_out_{when}"]["all"]["pass_1"] for when in ("before", "after"))
                row = {"arm": arm, "seed": seed, "before": before, "after": after}
                figures.append(row | {key: round(found[key], 1) for key in ("seconds", "cpu_s")})
                print(figures[-1], flush=True)
    rows = []
    for arm in args.arms:
        mine = [row for row in figures if row["arm"] == arm]
        means = (fmean(row[key] for row in mine) for key in ("before", "after"))
        rows.append([arm, *(f"{mean:.3f}" for mean in means), f"{fmean(row['cpu_s'] for row in mine):.0f}"])
    print(table(["arm", "pass@1 before", "after", "CPU s"], rows))
    write("turns", {"model": args.model, "digits": args.digits, "rounds": args.rounds, "rows": figures})


if __name__ == "__main__":
    main()
