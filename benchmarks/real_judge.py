"""The judge of `benchmarks.real_learning`, the same for this package, for TRL and for held-out questions."""

from __future__ import annotations

from typing import Any

from swarm_node.tasks.judging import JUDGE, judge

NAME = f"swarm_node.tasks.judging, number, version {JUDGE}"


def right(reference: str, text: str) -> bool:
    """Whether the number that `text` ends with is the reference."""
    return judge("number", reference, text).right


def reward(prompts: list[Any], completions: list[Any], answer: list[str], **columns: object) -> list[float]:
    """1 for a right answer, else 0. A completion is a text, or a list with the assistant's message."""
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    return [float(right(reference, text)) for reference, text in zip(answer, texts, strict=True)]
