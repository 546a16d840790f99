"""Question files as people have them: their formats, and the layouts of their rows."""

from __future__ import annotations

import csv
import json
import re
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from swarm_node.errors import UserError
from swarm_node.tasks.files import MAX_QUESTION_CHARS, QuestionFile

CHOICES = {"text": ["4", "5"], "label": ["A", "B"]}
ROW = {"question": "What is 1+1?", "answer": "2"}
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "1+1?"}]}]
USUAL = ("question", "answer")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(row: Any, *columns: str) -> tuple[str, Any, str]:
    """Question and answer of a file of one row, and what the file says of itself."""
    Path("q.jsonl").write_text(json.dumps(row))
    file = QuestionFile("q.jsonl", True, columns or USUAL)  # type: ignore[arg-type]
    told = json.loads(file.as_jsonl())
    return told["question"], told["answer"], file.was_read.removeprefix("q.jsonl: 1 row of JSON lines, ")


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("q.jsonl", json.dumps([ROW], indent=1), "a JSON array"),
        ("q.json", "\ufeff" + json.dumps([ROW]), "a JSON array"),
        ("q.json", json.dumps(ROW), "JSON lines"),
        ("q.csv", "question,answer\nWhat is 1+1?,2\n", "a table with commas between cells"),
        ("q.csv", "question;answer\r\nWhat is 1+1?;2\r\n", "a table with `;` between cells"),
        ("q.csv", '"question, and more";question;answer\n;What is 1+1?;2\n', "a table with `;` between cells"),
        ("q.csv", "question\tanswer\nWhat is 1+1?\t2\n", "a table with tabs between cells"),
        ("q.csv", "question|answer\nWhat is 1+1?|2\n", "a table with `|` between cells"),
        ("q.TSV", "question\tanswer\nWhat is 1+1?\t2\n", "a table with tabs between cells"),
    ],
)
def test_formats_of_files(name: str, content: str, kind: str) -> None:
    Path(name).write_text(content, newline="")
    file = QuestionFile(name)
    told = json.loads(file.as_jsonl())
    assert {column: told[column] for column in ROW} == ROW
    assert file.was_read == f"{name}: 1 row of {kind}, question = `question`, answer = `answer`"
    assert file.as_members_read == (kind == "JSON lines")


def test_a_cell_may_be_as_long_as_its_file() -> None:
    before = csv.field_size_limit()
    Path("q.csv").write_text(f"question,answer\n{'x ' * 100_000}?,2\n")
    task = QuestionFile("q.csv").task(0)
    assert task is not None and len(task.question) == 200_001
    assert csv.field_size_limit() == before


@pytest.mark.parametrize(
    ("row", "columns", "question", "answer"),
    [
        ({"q": "1+1?", "reward_model": {"ground_truth": "2"}}, ("q", "reward_model.ground_truth"), "1+1?", "2"),
        ({"q": ["1+1?"], "a.b": 2, "a": {"b": 3}}, ("q.0", "a.b"), "1+1?", "2"),
        ({"q": "4?", "choices": CHOICES}, ("{q}\nA) {choices.text.0}", "choices.label.0"), "4?\nA) 4", "A"),
        ({"q": "4?", "choices": CHOICES}, ("{q}\n{choices}", "choices.label.0"), "4?\nA) 4\nB) 5", "A"),
        ({"q": "4?", "choices": [4, True]}, ("{q} {choices}", "q"), "4? A) 4\nB) yes", "4?"),
        ({"q": "4?", "n": 1e-7}, ("{{{q}}} is {{}} {n}", "n"), "{4?} is {} 0.0000001", "0.0000001"),
        ({"q": "{n} {0.__class__} %s", "n": 1}, ("{q}!", "n"), "{n} {0.__class__} %s!", "1"),
        ({"chat": ASKED, "n": 1}, ("{chat}\nIn words.", "{n}"), "Be brief.\n\n1+1?\nIn words.", "1"),
        ({"{q}": "a brace in a name", "n": 1}, ("{q}", "n"), "a brace in a name", "1"),
    ],
)
def test_columns_inside_others_and_templates(
    row: dict[str, Any], columns: tuple[str, str], question: str, answer: str
) -> None:
    assert read(row, *columns)[:2] == (question, answer)


