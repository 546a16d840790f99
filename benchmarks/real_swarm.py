"""Does a swarm help a real model? Ways to average adapters, then members of a swarm against silos, from stored weights.

    python -m benchmarks.real_swarm --parts ways --missing --minutes 150    # what is not there yet and ends in time
    python -m benchmarks.real_swarm --parts arms --seeds 1 --missing --minutes 150      # on one core: two at a time
    python -m benchmarks.real_swarm --parts steps link --missing --minutes 150
    python -m benchmarks.real_swarm --report
    python -m benchmarks.real_swarm --quick          # each part with the starter and few rounds; nothing is stored

    ways     supervised steps of four members that average as `benchmarks.real_swarm_ways` says, three seeds
    arms     numbers only (`sums`), 20 rounds, three seeds: alone, alone with as many updates as a member makes,
             sharing, averaging in the two best ways, both
    steps    the best of these arms against both silos where steps are written out, two seeds
    link     two real processes joined by link, and two that are not

A row is a part, an arm and a seed. It is kept as soon as it is there. The two best ways are those with the least loss
at the end of `ways`, the best arm is the soonest in `arms`; `--ways` and `--arms` name others. `link` takes a thread
for each node, the other parts take one: as many run at a time as there are cores, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import real_judge, real_swarm_arms, real_swarm_link, real_swarm_supervised
from benchmarks.common import RESULTS, folder_of, machine, write_row
from benchmarks.processes import mind_signals, other_load
from benchmarks.real_held_out import Asked
from benchmarks.real_sets import NEW_TOKENS, path_of
from benchmarks.real_swarm_arms import ALONE, AVERAGING, BOTH, OFTEN, SHARING, Play
from benchmarks.real_swarm_link import JOINED
from benchmarks.real_swarm_report import best_arm, best_ways, report
from benchmarks.real_swarm_supervised import NEVER, POOLED, Course
from benchmarks.real_swarm_ways import WAYS

FOLDER = RESULTS / "real_swarm"
Row = dict[str, Any]
Key = tuple[str, str, int]
"""Part, arm, seed."""


@dataclass(frozen=True)
class Part:
    """Rows that belong together."""

    set: str
    seeds: tuple[int, ...]
    minutes: float  # that a row is expected to take
    rounds: int = 20


PARTS = {
    "ways": Part("sums", (1, 2, 3), 4),
    "arms": Part("sums", (1, 2, 3), 45),
    "steps": Part("steps", (1, 2), 70),
    "link": Part("sums", (1,), 15),
}
"""In all about an hour and a half; 14 hours on one core, of six arms; 7 on one core, of three; and half an hour."""
SWARMS = (ALONE, OFTEN, SHARING, *(f"{kind}:{way}" for kind in (AVERAGING, BOTH) for way in WAYS))
ARMS = {"ways": (NEVER, POOLED, *WAYS), "arms": SWARMS, "steps": SWARMS, "link": (JOINED, ALONE)}
QUICK_COURSE = Course(averagings=2, steps=2, held_out=4)
QUICK_PLAY = Play(rounds=2, every=1, questions=4, samples=1, thorough=1)
QUICK_ROUNDS = 2  # of the part `link`


def arms_of(part: str, rows: Sequence[Row], args: argparse.Namespace) -> list[str]:
    """The arms of a part in their order; what follows from rows that are not all there is left out."""
    if part in ("ways", "link") or args.arms:
        return [arm for arm in ARMS[part] if not args.arms or arm in args.arms]
    if part == "steps":
        best = best_arm(rows)
        return [ALONE, OFTEN, *([best] if best else [])]
    ways = args.ways or best_ways(rows, PARTS["ways"].seeds)
    first = [f"{kind}:{ways[0]}" for kind in (AVERAGING, BOTH)] if ways else []
    return [ALONE, *first, OFTEN, SHARING, *(f"{AVERAGING}:{way}" for way in ways[1:])]


def file_of(part: str, arm: str, seed: int) -> Path:
    return FOLDER / f"{part}-{arm.replace(':', '-')}-{seed}.json"


def stored() -> list[Row]:
    return [json.loads(file.read_text()) for file in sorted(FOLDER.glob("*.json"))]


def asked_for(args: argparse.Namespace, rows: Callable[[], Sequence[Row]]) -> Iterator[Key]:
    """The rows in their order, a seed of all arms after another. `rows` gives what is stored by then."""
    for part in args.parts:
        for seed in PARTS[part].seeds:
            if not args.seeds or seed in args.seeds:
                for arm in arms_of(part, rows(), args):
                    yield part, arm, seed


def minutes_of(key: Key, rows: Sequence[Row]) -> float:
    """What a row is expected to take: as long as the longest stored one of its arm, else as `PARTS` says."""
    part, arm, _ = key
    known = [row["seconds"] / 60 for row in rows if (row["part"], row["arm"]) == (part, arm)]
    return max(known, default=PARTS[part].minutes)


def run(key: Key, args: argparse.Namespace) -> Row:
    """One row."""
    part, arm, seed = key
    load = other_load()
    _say(f"{part}, {arm}, seed {seed}")
    head = {"part": part, "set": PARTS[part].set, "arm": arm, "seed": seed, "model": args.model}
    figures = figures_of(key, args.model, args.quick)
    return head | figures | {"judge": real_judge.NAME, "load": load, "machine": machine()}


def figures_of(key: Key, model: str, quick: bool) -> Row:
    """What a row has beside its name."""
    part, arm, seed = key
    of = PARTS[part]
    if part == "ways":
        torch.set_num_threads(1)
        course = QUICK_COURSE if quick else Course()
        return real_swarm_supervised.run(model, path_of(of.set), arm, seed, course, _say)
    if part == "link":
        questions, thorough = (4, 1) if quick else (96, 8)
        asked = Asked(str(path_of(of.set)), questions, thorough, thorough, NEW_TOKENS[of.set])
        return real_swarm_link.run(model, of.set, arm, seed, QUICK_ROUNDS if quick else of.rounds, asked, _say)
    play = QUICK_PLAY if quick else Play(rounds=of.rounds)
    return real_swarm_arms.run(model, of.set, arm, seed, play, _say)


def _say(text: str) -> None:
    print(text, flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[], help="of the arms; default: the two best")
    parser.add_argument("--arms", nargs="+", default=[], choices=sorted(set(sum(ARMS.values(), ()))), metavar="ARM")
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--model", help="a name that `local` knows, or a directory; smollm2 unless --quick")
    parser.add_argument("--missing", action="store_true", help="leave out rows that are there")
    parser.add_argument("--minutes", type=float, default=1200.0, help="no row begins that is expected to end later")
    parser.add_argument("--report", action="store_true", help="tables of all rows that are there")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args(argv)
    if args.report:
        print(report(stored()))
        return
    mind_signals()
    args.model = args.model or ("starter" if args.quick else "smollm2")
    folder_of(args.model)  # which may have to be fetched first
    rows: list[Row] = []
    if args.quick:
        args.seeds, args.ways = [1], args.ways or ["apart", "factored"]
    until = time.monotonic() + 60 * args.minutes
    known = (lambda: rows) if args.quick else stored
    for key in asked_for(args, known):
        there = args.missing and file_of(*key).exists() and not args.quick
        if there or time.monotonic() + 60 * minutes_of(key, known()) > until:
            continue
        rows.append(run(key, args))
        if not args.quick:
            write_row(file_of(*key), rows[-1])
        print(report(rows), flush=True)


if __name__ == "__main__":
    main()
