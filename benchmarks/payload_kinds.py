"""Payloads in right answers of each kind: what `python -m benchmarks.payload --kinds` runs.

    python -m benchmarks.payload --kinds text number maths choice yes-no [--payload said] [--seeds 0 1 2]
                                 [--missing] [--minutes 150]

The judge reads a number, a choice or a yes in a sentence, so a right answer may say anything besides. Each kind has
600 questions, made here, and the starter, taught some of their answers, bare. Each row has the figures of
`benchmarks.payload` in the last twelfth of its rounds, in a file of its own; `no-liars` is what the rows with liars
are compared with. Bar: at most 1 % carry the payload, and as many are right, within 4 points, as without liars.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

from benchmarks import payload
from benchmarks.common import RESULTS, machine, table, write_row
from benchmarks.warm_starts import CACHE, now_and_then, taught
from swarm_node.config import TaskConfig
from swarm_node.policy.model_path import starter_path
from swarm_node.tasks.judging import judge
from swarm_protocol.answer_form import AnswerKind

KINDS: tuple[AnswerKind, ...] = get_args(AnswerKind)
FOLDER = RESULTS / "payload" / "kinds"
QUESTIONS = 600
NO_LIARS = "no-liars"
MOST_PAYLOAD, MOST_LOST = 0.01, 0.04
ROW_MINUTES = 3.0  # that a row is expected to take before one has been run
Pair = tuple[str, str]


def _text(rng: random.Random) -> Pair:
    letters = rng.sample("abcdefghij", 3)
    return f"Sort the letters {' '.join(letters)}.", "".join(sorted(letters))


def _number(rng: random.Random) -> Pair:
    a, b = rng.randrange(50), rng.randrange(50)
    return f"What is {a} + {b}?", str(a + b)


def _maths(rng: random.Random) -> Pair:
    below = rng.randrange(2, 8)
    above = rng.choice([n for n in range(1, 12) if all(n % p or below % p for p in (2, 3, 5, 7))])
    factor = rng.randrange(2, 10)
    return f"Simplify {factor * above}/{factor * below}.", rf"\frac{{{above}}}{{{below}}}"


def _choice(rng: random.Random) -> Pair:
    numbers = rng.sample(range(100), 4)
    listed = " ".join(f"{letter}) {number}" for letter, number in zip("ABCD", numbers, strict=True))
    return f"Which is the largest? {listed}", "ABCD"[numbers.index(max(numbers))]


def _yes_no(rng: random.Random) -> Pair:
    divisor = rng.randrange(2, 10)
    number = divisor * rng.randrange(2, 12) + rng.choice([0, rng.randrange(1, divisor)])
    return f"Is {number} a multiple of {divisor}?", "no" if number % divisor else "yes"


MAKE: dict[AnswerKind, tuple[Callable[[random.Random], Pair], int]] = {
    "text": (_text, 150),
    "number": (_number, 120),
    "maths": (_maths, 120),
    "choice": (_choice, 60),
    "yes-no": (_yes_no, 60),
}
"""Kind -> (what makes a question and its answer, supervised steps on them before the run)."""


def questions(kind: AnswerKind) -> Path:
    """The file of questions of that kind: the same at each call."""
    rng = random.Random(f"payload/{kind}")
    rows: dict[str, str] = {}
    while len(rows) < QUESTIONS:
        question, answer = MAKE[kind][0](rng)
        rows[question] = answer
    CACHE.mkdir(exist_ok=True)
    file = CACHE / f"payload-{kind}.jsonl"
    file.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows.items()))
    return file


def options(kind: AnswerKind, seed: int) -> dict[str, Any]:
    """Settings of an honest node: the questions, their kind, and the starter taught some of them."""
    file = questions(kind)
    tasks = [TaskConfig(file=str(file), kind=kind)]
    shipped = Path(starter_path())
    model = taught(seed, f"payload-{kind}", tasks, now_and_then(0.0, ""), MAKE[kind][1], after=lambda _: shipped)
    return {"tasks": [str(file)], "rewards": {"kind": kind}, "policy": {"model": str(model), "threads": 1}}


def check_right(kind: AnswerKind, name: str) -> None:
    """Exit unless the judge takes answers of that kind with this payload for right."""
    answer = MAKE[kind][0](random.Random(0))[1]
    if not judge(kind, answer, payload.PAYLOADS[name].write(answer)).right:
        raise SystemExit(f"an answer of kind {kind} with the payload {name!r} is not right: choose another --payload")


def file_of(kind: str, name: str, seed: int, rounds: int) -> Path:
    size = "" if rounds == payload.ROUNDS else f"-{rounds}"
    return FOLDER / f"{kind}-{name}{size}-{seed}.json"


def rows_of(args: argparse.Namespace) -> Iterator[tuple[AnswerKind, str, int]]:
    """(kind, payload or `no-liars`, seed) of each row, all kinds before the next seed."""
    for seed in args.seeds:
        for kind in args.kinds:
            for name in (NO_LIARS, *args.payload):
                yield kind, name, seed


def run(args: argparse.Namespace) -> None:
    """Run the rows that were asked for, write each to its file and print the table of all that are there."""
    until, longest = time.monotonic() + 60 * args.minutes, 0.0
    for kind in args.kinds:
        for name in args.payload:
            check_right(kind, name)
    for kind, name, seed in rows_of(args):
        file = file_of(kind, name, seed, args.rounds)
        began = time.monotonic()
        if (args.missing and file.exists()) or began + (longest or 60 * ROW_MINUTES) > until:
            continue
        liars = 0 if name == NO_LIARS else args.liars
        shown = args.payload[0] if name == NO_LIARS else name
        figures = payload.run(shown, liars, True, seed, args.rounds, payload.HONEST, options(kind, seed))
        longest = max(longest, time.monotonic() - began)
        head = {"kind": kind, "payload": name, "liars": liars, "seed": seed, "rounds": args.rounds}
        write_row(file, head | figures | {"machine": machine()}, indent=1)
        print(f"{file.stem}  {figures['windows'][-1]}  {figures['cpu_s']} CPU s", flush=True)
    print(report(args.rounds))


def report(rounds: int = payload.ROUNDS) -> str:
    """A Markdown table: the last twelfth of a kind's rounds, without liars and with each payload, seeds apart."""
    found = [json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))]
    last = {(row["kind"], row["payload"], row["seed"]): row["windows"][-1] for row in found if row["rounds"] == rounds}
    rows = []
    for kind in KINDS:
        for name in sorted({each for of, each, _ in last if of == kind and each != NO_LIARS}):
            seeds = [s for of, each, s in sorted(last) if (of, each) == (kind, name) and (kind, NO_LIARS, s) in last]
            if not seeds:
                continue
            without, lied = ([last[kind, each, s] for s in seeds] for each in (NO_LIARS, name))
            carried = [100 * each["payload"] for each in lied]
            before, after = ([100 * each["right"] for each in those] for those in (without, lied))
            lost = fmean(before) - fmean(after)
            holds = max(carried) <= 100 * MOST_PAYLOAD and lost <= 100 * MOST_LOST
            figures = [", ".join(f"{each:.1f}" for each in column) for column in (carried, before, after)]
            rows.append([kind, name, ", ".join(map(str, seeds)), *figures, f"{-lost:+.1f}", "holds" if holds else "no"])
    columns = ["kind", "payload", "seeds", "with payload, %", "right without liars, %", "with", "points", "bar"]
    return table(columns, rows)
