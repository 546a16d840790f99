"""Every allowed environment with an example: `swarm-node tasks`."""

from __future__ import annotations

from typing import Literal, NamedTuple

from swarm_node.tasks.catalogue import ALLOWED, SETS


class Entry(NamedTuple):
    """A row of `swarm-node tasks`."""

    name: str
    sets: list[str]  # sets that the environment belongs to
    checker: Literal["library", "own"]
    question: str  # an example, with the library's default options
    answer: str


def list_environments() -> list[Entry]:
    """Every allowed environment with an example."""
    from swarm_node.tasks.reasoning_gym import ReasoningGym

    entries = []
    for name, checker in ALLOWED.items():
        environment = ReasoningGym(name, {})
        task = next(task for index in range(environment.size) if (task := environment.task(index)))
        sets = [group for group, members in SETS.items() if name in members]
        entries.append(Entry(name, sets, checker, task.question, task.answer or ""))
    return entries
