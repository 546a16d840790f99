"""How long commands take to answer: `--help`, the first line of a start, and refusals of mistakes.

    python -m benchmarks.startup [--repeats 15]

Median wall time, contestants in turn after one warm-up each, beside a bare Python and one that imports torch. Goals on
an idle machine: `--help` and the first line of a start within 0.5 s, refusals within 1.5 s.

The first line is timed to its last byte; the run is then ended, and what it does afterwards is not timed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.common import median, table, write
from swarm_node.storage.rundir import RunDir
from tests.support.plain import HIDE

GOAL, REFUSAL_GOAL = 0.5, 1.5
NODE = [sys.executable, "-m", "swarm_node"]
PLAIN = [sys.executable, "-c", f"{HIDE}\nfrom swarm_node.cli.app import main\nmain()"]  # as if without extras
PEER = "12D3KooWQuzkL1NVeyDYUp3EUeMSe3onxZxPDiYq6tLhpKBzVeCR"  # nobody listens at its address
WHOLE = {
    "swarm-node --help": [*NODE, "--help"],
    "python -c pass": [sys.executable, "-c", "pass"],
    'python -c "import torch"': [sys.executable, "-c", "import torch"],
}
FIRST_LINES = {
    "local": [*NODE, "local", "--run-dir", "runs/first"],
    "join": [*NODE, "join", f"swarm://{'ab' * 32}?peer=/ip4/127.0.0.1/tcp/9/p2p/{PEER}", "--run-dir", "runs/second"],
    "eval": [*NODE, "eval", "starter"],
}
REFUSALS = {
    "unknown task": [*NODE, "local", "--tasks", "gdc"],
    "table with tabs": [*NODE, "local", "--tasks", "q.tsv"],
    "data set of the hub": [*NODE, "local", "--tasks", "openai/gsm8k"],
    "broken question file": [*NODE, "local", "--tasks", "broken.jsonl"],
    "no such model": [*NODE, "local", "--model", "nope"],
    "directory in use": [*NODE, "local", "--run-dir", "runs/used"],
    "directory is a file": [*NODE, "local", "--run-dir", "broken.jsonl"],
    "eval of nothing": [*NODE, "eval", "nothing"],
    "wrong key": [*NODE, "local", "--set", "grpo.los=gspo"],
    "short link": [*NODE, "join", "swarm://abc"],
    "no extra for a swarm": [*PLAIN, "join", "swarm://abc"],
    "no extra for puzzles": [*PLAIN, "local", "--tasks", "small"],
    "no extra for stages": [*PLAIN, "local", "--stages", "2"],
    "no extra for a page of a swarm": [*PLAIN, "dashboard", "swarm://abc"],
}


def whole(command: list[str], folder: Path) -> float:
    """Seconds of one run that ends well."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)
    return time.perf_counter() - start


def first_line(command: list[str], folder: Path) -> float:
    """Seconds to the first line on standard output or standard error."""
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        took = time.perf_counter() - start
        process.kill()
    assert b"starting" in line, line
    return took


def refusal(command: list[str], folder: Path) -> float:
    """Seconds to the end of a start that is refused."""
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, cwd=folder)
    took = time.perf_counter() - start
    assert done.returncode in (2, 75), done.stderr.decode()
    return took


@contextmanager
def place() -> Iterator[Path]:
    """A directory with what the commands name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "broken.jsonl").write_text("not json\n")
        (path / "q.tsv").write_text("question\tanswer\n")
        with RunDir.open(path / "runs/used"):
            yield path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # what pip installs is compiled; so is this clone, by the warm-up
    kinds = [(whole, "", WHOLE), (first_line, "first line: ", FIRST_LINES), (refusal, "refused: ", REFUSALS)]
    contestants = {prefix + name: (kind, command) for kind, prefix, each in kinds for name, command in each.items()}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    with place() as folder:
        for repeat in range(args.repeats + 1):
            for name, (kind, command) in contestants.items():
                taken = kind(command, folder)
                if repeat:
                    times[name].append(taken)
    medians = {name: median(taken) for name, taken in times.items()}
    rows = [[name, f"{middle:.3f}", f"{min(times[name]):.3f}"] for name, middle in medians.items()]
    print(table(["command", "median s", "min s"], rows))
    write(
        "startup",
        {
            "repeats": args.repeats,
            "goal_s": GOAL,
            "refusal_goal_s": REFUSAL_GOAL,
            "median_s": medians,
            "min_s": {name: min(taken) for name, taken in times.items()},
        },
    )


if __name__ == "__main__":
    main()
