"""Questions with their answers, as the page shows them: the newest records of samples.jsonl, in bounded size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SAMPLES = 6  # most groups shown: the newest
SAMPLE_BYTES = 256 << 10  # bytes at the end of samples.jsonl in which they are looked for
ANSWERS = 8  # most answers shown of a group
TEXT, NAME = 2000, 200  # most characters of a text, and of a name


def shown_sample(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record of samples.jsonl, of which nothing is taken for granted, with equal answers counted."""
    answers: dict[tuple[str, str | None, float], dict[str, Any]] = {}
    given = record.get("answers")
    for answer in given[:ANSWERS] if isinstance(given, list) else []:
        if not isinstance(answer, dict):
            continue
        judged = answer.get("extracted")
        one = _text(answer.get("text")), None if judged is None else _text(judged, NAME), _number(answer.get("reward"))
        known = answers.setdefault(one, {"text": one[0], "judged": one[1], "reward": one[2], "times": 0})
        known["correct"] = answer.get("correct") is True
        known["cut"] = answer.get("finished") is False
        known["times"] += 1
    right, peer = record.get("right"), record.get("peer")
    return {
        "round": _number(record.get("round")),
        "task": _text(record.get("task"), NAME),
        "peer": None if peer is None else _text(peer, NAME),
        "question": _text(record.get("question")),
        "right": None if right is None else _text(right),
        "reward": _number(record.get("reward")),
        "of": _number(record.get("of")),
        "answers": sorted(answers.values(), key=lambda answer: -answer["reward"]),
    }


def _text(value: Any, most: int = TEXT) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= most else text[: most - 1] + "…"


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e12 else 0.0
