"""A reward that random models earn now and then: 1 for texts of even length."""

from __future__ import annotations

from collections.abc import Sequence


def even(prompts: Sequence[str], completions: Sequence[str], **columns: object) -> list[float | None]:
    return [float(len(text) % 2 == 0) for text in completions]
