"""Tasks from a file of questions and answers, or from a data set of the hub.

    file -> rows (`rows`, `hub_data`) -> question and answer (`columns`) -> tasks

Its user may name the columns of both. Columns named otherwise, and all others, become metadata, which reward functions
see. A question may be a list of messages, {"role": …, "content": …}, as TRL's conversational data sets have it.
"""

from __future__ import annotations

import hashlib
import json
import math
from itertools import islice
from pathlib import Path
from textwrap import shorten
from typing import Any

import msgspec

from swarm_node.config.training import COLUMNS, HUB
from swarm_node.errors import UserError
from swarm_node.storage.plain_files import read_plain
from swarm_node.tasks import hub_data
from swarm_node.tasks.columns import (
    CHOICES,
    NoColumn,
    described,
    found_columns,
    listed_names,
    roots,
    text_of,
    text_of_messages,
    unseen_choices,
    value_kind,
    value_of,
)
from swarm_node.tasks.judging import Verdict, judge, misfit, understood
from swarm_node.tasks.judging.choices import with_texts
from swarm_node.tasks.judging.guessing import guess_kind, nearly
from swarm_node.tasks.judging.places import extract
from swarm_node.tasks.one_turn import OneTurn
from swarm_node.tasks.rows import read_rows, wrong
from swarm_node.types import Task
from swarm_protocol.answer_form import AnswerKind
from swarm_protocol.limits import CONFIG_HASH_CHARS, TASK_INDICES
from swarm_protocol.messages import TaskName

NO_ANSWER = "Where reward functions of your own judge alone, no answer is needed: --set rewards.checker_weight=0"
MAX_BYTES = 2**31  # of a file: it is read into memory
MAX_QUESTION_CHARS = 2**20
"""A longer question is as long as no prompt, and takes gigabytes and minutes to be found too long: some 200 bytes and 4
microseconds a character. A swarm's files may be a stranger's."""
MAX_ACCEPTED = 16  # accepted answers to a question: an answer is compared with each
SHOWN, MAX_SHOWN = 3, 40  # references in the sentence at the start, and characters of each
READ_AS: dict[AnswerKind, str] = {
    "text": "whole texts",
    "number": "numbers",
    "maths": "expressions of mathematics",
    "choice": "choices",
    "yes-no": "yes or no",
}
LIKE = '{"question": "1+1?", "answer": "2"}'