@pytest.mark.parametrize(
    ("row", "columns", "message"),
    [
        ({"q": "?", "n": {"v": 1, "w": 2}}, ("q", "n"), "`n` must be .*; it has `v`, `w`: name one, as `n.v`"),
        ({"q": "?", "n": {"v": 1}}, ("q", "n.x"), "no column `n.x`; `n` has `v`"),
        ({"q": "?", "n": [1]}, ("q", "n.1"), "no column `n.1`; `n` is a list of 1, counted from 0"),
        ({"q": "?", "n": [1]}, ("q", "n.-1"), "no column `n.-1`; `n` is a list of 1"),
        ({"q": "?", "n": 1}, ("q", f"n.{'9' * 5000}"), "`n` is a single value"),
        ({"q": "?", "n": 1}, ("{q.__class__}", "n"), "no column `q.__class__`; `q` is a single value"),
        ({"q": "?", "n": 1}, ("{q!r}", "n"), "no column `q!r`"),
        ({"q": "?", "n": 1}, ("{q:>9999999999}", "n"), "no column `q:>9999999999`"),
        ({"q": "?", "n": 1}, ("{q", "n"), "has a `{` without its other half"),
        ({"q": "?", "n": 1}, ("{q} }", "n"), "has a `}` without its other half"),
        ({"q": "?", "n": 1}, ("{} {q}", "n"), "has a `{` without its other half"),
        ({"q": None, "n": 1}, ("{q}!", "n"), "`q` is null, which a template cannot put in"),
        ({"q": {"text": "?"}, "n": 1}, ("{q}!", "n"), "`q` is an object, .*: it has `text`, so name one as `q"),
        ({"q": {"text": ["?"], "label": []}, "n": 1}, ("{q}!", "n"), "`q` is an object"),
        ({"q": {"text": ["?", "!"], "label": ["A"]}, "n": 1}, ("{q}!", "n"), "`q` has 2 choices and 1 labels"),
    ],
)
def test_names_and_templates_that_find_nothing(row: dict[str, Any], columns: tuple[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(row, *columns)


@pytest.mark.parametrize(
    ("row", "question", "answer", "told"),
    [
        (
            {"prompt": ASKED, "solution": r"\boxed{2}"},
            "Be brief.\n\n1+1?",
            r"\boxed{2}",
            "`prompt`, answer = `solution`",
        ),
        (
            {"prompt": ASKED[1:], "reward_model": {"style": "rule", "ground_truth": "2"}},
            "1+1?",
            "2",
            "`prompt`, answer = `reward_model.ground_truth`",
        ),
        ({"problem": "1+1?", "solution": "long", "answer": "2"}, "1+1?", "2", "`problem`, answer = `answer`"),
        ({"Question": "1+1?", "ANSWER": 2}, "1+1?", "2", "`Question`, answer = `ANSWER`"),
        (
            {"question": "4?", "choices": CHOICES, "answerKey": "A"},
            "4?\nA) 4\nB) 5",
            "A",
            r'"{question}\n{choices}", answer = `answerKey`',
        ),
        ({"question": "4?", "answerKey": "A"}, "4?", "A", "`question`, answer = `answerKey`"),
        (
            {"question": "4?", "choices": ["4", "5"], "answer": 0},
            "4?",
            "0",
            r'`question`, answer = `answer`; the model does not see `choices`, which question="{question}\n{choices}" '
            "puts in",
        ),
    ],
)
def test_usual_layouts_are_read_and_said(row: dict[str, Any], question: str, answer: str, told: str) -> None:
    assert read(row) == (question, answer, f"question = {told}")


def test_a_named_column_is_not_replaced_by_a_usual_one() -> None:
    with pytest.raises(UserError, match="no column `reply`"):
        read({"prompt": "1+1?", "answer": 2}, "prompt", "reply")


def test_rows_of_reward_functions_keep_what_they_have() -> None:
    row = {"prompt": ASKED[1:], "reward_model": {"ground_truth": "2"}, "extra_info": {"index": 3}}
    Path("q.jsonl").write_text(json.dumps(row))
    task = QuestionFile("q.jsonl").task(0)
    assert task is not None and task.metadata == {**row, "prompt": "1+1?"}
    assert QuestionFile("q.jsonl", answer_needed=False).config == QuestionFile("q.jsonl").config


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("1.2e-7", "0.00000012"),
        ("1e22", "10000000000000000000000"),
        ("0.5", "0.5"),
        ("-3.0", "-3.0"),
        ("12345678901234567890123456789012345", "12345678901234567890123456789012345"),
        ("true", "yes"),
        ("false", "no"),
        ('["2", "two", 2.5]', ["2", "two", "2.5"]),
        ('["2"]', "2"),
    ],
)
def test_answers_as_texts(answer: str, text: str | list[str]) -> None:
    Path("q.jsonl").write_text(f'{{"question": "?", "answer": {answer}}}')
    file = QuestionFile("q.jsonl")
    assert json.loads(file.as_jsonl())["answer"] == text
    assert file.as_members_read == (answer[0] in "-01" and "e" not in answer), "others judge by `str` of what they read"


