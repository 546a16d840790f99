"""The answers with verdicts that judges are measured by: their fields, their balance, where they come from."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parents[2] / "data"
KINDS = {"text", "number", "maths", "choice", "yes-no"}
FORMS = {"any", "tags", "boxed"}


def _lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


PAIRS, HOSTILE = _lines("answers.jsonl"), _lines("answers_hostile.jsonl")


def _check_common(line: dict[str, Any]) -> None:
    assert line["kind"] in KINDS
    assert line["form"] in FORMS
    references = line["reference"] if isinstance(line["reference"], list) else [line["reference"]]
    assert references
    assert all(isinstance(reference, str) and reference for reference in references)


def test_each_pair_has_its_fields() -> None:
    for pair in PAIRS:
        assert set(pair) - {"note"} == {"kind", "form", "reference", "text", "right", "source"}, pair
        _check_common(pair)
        assert isinstance(pair["text"], str)
        assert isinstance(pair["right"], bool)
        assert pair["source"], pair
        assert pair.get("note", "why"), pair


def test_no_pair_stands_twice() -> None:
    keys = Counter(json.dumps([pair[name] for name in ("kind", "form", "reference", "text")]) for pair in PAIRS)
    assert [key for key, count in keys.items() if count > 1] == []


def test_both_verdicts_are_common_in_every_kind_and_form() -> None:
    assert len(PAIRS) >= 500
    assert 0.4 <= sum(pair["right"] for pair in PAIRS) / len(PAIRS) <= 0.6
    kinds = Counter((pair["kind"], pair["right"]) for pair in PAIRS)
    forms = Counter((pair["form"], pair["right"]) for pair in PAIRS)
    for right in (True, False):
        assert all(kinds[kind, right] >= 30 for kind in KINDS), kinds
        assert all(forms[form, right] >= 15 for form in FORMS), forms


def test_sources_are_named_with_their_licence() -> None:
    page = (DATA / "answers.md").read_text(encoding="utf-8")
    others = [pair["source"] for pair in PAIRS if pair["source"] != "own" and not pair["source"].startswith("case ")]
    assert len(others) >= 200
    for repository in {source.split(" ")[0] for source in others}:
        assert f"| {repository} | " in page


@pytest.mark.parametrize("line", HOSTILE, ids=[line["what"] for line in HOSTILE])
def test_each_hostile_text_can_be_made(line: dict[str, Any]) -> None:
    assert set(line) == {"kind", "form", "reference", "what", "text"}
    _check_common(line)
    length = 0
    for part in line["text"]:
        if isinstance(part, str):
            length += len(part)
        else:
            (string, count) = part["repeat"]
            assert set(part) == {"repeat"}
            length += len(string) * count
    assert 0 < length <= 150_000
