"""Names of tasks, checked before reasoning-gym is loaded; what is said about a name that is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm_node.config import TaskConfig
from swarm_node.errors import UserError
from swarm_node.tasks.checking import check_end, check_specs


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    (tmp_path / "broken.jsonl").write_text('{"question": "1+1?", "answer": "2"}\nnot json\n')
    return tmp_path


def test_what_exists_is_taken() -> None:
    check_specs(["small", "small/gcd", "bf", "good.jsonl", "mine.py:Class"], answer_needed=True)
    check_specs([TaskConfig(env="gcd", config={"max_value": 5}), TaskConfig(file="good.jsonl")], answer_needed=True)


def test_a_table_may_name_any_file(place: Path) -> None:
    (place / "q.txt").write_text('{"prompt": "1+1?", "answer": "2"}\n')
    check_specs([TaskConfig(file="q.txt", question="prompt")], answer_needed=True)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("gdc", "unknown task 'gdc'; did you mean 'gcd'"),
        ("small/bf", "unknown task 'small/bf'"),
        ("countdown", "'countdown' is refused: its scorer executes"),
        ("zebra_puzzles", "'zebra_puzzles' is refused: its scorer has not been audited"),
        ("broken.jsonl", "broken.jsonl, line 2"),
        ("none.jsonl", "cannot read task file none.jsonl"),
        ("q.txt", r"a question file is called .jsonl, .json, .csv, .tsv or .parquet"),
        ("q.xlsx", "save the sheet as CSV"),
        ("q.arrow", "datasets.load_from_disk"),
        ("openai/gsm8k", "a data set of the Hugging Face hub is called hf:openai/gsm8k"),
        ("hf:gsm8k", "'hf:gsm8k' is no data set of the hub: write hf:OWNER/NAME"),
    ],
)
def test_what_does_not_exist_is_named(spec: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_specs([spec], answer_needed=True)


def test_an_answer_of_another_kind_than_somebody_names_is_refused(place: Path) -> None:
    (place / "mixed.jsonl").write_text('{"question": "1+1?", "answer": "about two or three"}\n')
    for spec in ("mixed.jsonl", TaskConfig(file="mixed.jsonl")):
        check_specs([spec], answer_needed=True)
        with pytest.raises(UserError, match=r"mixed.jsonl, line 1: .*which is not a number"):
            check_specs([spec], answer_needed=True, kind="number")
    check_specs([TaskConfig(file="mixed.jsonl", kind="text")], answer_needed=True, kind="number")
    with pytest.raises(UserError, match=r"mixed.jsonl, line 1: .*which is not a number"):
        check_specs([TaskConfig(file="mixed.jsonl", kind="number")], answer_needed=True)


def test_only_files_have_all_questions() -> None:
    check_end(["good.jsonl", "sums.csv", TaskConfig(file="q.txt"), "mine.py:Class"])
    with pytest.raises(UserError, match=r"--all asks every question, and gcd, small never ends: name question files"):
        check_end([TaskConfig(env="gcd"), "good.jsonl", "small"])