class QuestionFile(OneTurn):
    """The tasks of one file. UserError if it is missing, empty or malformed.

    Every line must have an answer if `answer_needed`, that is unless reward functions alone judge. `columns` are those
    of question and answer; where nobody named them and they are missing, those of a usual layout are taken.
    """

    environment = "jsonl"
    generator = "jsonl 1"
    finite = True

    def __init__(
        self,
        path: str,
        answer_needed: bool = True,
        columns: tuple[str, str] = COLUMNS,
        kind: AnswerKind | None = None,
    ) -> None:
        self.label, self.path, parts = _parts(path)
        self.columns = columns
        self.size = 0
        self._rows: dict[int, dict[str, Any]] = {}
        self._places: dict[int, str] = {}  # of the rows, as "line 3"
        self._kinds: dict[str, None] = {}
        self._left_out: dict[str, None] = {}
        self._named: list[str] = []  # columns that became question and answer
        self._choices_unseen = False
        self.as_members_read = True
        """Whether members of a swarm, of earlier versions too, read the same questions and answers in these bytes."""
        self._kind_named = kind
        for name, data in parts:
            self._read(name, data, answer_needed)
        if not self._rows:
            raise UserError(f"task file {path} is empty: it needs lines like {_example(path)}")
        self._is_guessed = kind is None
        self.kind: AnswerKind = kind or guess_kind(
            (row["question"], each) for row in self._rows.values() for each in accepted(row)
        )
        if self.has_several and self.kind == "text":
            self.as_members_read = False  # earlier versions, which know this kind alone, read one answer
        named = b"" if self.columns == COLUMNS else msgspec.json.encode(self.columns)
        self.config = hashlib.sha256(b"".join(data for _, data in parts) + named).hexdigest()[:CONFIG_HASH_CHARS]

    def _read(self, path: str, data: bytes, answer_needed: bool) -> None:
        """Take the rows of one file. Raises UserError."""
        try:
            wanted = [name for column in self.columns for name in roots(column)]
        except ValueError as error:
            raise UserError(f"task file {path}: {error}") from error
        rows = read_rows(path, data, wanted)
        self._kinds[rows.kind] = None
        self._left_out |= dict.fromkeys(rows.left_out)
        self.as_members_read &= rows.is_plain
        for place, row in rows.rows:
            if self.size == TASK_INDICES:
                raise UserError(f"task file {path} has more than {TASK_INDICES} lines")
            if row is not None:
                if not self._rows:
                    self.columns = found_columns(self.columns, row)
                    self._choices_unseen = unseen_choices(self.columns, row)
                    self.as_members_read &= self.columns == COLUMNS
                    self._named = [name for name in self.columns if name in row and name not in COLUMNS]
                try:
                    self._rows[self.size] = self._row(row, answer_needed)
                    self._places[self.size] = place
                except (ValueError, RecursionError) as error:
                    raise wrong(path, place, f"{error}{_how(error, path)}") from error
            self.size += 1

    def _row(self, row: dict[str, Any], answer_needed: bool) -> dict[str, Any]:
        """The columns of a row, with question and answer as texts. The ValueError says what is wrong."""
        asked, answered = self.columns
        found = value_of(row, asked)
        question = text_of_messages(found, asked) if isinstance(found, list) else found
        if not isinstance(question, str) or not question.strip():
            raise ValueError(f"{described(asked)} must be a text, or a list of messages{_instead(found, asked)}")
        if len(question) > MAX_QUESTION_CHARS:
            raise ValueError(
                f"{described(asked)} has {len(question):,} characters, allowed are {MAX_QUESTION_CHARS:,}: leave the "
                "row out"
            )
        try:
            value = value_of(row, answered)
        except NoColumn as error:
            if answer_needed:
                raise ValueError(str(error)) from error  # which tells `_how` that it is the answer
            value = None
        answer = _answer(value, answered) if value is not None or answer_needed else None
        self._check_kind(answer, answered)
        self.as_members_read &= found is question and answer in (None, value if isinstance(value, list) else str(value))
        rest = {name: cell for name, cell in row.items() if name not in self.columns}
        return {**rest, "question": question.strip(), "answer": answer}

    def _check_kind(self, answer: str | list[str] | None, column: str) -> None:
        """Raise ValueError for an answer that is not of the kind that somebody named."""
        if self._kind_named is None or answer is None:
            return
        for each in as_list(answer):
            if (wanted := misfit(self._kind_named, each)) is not None:
                raise ValueError(
                    f"{described(column)} is {shorten(each, MAX_SHOWN)!r}, which is not {wanted}: correct it, or name "
                    f"another kind than {self._kind_named}"
                )

    @property
    def has_several(self) -> bool:
        """Whether a question has several accepted answers."""
        return any(isinstance(row["answer"], list) for row in self._rows.values())

    @property
    def is_judged(self) -> str:
        """A sentence about how answers are read, with the first three references as they were understood; empty if
        there are none."""
        first = islice((row for row in self._rows.values() if row["answer"] is not None), SHOWN)
        shown = [
            "  |  ".join(shorten(understood(self.kind, each), MAX_SHOWN) for each in accepted(row)) for row in first
        ]
        if not shown:
            return ""
        how = f"{'guessed: ' if self._is_guessed else ''}kind = {self.kind}"
        return f"answers of {self.label} are read as {READ_AS[self.kind]} ({how}): {', '.join(shown)}{self._nearly()}"

    def _nearly(self) -> str:
        """The end of that sentence, if the guess passed over a kind for a few references: the first of these."""
        asked = [(row["question"], each, i) for i, row in self._rows.items() for each in accepted(row)]
        near = nearly([each[:2] for each in asked], self.kind) if self._is_guessed else None
        if near is None:
            return ""
        kind, odd = near
        _, first, index = asked[odd[0]]
        told = f"--kind {kind} reads it as {shorten(understood(kind, first), MAX_SHOWN)}"
        if misfit(kind, first) is not None:
            told = f"correct it for --kind {kind}"
        return (
            f"; but {len(asked) - len(odd):,} of {len(asked):,} are {READ_AS[kind]}, and {self._places[index]} is "
            f"{shorten(first, MAX_SHOWN)!r}: {told}"
        )

    @property
    def was_read(self) -> str:
        """A sentence about what was read as what."""
        question, answer = self.columns
        kind = " and ".join(self._kinds)
        count = len(self._rows)
        told = f"{self.path}: {count:,} row{'' if count == 1 else 's'} of {kind}, question = {described(question)}"
        if any(row["answer"] is not None for row in self._rows.values()):
            told += f", answer = {described(answer)}"
        if self._left_out:
            told += f"; not read, since they hold bytes: {listed_names(self._left_out)}"
        if self._choices_unseen:
            shown = json.dumps(f"{{{question}}}\n{{{CHOICES}}}")
            told += f"; the model does not see `{CHOICES}`, which question={shown} puts in"
        return told

    def task(self, index: int) -> Task | None:
        """Task number `index`; None for an empty line."""
        if index not in self._rows:
            return None
        row = dict(self._rows[index])
        name = TaskName(self.environment, self.config, self.generator, seed=0, index=index)
        question, answer = row.pop("question"), row.pop("answer")
        named = dict(zip(self.columns, (question, answer), strict=True))
        row |= {column: named[column] for column in self._named}
        several = tuple(answer) if isinstance(answer, list) else ()
        return Task(
            name, self.label, question, several[0] if several else answer, row, accepted=several, kind=self.kind
        )

    def found(self, task: Task, completion: str) -> str | None:
        return self._judge(task, completion).extracted

    def read(self, task: Task, completion: str) -> tuple[str | None, float]:
        verdict = self._judge(task, completion)
        return verdict.extracted, float(verdict.right)

    def _judge(self, task: Task, completion: str) -> Verdict:
        references: tuple[str, ...] = task.accepted or (task.answer or "",)
        others: tuple[str, ...] = ()
        if self.kind == "choice":
            references, others = with_texts(task.question, references)
        return judge(self.kind, references, completion, self.form, others)

    @property
    def config_of_copy(self) -> str:
        """`config` of the file that `as_jsonl` makes of this one, which is what members of a swarm have."""
        return hashlib.sha256(self.as_jsonl()).hexdigest()[:CONFIG_HASH_CHARS]

    def as_jsonl(self) -> bytes:
        """The same questions and answers with their metadata, in the columns `question` and `answer`."""
        return b"".join(msgspec.json.encode(row) + b"\n" for row in self._rows.values())


