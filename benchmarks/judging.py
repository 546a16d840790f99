"""What the slowest verdicts cost, and how many pairs of answer and reference there are to test the judge.

    python -m benchmarks.judging [--quick]      # --quick: a tenth of the texts; nothing is stored

Each hostile text (`tests/data/answers_hostile.jsonl`) is judged by each kind against its own reference and against the
nastiest of the others, whole, cut where the judge cuts, in a sentence and in a box. CPU milliseconds of one verdict,
nothing remembered: of `REPEATS`, the least. The promise is 100 ms an answer. Two minutes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any, get_args

from benchmarks.common import table, write
from swarm_node.tasks.judging import judge, maths
from swarm_node.tasks.judging.expressions import parse_expression
from swarm_node.tasks.judging.places import extract, extract_place
from swarm_protocol.answer_form import AnswerForm, AnswerKind

DATA = Path(__file__).parent.parent / "tests" / "data"
REPEATS = 3  # another process may disturb one
SLOW_MS = 10.0  # verdicts from here on are measured again
SHOWN = 3  # of each kind
NASTY = 40  # references of the longest are combined with texts of other lines
CUTS = (3_900, 390, 120)
KINDS: tuple[AnswerKind, ...] = get_args(AnswerKind)
REMEMBERED = (judge, extract, extract_place, maths.cleaned, maths.read, parse_expression)

Case = tuple[AnswerKind, AnswerForm, str | tuple[str, ...], str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    lines = _lines("answers_hostile.jsonl")[:: 10 if args.quick else 1]
    slowest = measure(lines)
    rows = [[kind, what, f"{ms:.1f}"] for kind in KINDS for ms, what in slowest[kind][:SHOWN]]
    print(table(["kind", "hostile text", "CPU ms"], rows))
    sources = Counter(_source(pair["source"]) for pair in _lines("answers.jsonl"))
    print(table(["pairs written by", "number"], [[name, count] for name, count in sources.most_common()]))
    if not args.quick:
        write("judging", {"slowest": {kind: slowest[kind][:SHOWN] for kind in KINDS}, "pairs": dict(sources)})


def measure(lines: list[dict[str, Any]]) -> dict[str, list[tuple[float, str]]]:
    """(CPU milliseconds, what the text is) of each text by each kind, the slowest first."""
    nasty = sorted((_accepted(line) for line in lines), key=lambda reference: -len("".join(reference)))[:NASTY]
    found: dict[str, list[tuple[float, str]]] = {}
    for kind in KINDS:
        times = []
        for line in lines:
            text = _text(line)
            cut = [text, *(text[:size] for size in CUTS)]
            cut += [f"The answer is {text[:380]}", rf"\boxed{{{text[:390]}}}", f"${text[:3900]}$"]
            cases: list[Case] = [(kind, line["form"], _accepted(line), each) for each in cut]
            cases += [(kind, line["form"], reference, text[-390:]) for reference in nasty if kind == "maths"]
            times.append((max(map(milliseconds, cases)), line["what"]))
        found[kind] = sorted(times, reverse=True)
    return found


def milliseconds(case: Case) -> float:
    """CPU time of one verdict."""
    kind, form, reference, text = case
    times: list[float] = []
    while len(times) < REPEATS and (not times or times[0] > SLOW_MS):
        for remembered in REMEMBERED:
            remembered.cache_clear()
        began = time.thread_time()
        judge(kind, reference, text, form)
        times.append(1000 * (time.thread_time() - began))
    return min(times)


def _lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def _text(line: dict[str, Any]) -> str:
    return "".join(part if isinstance(part, str) else part["repeat"][0] * part["repeat"][1] for part in line["text"])


def _accepted(line: dict[str, Any]) -> str | tuple[str, ...]:
    reference = line["reference"]
    return tuple(reference) if isinstance(reference, list) else str(reference)


def _source(source: str) -> str:
    return "this project" if source == "own" else "people's reports" if source.startswith("case ") else "other projects"


if __name__ == "__main__":
    main()
