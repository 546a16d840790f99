"""Questions for `make demo-real`: sums and differences of two numbers from 0 to 20, in words that a chat model reads.

    python scripts/sums.py > examples/sums.jsonl

The same seed gives the same questions. No question is there twice, and no answer is below zero.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from itertools import product

LARGEST, QUESTIONS, SEED = 20, 500, 1


def all_sums() -> Iterator[tuple[str, int]]:
    """(sum in figures, its result)."""
    for a, b in product(range(LARGEST + 1), repeat=2):
        yield f"{a} + {b}", a + b
        if a >= b:
            yield f"{a} - {b}", a - b


def rows(seed: int = SEED) -> list[dict[str, object]]:
    """Question and answer of each line."""
    drawn = random.Random(seed).sample(list(all_sums()), QUESTIONS)
    return [{"question": f"What is {text}? Answer with the number only.", "answer": result} for text, result in drawn]


if __name__ == "__main__":
    sys.stdout.writelines(json.dumps(row) + "\n" for row in rows())
