"""Question files that are tables with commas."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from swarm_node.config import RewardsConfig, TaskConfig
from swarm_node.errors import UserError
from swarm_node.tasks.checking import check_specs
from swarm_node.tasks.files import QuestionFile
from swarm_node.tasks.taskset import load_tasks

TABLE = '\ufeffquestion,answer,level\r\n"What is 1+1,\r\nor ""two""?",2,easy\r\n\r\n2+2?,"4",hard\r\n'


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_rows_are_tasks() -> None:
    Path("sums.csv").write_bytes(TABLE.encode())
    check_specs(["sums.csv"], answer_needed=True)
    file = QuestionFile("sums.csv")
    tasks = [file.task(index) for index in range(file.size)]
    assert [(t.question, t.answer, t.metadata, t.label) for t in tasks if t is not None] == [
        ('What is 1+1,\r\nor "two"?', "2", {"level": "easy"}, "sums"),
        ("2+2?", "4", {"level": "hard"}, "sums"),
    ]
    assert [json.loads(line)["answer"] for line in file.as_jsonl().splitlines()] == ["2", "4"]


def test_a_table_is_drawn_and_judged() -> None:
    Path("sums.CSV").write_text("prompt,target\n" + "".join(f"{n} + 1?,{n + 1}\n" for n in range(60)))
    tasks = load_tasks([TaskConfig(file="sums.CSV", question="prompt", answer="target")], RewardsConfig())
    for task in tasks.sample(random.Random(0), 8):
        (score,) = tasks.score([task], [task.question], [f"<answer>{int(task.question.split()[0]) + 1}</answer>"])
        assert score.reward == 1.0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"question,answer\n", "is empty: it needs lines like `question,answer`"),
        (b"question,answer\n1+1?,2\n1,2,3\n", "line 3: the row has 3 cells, and the header 2"),
        (b"question,answer\n1+1?\n", "line 2: the row has 1 cells"),
        (b"question,question\n1+1?,2\n", "line 1: two columns have one name"),
        (b'question,answer\n"a" b,2\n', "line 2: "),
        (b'question,answer\n"never closed,2\n', "unexpected end of data"),
        (b"question,answer\n,2\n", "line 2: `question` must be a text"),
        (b"question,answer\n1+1?,\n", "line 2: `answer` is empty"),
        (b"question,answer\n\xff,2\n", "is not UTF-8 text"),
    ],
)
def test_a_bad_table_is_refused(content: bytes, message: str) -> None:
    Path("bad.csv").write_bytes(content)
    with pytest.raises(UserError, match="task file bad.csv") as refused:
        load_tasks(["bad.csv"], RewardsConfig())
    assert message in str(refused.value) and "\n" not in str(refused.value)
