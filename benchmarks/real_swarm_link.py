"""Two real processes with a real model: the part `link` of `benchmarks.real_swarm`.

    joined    `new`, `bootstrap` and two times `join LINK`, as docs/bring-your-model.md shows it
    alone     two times `local`, on the same cores

Each node has one thread, as many rounds and a rate that does not fall. It is not asked held-out questions while it
trains. CPU seconds are those of all its processes, p2pd and gossip among them, since its first round's end. What its
newest checkpoint answers to held-out questions is measured afterwards (`benchmarks.real_held_out`).
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.overhead import LOCAL, commands, link_of, metrics
from benchmarks.processes import tree
from benchmarks.real_held_out import Asked, measure
from benchmarks.real_learning import NODE, newest_adapter, trained_policy
from benchmarks.real_sets import path_of

JOINED = "joined"
NODES = "alice", "bob"
SETS = (
    "--set",
    "policy.threads=1",
    "--set",
    "policy.dtype=float32",
    "--set",
    "eval.questions=0",
    "--set",
    "eval.every=0",
    "--set",
    "grpo.schedule=constant",
)
LOOK_S = 0.2
MOST_S = 9000.0  # of all rounds
Row = dict[str, Any]


def arguments(link: str, model: str, file: Path, place: Path) -> list[str]:
    """The command of a node and what it is given; without a `link`, of a node alone."""
    if link:
        return ["join", link, *LOCAL, "--name", place.name, "--run-dir", str(place)]
    return ["local", "--model", model, "--tasks", str(file), "--run-dir", str(place)]


def run(model: str, set_name: str, arm: str, seed: int, rounds: int, asked: Asked, say: Callable[[str], None]) -> Row:
    """The figures of both nodes. RuntimeError if one ends before its rounds do."""
    began, file = time.monotonic(), path_of(set_name)
    with commands() as (folder, start):
        link = swarm(folder, model, file, start) if arm == JOINED else ""
        places = [folder / name / "runs" / name for name in NODES]
        running = []
        for i, place in enumerate(places):
            own = ["--rounds", str(rounds), "--seed", str(10 * seed + i), *SETS]
            running.append(start(*arguments(link, model, file, place), *own))
        curves = watched(running, places, say)
        nodes = []
        for name, place, curve in zip(NODES, places, curves, strict=True):
            adapter = newest_adapter(folder / name)
            if adapter is None or len(curve) < rounds:
                raise RuntimeError(f"{name} ended after {len(curve)} of {rounds} rounds, or saved nothing")
            policy = trained_policy(NODE, model, folder / name)
            looks = measure(policy, asked, [(curve[-1][0], str(adapter))])
            used = [line.get("swarm/groups_used", 0.0) for line in metrics(place)]
            exchanges = metrics(place)[-1].get("averaging/exchanges", 0.0)
            looks_of = [asdict(each) for each in looks]
            nodes.append({"curve": curve, "looks": looks_of, "used": round(fmean(used), 2), "exchanges": exchanges})
    return {
        "nodes": nodes,
        "rounds": rounds,
        "asked": asdict(asked) | {"file": file.name, "temperature": 1.0},
        "settings": [*SETS],
        "seconds": round(time.monotonic() - began, 1),
    }


def swarm(folder: Path, model: str, file: Path, start: Callable[..., subprocess.Popen[str]]) -> str:
    """Make a swarm and its bootstrap; the link to it."""
    out = folder / "mine.toml"
    new = ["new", "--name", "mine", "--model", model, "--tasks", str(file), "--out", str(out)]
    subprocess.run([sys.executable, "-m", "swarm_node", *new], check=True, capture_output=True)
    start("bootstrap", str(out), *LOCAL, "--run-dir", str(folder / "hub"))
    return link_of(folder / "hub")


def watched(
    running: Sequence[subprocess.Popen[str]], places: Sequence[Path], say: Callable[[str], None]
) -> list[list[tuple[float, float]]]:
    """(CPU seconds since the first round's end, reward) of each round of each node, until all have ended."""
    curves: list[list[tuple[float, float]]] = [[] for _ in running]
    first: dict[int, float] = {}
    until = time.monotonic() + MOST_S
    while any(process.poll() is None for process in running):
        if time.monotonic() > until:
            raise TimeoutError(f"the nodes have not ended within {MOST_S:g} s")
        look(running, places, curves, first, say)
        time.sleep(LOOK_S)
    look(running, places, curves, first, say)
    if failed := [process.returncode for process in running if process.returncode]:
        raise RuntimeError(f"a node ended with {failed[0]}")
    return curves


def look(
    running: Sequence[subprocess.Popen[str]],
    places: Sequence[Path],
    curves: list[list[tuple[float, float]]],
    first: dict[int, float],
    say: Callable[[str], None],
) -> None:
    """Add the rounds that have ended."""
    for i, (process, place, curve) in enumerate(zip(running, places, curves, strict=True)):
        spent = sum(sum(each.cpu_times()[:2]) for each in tree(process.pid))
        for line in metrics(place)[len(curve) :]:
            first.setdefault(i, spent)
            since = max(spent - first[i], curve[-1][0] if curve else 0.0)  # an ended process has no more
            curve.append((round(since, 1), round(line["reward"], 4)))
            say(f"{place.name}, round {len(curve)}, {since:.0f} CPU s: {line['reward']:.3f}")
