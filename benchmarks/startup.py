"""How long `swarm-node --help` takes to answer, beside a bare Python and one that imports torch.

    python -m benchmarks.startup [--repeats 15]

Median wall time, contestants in turn after one warm-up each. Goal: at most 0.5 s.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from benchmarks.common import median, table, write

GOAL = 0.5
CONTESTANTS = {
    "swarm-node --help": [sys.executable, "-m", "swarm_node", "--help"],
    "python -c pass": [sys.executable, "-c", "pass"],
    'python -c "import torch"': [sys.executable, "-c", "import torch"],
}


def seconds(command: list[str]) -> float:
    """Wall time of one run."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for repeat in range(args.repeats + 1):
        for name, command in CONTESTANTS.items():
            taken = seconds(command)
            if repeat:
                times[name].append(taken)
    medians = {name: median(taken) for name, taken in times.items()}
    print(
        table(
            ["command", "median s", "min s"],
            [[n, f"{m:.3f}", f"{min(times[n]):.3f}"] for n, m in medians.items()],
        )
    )
    write(
        "startup",
        {
            "repeats": args.repeats,
            "goal_s": GOAL,
            "median_s": medians,
            "min_s": {n: min(t) for n, t in times.items()},
        },
    )


if __name__ == "__main__":
    main()