def accepted(row: dict[str, Any]) -> list[str]:
    """The accepted answers of a row; none if it has no answer."""
    return [] if row["answer"] is None else as_list(row["answer"])


def as_list(answer: str | list[str]) -> list[str]:
    return answer if isinstance(answer, list) else [answer]


def _answer(value: Any, column: str) -> str | list[str]:
    """The right answer as a text, or all accepted ones. The ValueError says what is wrong."""
    if isinstance(value, list) and value and not any(isinstance(each, list) for each in value):
        if len(value) > MAX_ACCEPTED:
            raise ValueError(f"`{column}` has {len(value)} accepted answers: leave at most {MAX_ACCEPTED}")
        accepted = [text for each in value for text in [_answer(each, column)] if isinstance(text, str)]
        return accepted if len(accepted) > 1 else accepted[0]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"`{column}` is {value}, which is no number: leave the row out, or give its answer")
    if value is None:
        raise ValueError(f"`{column}` is null: leave the row out, or give its answer. {NO_ANSWER}")
    text = text_of(value)
    if text is None:
        raise ValueError(
            f"`{column}` must be a text, a number, true or false, or a list of those{_instead(value, column)}"
        )
    if extract(text) is None:
        raise ValueError(f"`{column}` is empty")
    return text


def _instead(value: Any, column: str) -> str:
    """What a value is that should be another, for the end of a message."""
    if isinstance(value, dict):
        return f"; it has {listed_names(value)}: name one, as `{column}.{next(iter(value), '…')}`"
    return "" if isinstance(value, str) else f"; it is {value_kind(value)}"


def _how(error: Exception, path: str) -> str:
    """How to name columns, if one is missing."""
    is_answer = isinstance(error.__cause__, NoColumn)
    if not is_answer and not isinstance(error, NoColumn):
        return ""
    table = f'{{file="{path}", question="COLUMN", answer="COLUMN"}}'
    return f". Name its columns in place of the file: '{table}'{f'. {NO_ANSWER}' if is_answer else ''}"


def _example(path: str) -> str:
    return "`question,answer` and `1+1?,2`" if path.lower().endswith(".csv") else LIKE


def _parts(path: str) -> tuple[str, str, list[tuple[str, bytes]]]:
    """(label, name to show, (name, content) of each file) of a file, or of a data set of the hub. Raises UserError."""
    if path.startswith(HUB):
        found = hub_data.files_of(path)
        return hub_data.label_of(path), str(found.name), [(str(each), _bytes(str(each))) for each in found.paths]
    return Path(path).stem, path, [(path, _bytes(path))]


def _bytes(path: str) -> bytes:
    try:
        return read_plain(Path(path).expanduser(), MAX_BYTES)
    except OSError as error:
        raise UserError(f"cannot read task file {path}: {error.strerror}") from error
