"""Tasks from a JSONL file with a question and an answer on each line, in columns that its user may name.

Other columns become metadata, which reward functions see.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from protocol.limits import CONFIG_HASH_CHARS, TASK_INDICES
from protocol.messages import TaskName
from swarm_node.config.training import COLUMNS
from swarm_node.errors import UserError
from swarm_node.tasks.checkers import text_or_number
from swarm_node.tasks.one_turn import OneTurn, extract
from swarm_node.types import Task

MAX_LISTED = 8  # columns in a message


class QuestionFile(OneTurn):
    """The tasks of one file. UserError if it is missing, empty or malformed.

    Every line must have an answer if `answer_needed`, that is unless reward functions alone judge. `columns` are those
    of question and answer.
    """

    environment = "jsonl"
    generator = "jsonl 1"

    def __init__(self, path: str, answer_needed: bool = True, columns: tuple[str, str] = COLUMNS) -> None:
        try:
            data = Path(path).expanduser().read_bytes()
        except OSError as error:
            raise UserError(f"cannot read task file {path}: {error.strerror}") from error
        named = b"" if columns == COLUMNS else msgspec.json.encode(columns)
        self.config = hashlib.sha256(data + named).hexdigest()[:CONFIG_HASH_CHARS]
        self.label, self.path = Path(path).stem, path
        lines = data.removeprefix(b"\xef\xbb\xbf").splitlines()
        self.size = len(lines)
        if self.size > TASK_INDICES:
            raise UserError(f"task file {path} has more than {TASK_INDICES} lines")
        self._rows: dict[int, dict[str, Any]] = {}
        for index, line in enumerate(lines):
            if line.strip():
                try:
                    self._rows[index] = _row(line, answer_needed, columns)
                except (ValueError, RecursionError) as error:
                    raise UserError(f"task file {path}, line {index + 1}: {error}") from error
        if not self._rows:
            raise UserError(f'task file {path} is empty: it needs lines like {{"question": "1+1?", "answer": "2"}}')

    def task(self, index: int) -> Task | None:
        """Task of line `index`, counted from 0; None for an empty line."""
        if index not in self._rows:
            return None
        row = dict(self._rows[index])
        name = TaskName(self.environment, self.config, self.generator, seed=0, index=index)
        return Task(name, self.label, row.pop("question"), row.pop("answer"), metadata=row)

    def check(self, task: Task, answer: str) -> float:
        """1 for the reference's text or number, else 0; the reference is read like a completion (`… #### 42`)."""
        return text_or_number(answer, extract(task.answer or "") or "")

    def as_jsonl(self) -> bytes:
        """The same questions and answers with their metadata, in the columns `question` and `answer`."""
        return b"".join(msgspec.json.encode(row) + b"\n" for row in self._rows.values())


def _row(line: bytes, answer_needed: bool, columns: tuple[str, str]) -> dict[str, Any]:
    """The columns of a line, with those of question and answer renamed. The ValueError says what is wrong."""
    row = msgspec.json.decode(line)  # msgspec.DecodeError is a ValueError
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    missing = [column for column in columns[: 1 + answer_needed] if column not in row]
    if missing:
        raise ValueError(_no_column(missing[0], row))
    question, answer = row.pop(columns[0]), row.pop(columns[1], None)
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"`{columns[0]}` must be a text")
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        answer = str(answer)
    if not isinstance(answer, str) and not (answer is None and not answer_needed):
        raise ValueError(f"`{columns[1]}` must be a text or a number")
    if answer is not None and extract(answer) is None:
        raise ValueError(f"`{columns[1]}` is empty")
    return {**row, "question": question.strip(), "answer": answer}


def _no_column(name: str, row: dict[str, Any]) -> str:
    """The message about a column that a line lacks."""
    others = ", ".join(f"`{column[:40]}`" for column in list(row)[:MAX_LISTED])
    return (
        f"no column `{name}`; it has {others or 'none'}. Name the columns of question and answer: "
        '--set \'tasks=[{file="FILE", question="COLUMN", answer="COLUMN"}]\''
    )
