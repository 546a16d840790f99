"""The demo on several seeds: does it learn, how fast, how much memory?

    python -m benchmarks.demo [--seeds 31 32 33 34 35]

Runs `swarm-node local --config configs/demo.toml` from nothing for each seed, one after the other. Reported: mean
reward over all own groups in the first and last tenth of the rounds, held-out pass@1 and pass@8 before and after, wall
time and CPU time of the whole command and its peak memory. Seeds 11 to 13 and 20 to 22 chose the demo's settings.
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

from benchmarks.common import table, write

CONFIG = Path(__file__).parent.parent / "configs" / "demo.toml"


def run(seed: int, folder: Path) -> dict:
    """One demo; the summary of the run, its seconds and its peak memory."""
    command = [sys.executable, "-m", "swarm_node", "local", "--config", str(CONFIG), "--json"]
    command += ["--seed", str(seed), "--run-dir", str(folder / f"seed{seed}")]
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = process.stdout.read(), process.stderr.read()  # a few kilobytes each: neither pipe fills up
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"seed {seed} failed:\n{err}")
    costs = {
        "seconds": time.monotonic() - start,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_mib": usage.ru_maxrss / 1024,
    }
    return json.loads(out) | costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[31, 32, 33, 34, 35])
    args = parser.parse_args()
    rows, figures = [], []
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            result = run(seed, Path(folder)) | {"seed": seed}
            before, after = result["held_out_before"]["all"], result["held_out_after"]["all"]
            figures.append(result)
            rows.append(
                [
                    seed,
                    f"{result['reward_first_tenth']:.3f} -> {result['reward_last_tenth']:.3f}",
                    f"{before['pass_1']:.3f} -> {after['pass_1']:.3f}",
                    f"{before['pass_k']:.3f} -> {after['pass_k']:.3f}",
                    f"{result['seconds']:.0f}",
                    f"{result['cpu_s']:.0f}",
                    f"{result['peak_mib']:.0f}",
                ]
            )
            print(rows[-1], flush=True)
    columns = [
        "seed",
        "reward, first -> last tenth",
        "held-out pass@1",
        "held-out pass@8",
        "seconds",
        "CPU s",
        "peak MiB",
    ]
    print(table(columns, rows))
    write("demo", {"runs": figures})


if __name__ == "__main__":
    main()