def test_no_number_of_a_file_is_longer_than_it_may_be() -> None:
    for number in ("1e308", "5e-324", "-1.7976931348623157e308"):
        Path("q.jsonl").write_text(f'{{"question": "?", "answer": {number}}}')
        assert Decimal(json.loads(QuestionFile("q.jsonl").as_jsonl())["answer"]) == Decimal(repr(float(number)))
    Path("q.jsonl").write_text('{"question": "?", "answer": 1e999999999}')
    with pytest.raises(UserError, match="line 1: "):
        QuestionFile("q.jsonl")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"question": "q", "answer": 1}\n{"question": "q \\ud83d", "answer": 1}', r"line 2: it has `\ud83d`, half a"),
        ('{"question": "q", "answer": NaN}', "line 1: it has `NaN`, which JSON does not have: write null"),
        ('[{"question": "q",\n "answer": -Infinity}]', "line 2: it has `-Infinity`, which JSON does not have"),
        ('{"question": "q", "answer": null}', "line 1: `answer` is null: leave the row out, or give its answer. Where"),
        ('{"question": "q", "answer": [1, null]}', "line 1: `answer` is null"),
        ('{"question": "q", "answer": []}', "line 1: `answer` must be a text, a number, true or false, or a list"),
        ('{\n "question": "q",\n "answer": 1\n}', "line 1: a row goes over several lines, and JSON lines have one a"),
        ('[{"question": "q"\n "answer": 1}]', "line 2: "),
        ('[{"question": "q", "answer": 1}, 2]', "row 2: not a JSON object"),
        ('[{"question": "q"}]', "row 1: no column `answer`"),
        ("[", "line 1: "),
    ],
)
def test_what_stands_in_a_bad_row_is_said(content: str, message: str) -> None:
    Path("bad.jsonl").write_text(content)
    with pytest.raises(UserError, match=re.escape(f"task file bad.jsonl, {message}")) as refused:
        QuestionFile("bad.jsonl")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("columns", [USUAL, ("{question}{question}", "answer")], ids=str)
def test_a_question_that_is_as_long_as_no_prompt_is_refused(columns: tuple[str, str]) -> None:
    half = len(columns[0]) // len("question")
    for chars, message in ((MAX_QUESTION_CHARS // half, ""), (MAX_QUESTION_CHARS // half + 1, "leave the row out")):
        Path("q.jsonl").write_text(json.dumps({"question": "q" * chars, "answer": "2"}))
        if not message:
            assert QuestionFile("q.jsonl", True, columns).size == 1
            continue
        with pytest.raises(UserError, match=f"line 1: .* characters, allowed are 1,048,576: {message}"):
            QuestionFile("q.jsonl", True, columns)


def write_parquet(name: str, rows: list[dict[str, Any]], group: int = 7) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), name, row_group_size=group)


def test_parquet_is_read_without_columns_of_bytes() -> None:
    image = {"bytes": b"\x00", "path": "a.png"}
    write_parquet("q.parquet", [{"prompt": ASKED[1:], "solution": n, "image": image} for n in range(3000)])
    file = QuestionFile("q.parquet")
    assert file.was_read == (
        "q.parquet: 3,000 rows of Parquet, question = `prompt`, answer = `solution`; not read, since they hold bytes: "
        "`image`"
    )
    task = file.task(2999)
    assert task is not None and (task.question, task.answer) == ("1+1?", "2999")


def test_parquet_that_is_none_is_refused() -> None:
    pytest.importorskip("pyarrow")
    Path("bad.parquet").write_bytes(b"PAR1 and more")
    with pytest.raises(UserError, match="bad.parquet is no Parquet that can be read"):
        QuestionFile("bad.parquet")
    write_parquet("q.parquet", [{"question": "1+1?", "answer": 2}] * 9)
    whole = Path("q.parquet").read_bytes()
    Path("q.parquet").write_bytes(whole[:4] + bytes(60) + whole[64:])
    with pytest.raises(UserError, match="q.parquet"):
        QuestionFile("q.parquet")


def test_parquet_without_its_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    Path("q.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"takes the package pyarrow: .*install .*parquet"):
        QuestionFile("q.parquet")
