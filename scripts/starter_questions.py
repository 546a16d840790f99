"""The questions that the package brings for its starter, without reasoning-gym: swarm_node/tasks/starter.jsonl.

    python scripts/starter_questions.py            # writes the file anew

The first `EACH` different questions of each task of the set `small`, in turns, with the one answer that the library
calls right.
"""

from __future__ import annotations

import json
from itertools import chain

from swarm_node.tasks.catalogue import SETS, STARTER_QUESTIONS
from swarm_node.tasks.reasoning_gym import ReasoningGym

EACH = 200
TRIES = 5_000  # items of a task that are looked at: some have fewer than `EACH` different questions


def questions(name: str) -> list[dict[str, str]]:
    """Rows of one task."""
    source = ReasoningGym(name, SETS["small"][name])
    found: dict[str, str] = {}
    for index in range(TRIES):
        task = source.task(index)
        if task is not None and task.answer is not None and len(found) < EACH:
            found.setdefault(task.question, task.answer)
    return [{"question": question, "answer": answer, "task": name} for question, answer in found.items()]


def text() -> str:
    """The file."""
    each = [questions(name) for name in SETS["small"]]
    turns = chain.from_iterable(part[i : i + 1] for i in range(EACH) for part in each)
    return "".join(f"{json.dumps(row)}\n" for row in turns)


if __name__ == "__main__":
    STARTER_QUESTIONS.write_text(text())
