"""Tasks from a file with a question and an answer on each line (JSONL) or in each row (CSV).

Its user may name the columns of both. Columns named otherwise, and all others, become metadata, which reward functions
see. A question may be a list of messages, {"role": …, "content": …}, as TRL's conversational data sets have it.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from protocol.limits import CONFIG_HASH_CHARS, TASK_INDICES
from protocol.messages import TaskName
from swarm_node.config.training import COLUMNS, is_csv
from swarm_node.errors import UserError
from swarm_node.tasks.checkers import text_or_number
from swarm_node.tasks.one_turn import OneTurn, extract
from swarm_node.types import Task

NO_ANSWER = "Where reward functions of your own judge alone, no answer is needed: --set rewards.checker_weight=0"
MAX_LISTED = 8  # columns in a message
BOM = b"\xef\xbb\xbf"  # a mark that some editors write at the beginning


class QuestionFile(OneTurn):
    """The tasks of one file. UserError if it is missing, empty or malformed.

    Every line must have an answer if `answer_needed`, that is unless reward functions alone judge. `columns` are those
    of question and answer.
    """

    environment = "jsonl"
    generator = "jsonl 1"
    finite = True

    def __init__(self, path: str, answer_needed: bool = True, columns: tuple[str, str] = COLUMNS) -> None:
        try:
            data = Path(path).expanduser().read_bytes()
        except OSError as error:
            raise UserError(f"cannot read task file {path}: {error.strerror}") from error
        named = b"" if columns == COLUMNS else msgspec.json.encode(columns)
        self.config = hashlib.sha256(data + named).hexdigest()[:CONFIG_HASH_CHARS]
        self.label, self.path, self._columns = Path(path).stem, path, columns
        data = data.removeprefix(BOM)
        self.size = 0
        self._rows: dict[int, dict[str, Any]] = {}
        for line, row in _csv_rows(path, data) if is_csv(path) else enumerate(data.splitlines(), 1):
            if self.size == TASK_INDICES:
                raise UserError(f"task file {path} has more than {TASK_INDICES} lines")
            if not isinstance(row, bytes) or row.strip():
                try:
                    self._rows[self.size] = _row(row, answer_needed, columns, path)
                except (ValueError, RecursionError) as error:
                    raise UserError(f"task file {path}, line {line}: {error}") from error
            self.size += 1
        if not self._rows:
            like = "`question,answer` and `1+1?,2`" if is_csv(path) else '{"question": "1+1?", "answer": "2"}'
            raise UserError(f"task file {path} is empty: it needs lines like {like}")

    def task(self, index: int) -> Task | None:
        """Task number `index`; None for an empty line."""
        if index not in self._rows:
            return None
        row = dict(self._rows[index])
        name = TaskName(self.environment, self.config, self.generator, seed=0, index=index)
        question, answer = row.pop("question"), row.pop("answer")
        named = zip(self._columns, (question, answer), strict=True)
        row |= {column: value for column, value in named if column not in COLUMNS}
        return Task(name, self.label, question, answer, metadata=row)

    def check(self, task: Task, answer: str) -> float:
        """1 for the reference's text or number, else 0; the reference is read like a completion (`… #### 42`)."""
        return text_or_number(answer, extract(task.answer or "") or "")

    def as_jsonl(self) -> bytes:
        """The same questions and answers with their metadata, in the columns `question` and `answer`."""
        return b"".join(msgspec.json.encode(row) + b"\n" for row in self._rows.values())


class _MessagesLine(msgspec.Struct):
    """A line whose question is a list."""

    question: list[Any]


def has_messages(data: bytes) -> bool:
    """Whether a `question` in these JSON lines is a list of messages. Lines that are not JSON are passed over."""
    return any(map(_asks_in_messages, data.removeprefix(BOM).splitlines()))


def _asks_in_messages(line: bytes) -> bool:
    try:
        msgspec.json.decode(line, type=_MessagesLine)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _csv_rows(path: str, data: bytes) -> Iterator[tuple[int, dict[str, str]]]:
    """(number of its last line, texts by column) of each row below the header; empty lines are no rows. Raises
    UserError."""
    try:
        table = csv.reader(io.StringIO(data.decode(), newline=""), strict=True)
    except UnicodeDecodeError as error:
        raise UserError(f"task file {path} is not UTF-8 text: save it as such") from error
    rows = filter(None, table)
    try:
        header = next(rows, [])
        if len(set(header)) < len(header):
            raise csv.Error("two columns have one name")
        for row in rows:
            if len(row) != len(header):
                raise csv.Error(f"the row has {len(row)} cells, and the header {len(header)}")
            yield table.line_num, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise UserError(f"task file {path}, line {table.line_num}: {error}") from error


def _row(line: bytes | dict[str, str], answer_needed: bool, columns: tuple[str, str], path: str) -> dict[str, Any]:
    """The columns of a line, with those of question and answer renamed. The ValueError says what is wrong."""
    row = msgspec.json.decode(line) if isinstance(line, bytes) else line  # msgspec.DecodeError is a ValueError
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    missing = [column for column in columns[: 1 + answer_needed] if column not in row]
    if missing:
        needless = f". {NO_ANSWER}" if missing[0] == columns[1] else ""
        raise ValueError(_no_column(missing[0], row, path) + needless)
    question, answer = row.pop(columns[0]), row.pop(columns[1], None)
    if isinstance(question, list):
        question = _asked(question, columns[0])
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"`{columns[0]}` must be a text, or a list of messages")
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        answer = str(answer)
    if not isinstance(answer, str) and not (answer is None and not answer_needed):
        raise ValueError(f"`{columns[1]}` must be a text or a number")
    if answer is not None and extract(answer) is None:
        raise ValueError(f"`{columns[1]}` is empty")
    return {**row, "question": question.strip(), "answer": answer}


def _asked(messages: list[Any], column: str) -> str:
    """The question in messages of the system, if there are any, and then of the user. The ValueError says what is
    wrong."""
    roles = [each.get("role") if isinstance(each, dict) else None for each in messages]
    contents = [each.get("content") if isinstance(each, dict) else None for each in messages]
    texts = [content.strip() for content in contents if isinstance(content, str)]
    if "assistant" in roles or "tool" in roles:
        raise ValueError(
            f"`{column}` has a turn of an assistant or a tool: a task is one question and one answer so far. Keep the "
            f"messages of system and user in `{column}`, and put the right answer into a column of its own"
        )
    others = roles[1:] if roles[:1] == ["system"] else roles
    if not others or any(role != "user" for role in others):
        raise ValueError(
            f"`{column}` must be messages of the user, after one of the system at most, as "
            '[{"role": "user", "content": "1+1?"}]'
        )
    if len(texts) < len(contents) or not all(texts):
        raise ValueError(f"each `content` in `{column}` must be a text: images and empty messages are not read")
    return "\n\n".join(texts)


def _no_column(name: str, row: dict[str, Any], path: str) -> str:
    """The message about a column that a line lacks."""
    others = ", ".join(f"`{column[:40]}`" for column in list(row)[:MAX_LISTED])
    return (
        f"no column `{name}`; it has {others or 'none'}. Name the columns of question and answer: "
        f'--tasks \'{{file="{path}", question="COLUMN", answer="COLUMN"}}\''
    )
