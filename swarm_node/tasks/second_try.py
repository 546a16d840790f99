"""`second_try`: a sum or a difference of two numbers, and a hint after a wrong answer. An environment of two turns.

question -> right answer: over, reward 1
         -> wrong answer -> "No, it is more." | "No, it is less." | "No, answer with a number." -> answer: over
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

from swarm_node.errors import UserError
from swarm_node.tasks.base import Messages, TaskSource
from swarm_node.tasks.judging import judge
from swarm_node.tasks.judging.numbers import number_of
from swarm_node.types import Task
from swarm_protocol.limits import CONFIG_HASH_CHARS, TASK_INDICES
from swarm_protocol.messages import TaskName

MORE, LESS, NO_NUMBER = "No, it is more.", "No, it is less.", "No, answer with a number."
MOST_DIGITS = 9


class SecondTry(TaskSource):
    """The tasks of numbers with so many `digits`, 1 by default. UserError for wrong options."""

    generator = "second-try 1"
    size = TASK_INDICES
    turns = 2

    def __init__(self, name: str, options: dict[str, Any], path: str = "") -> None:
        digits = options.get("digits", 1)
        if options.keys() - {"digits"} or not isinstance(digits, int) or not 1 <= digits <= MOST_DIGITS:
            raise UserError(f"task {path or name!r} has one option, digits = 1 to {MOST_DIGITS}, and not {options}")
        self.environment = self.label = name
        self.path = path or name
        self.config = hashlib.sha256(f"digits {digits}".encode()).hexdigest()[:CONFIG_HASH_CHARS]
        self._below = 10**digits

    def task(self, index: int) -> Task:
        rng = random.Random(index)
        a, b, sign = rng.randrange(self._below), rng.randrange(self._below), rng.choice("+-")
        name = TaskName(self.environment, self.config, self.generator, seed=0, index=index)
        answer = a + b if sign == "+" else a - b
        return Task(name, self.label, f"What is {a} {sign} {b}? Answer with the number.", str(answer))

    def reset(self, task: Task) -> Messages:
        return [{"role": "user", "content": task.question}]

    def step(self, task: Task, messages: Messages, answer: str) -> tuple[Messages, float | None, bool]:
        said = [*messages, {"role": "assistant", "content": answer}]
        verdict = judge("number", task.answer or "", answer, self.form)
        if verdict.right or len(messages) > 1:
            return said, float(verdict.right), True
        given = number_of(verdict.extracted or "")
        hint = NO_NUMBER if given is None else MORE if given.value < int(task.answer or "") else LESS
        return [*said, {"role": "user", "content": hint}], 0.0, False
