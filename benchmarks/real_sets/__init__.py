"""Questions for real models, made before a setting was searched on them. `python -m benchmarks.real_sets` writes them.

    sums    numbers only: "What is 11 + 18? Answer with the number only."
    steps   three numbers, steps written out; the last number counts
    words   word problems of one or two operations with small numbers

Each set has 500 different questions with one whole number as the answer, drawn with a seed of its own, and lies beside
this file as JSONL. A run holds out about a fifth of them, chosen by a hash of the question.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

FOLDER = Path(__file__).parent
QUESTIONS = 500
SEED = 20261128
NEW_TOKENS = {"sums": 32, "steps": 64, "words": 96}
"""Set -> longest answer, in tokens, of TRL's script and of every measurement."""
Pair = tuple[str, int]
"""A question and its answer."""


def _sum(rng: random.Random) -> Pair:
    a, b, sign = rng.randint(0, 20), rng.randint(0, 20), rng.choice("+-")
    return f"What is {a} {sign} {b}? Answer with the number only.", a + b if sign == "+" else a - b


def _steps(rng: random.Random) -> Pair:
    a, b, c = (rng.randint(2, 30) for _ in range(3))
    first, second = rng.choice("+-"), rng.choice("+-")
    middle = a + b if first == "+" else a - b
    end = middle + c if second == "+" else middle - c
    if middle < 0 or end < 0:
        return _steps(rng)
    return f"Work out {a} {first} {b} {second} {c} in two short steps and end with the result.", end


NAMES = "Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gia", "Hugo", "Iris", "Jon", "Kim", "Leo", "Mia", "Noor", "Omar"
THINGS = "apples", "books", "cards", "coins", "eggs", "marbles", "pencils", "shells", "stamps", "stickers"
STORIES: dict[str, Callable[[int, int, int], int]] = {
    "{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?": lambda a, b, c: a + b,
    "{name} had {a} {things} and gave away {b}. How many {things} are left?": lambda a, b, c: a - b,
    "{name} has {c} boxes with {a} {things} in each. How many {things} is that?": lambda a, b, c: c * a,
    "{name} has {a} {things}, {other} has {b}. How many {things} do they have together?": lambda a, b, c: a + b,
    "{name} has {a} {things}, {other} has {b}. How many more does {name} have?": lambda a, b, c: a - b,
    "{name} had {a} {things}, lost {b} and found {c}. How many {things} does {name} have?": lambda a, b, c: a - b + c,
    "{name} has {c} bags of {a} {things} and {b} more. How many {things} is that?": lambda a, b, c: c * a + b,
    "{name} got {a} {things} on Monday and {b} on Tuesday and sold {c}. How many are left?": lambda a, b, c: a + b - c,
    "{name} fills {c} boxes with {a} {things} each and gives {b} away. How many are left?": lambda a, b, c: c * a - b,
    "{name} has {a} {things}. {other} has {b} more than {name}. How many does {other} have?": lambda a, b, c: a + b,
}
"""Template of a word problem -> its answer for the numbers a, b and c."""


def _words(rng: random.Random) -> Pair:
    story = rng.choice(list(STORIES))
    a, b, c = rng.randint(2, 12), rng.randint(2, 12), rng.randint(2, 5)
    name, other = rng.sample(NAMES, 2)
    answer = STORIES[story](a, b, c)
    if answer < 0 or ("{b} and found" in story and b > a):
        return _words(rng)
    return story.format(name=name, other=other, things=rng.choice(THINGS), a=a, b=b, c=c), answer


SETS: dict[str, Callable[[random.Random], Pair]] = {"sums": _sum, "steps": _steps, "words": _words}


def pairs(name: str) -> dict[str, int]:
    """The questions of a set with their answers."""
    rng, found = random.Random(f"{SEED} {name}"), dict[str, int]()
    while len(found) < QUESTIONS:
        question, answer = SETS[name](rng)
        found[question] = answer
    return found


def text(name: str) -> str:
    """A set as JSONL."""
    return "".join(json.dumps({"question": q, "answer": str(a)}) + "\n" for q, a in pairs(name).items())


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.jsonl"
