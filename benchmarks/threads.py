"""Two nodes on two cores, and one alone: threads by the machine's load against a fixed number of them.

    python -m benchmarks.threads [--sizes 0.44M 3M] [--repeats 5] [--seconds 20]
    python -m benchmarks.threads --sizes 135M --repeats 1 --seconds 90
    python -m benchmarks.threads --quick         # one short repeat of 0.44M; nothing is stored

Real `swarm-node local` processes, started together: as shipped (as many threads as cores are idle, which spin for a
moment and then sleep while they wait), with `--threads N`, or `asleep` at once. Figures are rounds a second, of both
nodes together, over a window that begins once each has settled; medians over repeats. Ratios are of the arms of one
repeat, which run in turn, with quartiles over the repeats. A policy below two million parameters has one thread as
shipped. Run it on an idle machine, for 40 minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import table, write
from benchmarks.overhead import commands, metrics, until
from benchmarks.processes import mind_signals, other_load
from benchmarks.step import make_policies
from swarm_node.cli.commands.bench import quartiles
from swarm_node.observability.usage import cores

SIZES = {"0.44M": "starter", "3M": "3.2M trained", "135M": "smollm2"}
"""Name -> a policy that the package knows, or one of `benchmarks.step`."""
ASLEEP = "asleep"
ARMS = {
    1: {"as shipped": (), "1 thread": ("--threads", "1"), "2 threads": ("--threads", "2"), ASLEEP: ()},
    2: {"as shipped": (), "1 thread": ("--threads", "1"), ASLEEP: ()},
}
"""Number of nodes -> name -> options of each."""
SHIPPED, *OTHERS = ARMS[1]
SETTINGS = (
    "eval.questions=0",
    "rollouts.max_new_tokens=16",
    "checkpoints.every=1000000",
    "checkpoints.every_minutes=99",
)
SETTLE_S = 15.0  # after the first round of each node: time for three looks at the load
START_S = 120.0  # longest wait for first rounds
Row = dict[str, Any]


def rate(model: str, nodes: int, arm: str, settle_s: float, seconds: float) -> Row:
    """Rounds a second of all nodes together, and what each said of its threads."""
    options, variables = ARMS[nodes][arm], {"GOMP_SPINCOUNT": "0"} if arm == ASLEEP else {}
    with commands(one_thread=False) as (folder, start):
        places = [folder / f"node{number}" for number in range(nodes)]
        sets = [word for setting in SETTINGS for word in ("--set", setting)]
        given = ("--model", model, "--tasks", "small", "--rounds", "1000000", *sets, *options, "--verbose")
        running = [start("local", *given, "--run-dir", str(place), **variables) for place in places]
        until(lambda: all(map(metrics, places)) or _ended(running), START_S)
        time.sleep(settle_s)
        began = time.time()
        time.sleep(seconds)
        ended = time.time()
        _ended(running)
        return {
            "rounds_per_s": sum(_rate([line["time"] for line in metrics(place)], began, ended) for place in places),
            "threads": [_said(place) for place in places],
        }


def _ended(running: Sequence[subprocess.Popen[str]]) -> bool:
    """False. Raises RuntimeError if a node has ended."""
    if any(process.poll() is not None for process in running):
        raise RuntimeError("a node ended before its time")
    return False


def _rate(times: Sequence[float], began: float, ended: float) -> float:
    """Rounds a second, from the times at which rounds ended within a window."""
    inside = [each for each in times if began <= each <= ended]
    if len(inside) < 2:
        raise RuntimeError("fewer than two rounds ended within the window: give it more --seconds")
    return (len(inside) - 1) / (inside[-1] - inside[0])


def _said(place: Path) -> list[str]:
    texts = [json.loads(line)["text"] for line in (place / "events.jsonl").read_text().splitlines()]
    return [text for text in texts if text.startswith("computes with ")]


def lines(found: Row) -> list[list[str]]:
    """The table's rows, of figures as `main` stores them: size -> number of nodes -> arm -> one figure a repeat."""
    rows = []
    for size, by_nodes in found.items():
        for nodes, arms in by_nodes.items():
            rates = {name: [each["rounds_per_s"] for each in repeats] for name, repeats in arms.items()}
            shown = [f"{median(rates[name]):.2f}" if name in rates else "" for name in (SHIPPED, *OTHERS)]
            ratios = [_ratio(rates[SHIPPED], rates[name]) if name in rates else "" for name in OTHERS]
            rows.append([size, str(nodes), *shown, *ratios])
    return rows


def _ratio(mine: Sequence[float], other: Sequence[float]) -> str:
    low, middle, high = quartiles([a / b for a, b in zip(mine, other, strict=True)])
    return f"{middle:.2f}x ({low:.2f}-{high:.2f})"


COLUMNS = ["policy", "nodes", f"{SHIPPED}, rounds/s", *OTHERS, *(f"{SHIPPED} / {name}" for name in OTHERS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each window")
    parser.add_argument("--quick", action="store_true", help="a short look; nothing is stored")
    args = parser.parse_args()
    if args.quick:
        args.sizes, args.repeats, args.seconds = ["0.44M"], 1, 3.0
    elif cores() != 2:
        parser.error(f"this process may use {cores()} cores instead of 2: start it under `taskset -c 0,1`")
    mind_signals()
    load = other_load()
    print(load, flush=True)
    found: Row = {size: {n: {name: [] for name in arms} for n, arms in ARMS.items()} for size in args.sizes}
    with tempfile.TemporaryDirectory() as folder:
        make_policies(Path(folder), [SIZES[size].split()[0] for size in args.sizes if "trained" in SIZES[size]])
        for repeat in range(args.repeats):
            for size in args.sizes:
                model = str(Path(folder) / SIZES[size]) if "trained" in SIZES[size] else SIZES[size]
                for nodes, arms in ARMS.items():
                    for name in arms:
                        row = rate(model, nodes, name, 1.0 if args.quick else SETTLE_S, args.seconds)
                        found[size][nodes][name].append(row)
                        said = (
                            f"{repeat + 1}/{args.repeats} {size}, {nodes} x {name}: {row['rounds_per_s']:.2f} rounds/s"
                        )
                        print(said, row["threads"], file=sys.stderr, flush=True)
    print(table(COLUMNS, lines(found)))
    if not args.quick:
        write("threads", {"other load": load, "seconds": args.seconds, "rows": found})


if __name__ == "__main__":
    main()
