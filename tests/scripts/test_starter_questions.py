"""The questions that the package brings are those that their script writes."""

from __future__ import annotations

from scripts.starter_questions import text
from swarm_node.tasks.catalogue import STARTER_QUESTIONS


def test_the_file_is_what_the_script_writes() -> None:
    assert STARTER_QUESTIONS.read_text() == text()
