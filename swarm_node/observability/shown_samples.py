"""Records of samples.jsonl as the terminal and the page show them: in bounded size, with equal answers counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_ANSWERS = 8  # answers of a group that are kept and shown: the first ones
MAX_REWARDS = 16  # rewards of an answer that are kept and shown
TEXT, NAME = 2000, 200  # most characters of a text, and of a name


def shown_sample(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record, of which nothing is taken for granted: its answers by falling reward, equal ones counted. Nothing is
    escaped."""
    answers: dict[tuple[str, str | None, float], dict[str, Any]] = {}
    given = record.get("answers")
    for answer in given[:MAX_ANSWERS] if isinstance(given, list) else []:
        if not isinstance(answer, dict):
            continue
        judged = answer.get("extracted")
        one = _text(answer.get("text")), None if judged is None else _text(judged, NAME), number_in(answer, "reward")
        known = answers.setdefault(one, {"text": one[0], "judged": one[1], "reward": one[2], "times": 0})
        known |= {"rewards": _rewards(answer), "advantage": _advantage(answer, known.get("advantage"))}
        correct = answer.get("correct")
        known["correct"] = correct if isinstance(correct, bool) else None  # None = no checker judged it
        known["cut"] = answer.get("finished") is False
        known["times"] += 1
    right, peer = record.get("right"), record.get("peer")
    return {
        "round": number_in(record, "round"),
        "time": number_in(record, "time"),
        "task": _text(record.get("task"), NAME),
        "peer": None if peer is None else _text(peer, NAME),
        "question": _text(record.get("question")),
        "prompt": _text(record.get("prompt")),
        "right": None if right is None else _text(right),
        "reward": number_in(record, "reward"),
        "of": number_in(record, "of"),
        "answers": sorted(answers.values(), key=lambda answer: -answer["reward"]),
    }


def number_in(record: Mapping[str, Any], name: str) -> float:
    """The number of that name; 0 if it is none, or too large to be shown."""
    value = record.get(name)
    return float(value) if isinstance(value, int | float) and abs(value) < 1e12 else 0.0


def _rewards(answer: dict[str, Any]) -> dict[str, float]:
    """The rewards of an answer by function, if there are several; those that judged it."""
    given = answer.get("rewards")
    named: dict[str, Any] = given if isinstance(given, dict) else {}
    return {_text(name, NAME): number_in(named, name) for name in list(named)[:MAX_REWARDS] if named[name] is not None}


def _advantage(answer: dict[str, Any], before: float | None) -> float | None:
    """The advantage of an answer, else that of its equal `before` it; None if neither was trained on."""
    return before if answer.get("advantage") is None else number_in(answer, "advantage")


def _text(value: Any, most: int = TEXT) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= most else text[: most - 1] + "…"
