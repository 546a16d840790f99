"""What an idle member costs in two versions of this project, by turns in one run.

    python -m benchmarks.idle --before DIR [--repeats 5] [--nodes 4] [--seconds 30]

DIR is a checkout of the earlier version (`git worktree add DIR COMMIT`). Each repeat starts a swarm of each version in
turn; nobody says anything. CPU seconds and resident memory are those of all processes of a member that is no bootstrap,
the median over members. Figures go to results/idle.json; ratios are now / before, of the medians over repeats.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

from benchmarks.common import table, write
from benchmarks.gossip import SWARM, started
from benchmarks.gossip_nodes import Spec
from benchmarks.processes import Meter, kind, mind_signals, other_load, rss_mib

ROOT = Path(__file__).parent.parent
SETTLE_S = 20.0
"""After all nodes see each other: imports are over and the routing tables are filled."""
PARTS = ("p2pd", "gossip", "node")


def idle(checkout: Path, nodes: int, seconds: float) -> dict[str, float]:
    """CPU per cent of one core, and MiB, of a member's processes."""
    with started(Spec("gossip", "", SWARM, nodes), checkout=checkout.resolve()) as children:
        time.sleep(SETTLE_S)
        with Meter({str(i): child.pid for i, child in enumerate(children)}) as meter:
            time.sleep(seconds)
        members = list(meter.trees)[1:]
        figures: dict[str, float] = {}
        for part in PARTS:
            cpu = [100 * meter.cpu_s[name][part] / meter.seconds for name in members]
            memory = [rss_mib([p for p in meter.trees[name] if kind(p) == part]) for name in members]
            figures |= {f"cpu_percent_{part}": median(cpu), f"mib_{part}": median(memory)}
        figures["cpu_percent"] = sum(figures[f"cpu_percent_{part}"] for part in PARTS)
        figures["mib"] = sum(figures[f"mib_{part}"] for part in PARTS)
        figures["kb_per_s"] = median(sum(meter.bytes[name]) / 1000 / meter.seconds for name in members)
        return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=30.0)
    args = parser.parse_args()
    mind_signals()
    load = other_load()
    rows: dict[str, list[dict[str, float]]] = {"before": [], "now": []}
    for _ in range(args.repeats):
        for name, checkout in (("before", args.before), ("now", ROOT)):
            rows[name].append(idle(checkout, args.nodes, args.seconds))
            print(name, {key: round(value, 2) for key, value in rows[name][-1].items()}, flush=True)
    medians = {name: {key: median(row[key] for row in found) for key in found[0]} for name, found in rows.items()}
    ratios = {key: medians["now"][key] / max(before, 1e-9) for key, before in medians["before"].items()}
    shown = [[key, *(f"{medians[name][key]:.2f}" for name in rows), f"{ratio:.3f}"] for key, ratio in ratios.items()]
    print(table(["", *rows, "now / before"], shown))
    write("idle", {"load": load, "nodes": args.nodes, "repeats": rows, "medians": medians, "ratios": ratios})


if __name__ == "__main__":
    main()
