"""The rows of a question file, whatever its format.

    JSON lines | a JSON array | a table with a header (`,` `;` `|` or tabs between cells) | Parquet -> rows

The first bytes and the ending of the name tell the format. Each row is checked for its format alone; `columns` says
what it holds.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from swarm_node.config.training import is_table
from swarm_node.errors import UserError
from swarm_node.tasks.parquet import read_parquet

BOM = b"\xef\xbb\xbf"  # a mark that some editors write at the beginning
PARQUET = b"PAR1"  # the first and the last four bytes of a Parquet file
DELIMITERS = ",;\t|"
_SURROGATE = re.compile("[\ud800-\udfff]")


class FileRows(NamedTuple):
    """The rows of a file."""

    kind: str  # for a sentence: "JSON lines"
    rows: Iterator[tuple[str, dict[str, Any] | None]]
    """(place for messages, as "line 3"; row, or None for an empty line). It raises UserError at a bad one."""
    left_out: Sequence[str] = ()  # columns that are not read, since they hold bytes
    is_plain: bool = False  # whether these are JSON lines


def read_rows(path: str, data: bytes, wanted: Sequence[str]) -> FileRows:
    """The rows of a file with this content; `wanted` are names of columns, which tell delimiters apart. UserError if
    it is malformed."""
    if data.startswith(PARQUET) or path.lower().endswith(".parquet"):
        left_out, found = read_parquet(path, data)
        return FileRows("Parquet", ((f"row {number}", row) for number, row in enumerate(found, 1)), left_out)
    data = data.removeprefix(BOM)
    if is_table(path):
        return _table(path, data, wanted)
    begin = data.lstrip()[:1]
    if begin == b"[" and (rows := _array(path, data)) is not None:
        return FileRows("a JSON array", iter(rows))
    return FileRows("JSON lines", _lines(path, data), is_plain=True)


def wrong(path: str, place: str, why: object) -> UserError:
    """The error about one place of a file."""
    return UserError(f"task file {path}, {place}: {why}")


def _lines(path: str, data: bytes) -> Iterator[tuple[str, dict[str, Any] | None]]:
    for number, line in enumerate(data.splitlines(), 1):
        place = f"line {number}"
        if not line.strip():
            yield place, None
            continue
        try:
            row = msgspec.json.decode(line)
        except (ValueError, RecursionError) as error:  # msgspec.DecodeError is a ValueError
            raise wrong(path, place, _why(line, error, path)) from error
        yield place, _checked(row, path, place)


def _array(path: str, data: bytes) -> list[tuple[str, dict[str, Any] | None]] | None:
    """The rows of a JSON array; None if each line is a JSON value of its own."""
    try:
        found = msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:
        first, _, more = data.strip().partition(b"\n")
        if more and _is_json(first):
            return None
        line, why = _place(data)
        raise wrong(path, f"line {line or 1}", why or error) from error
    return [(f"row {number}", _checked(row, path, f"row {number}")) for number, row in enumerate(found, 1)]


def _checked(row: Any, path: str, place: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise wrong(path, place, "not a JSON object")
    return row


def _is_json(line: bytes) -> bool:
    try:
        msgspec.json.decode(line)
    except (ValueError, RecursionError):
        return False
    return True


def _why(line: bytes, error: Exception, path: str) -> str:
    """What is wrong with a line that is no JSON, and what to do."""
    if line.strip() in (b"{", b"["):
        source, out = shlex.quote(path), shlex.quote(f"{Path(path).stem}-lines.jsonl")
        return f"a row goes over several lines, and JSON lines have one a line: `jq -c . {source} > {out}` makes them"
    return _place(line)[1] or str(error)


def _place(data: bytes) -> tuple[int | None, str]:
    """(line, what is wrong) of bytes that are no JSON, as far as Python's own reader, which takes more, tells it."""
    odd: list[str] = []

    def remember(text: str) -> float:
        odd.append(text)
        return float(text)

    try:
        found = json.loads(data, parse_constant=remember)
    except json.JSONDecodeError as error:
        return error.lineno, ""
    except UnicodeDecodeError:
        return None, "not UTF-8 text: save it as such"
    except (ValueError, RecursionError):
        return None, ""
    if odd:
        where = next((i for i, line in enumerate(data.splitlines(), 1) if odd[0].encode() in line), None)
        return where, (
            f"it has `{odd[0]}`, which JSON does not have: write null where there is no value, and leave out a row "
            "without an answer"
        )
    return None, _surrogate(found)


def _surrogate(value: Any) -> str:
    """The message about half a character in a decoded value; empty if there is none."""
    text = json.dumps(value, ensure_ascii=False)
    if (match := _SURROGATE.search(text)) is None:
        return ""
    code = f"\\u{ord(match[0]):04x}"
    return (
        f"it has `{code}`, half a character, as text has that was cut at a number of code units: leave it out, for "
        f'example with text.encode(errors="ignore").decode() in Python'
    )


def _table(path: str, data: bytes, wanted: Sequence[str]) -> FileRows:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        name = "UTF-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "ENCODING"
        convert = f"`iconv -f {name} -t UTF-8 {shlex.quote(path)} > NEW{Path(path).suffix}`"
        raise UserError(f"task file {path} is not UTF-8 text: save it as such, or {convert}") from error
    delimiter = _delimiter(path, text, wanted)
    between = {",": "commas", "\t": "tabs"}.get(delimiter, f"`{delimiter}`")
    with _cells_of(len(text)):
        rows = list(_cells(path, csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=delimiter)))
    return FileRows(f"a table with {between} between cells", iter(rows))


def _delimiter(path: str, text: str, wanted: Sequence[str]) -> str:
    """The character between cells: that under which the header has most of the `wanted` columns, then most columns."""
    if path.lower().endswith(".tsv"):
        return "\t"
    ranks = {}
    for each in DELIMITERS:
        try:
            with _cells_of(len(text)):
                header = next(filter(None, csv.reader(io.StringIO(text, newline=""), delimiter=each)), [])
        except csv.Error:
            header = []
        ranks[each] = sum(name in header for name in wanted), len(header)
    return max(DELIMITERS, key=ranks.__getitem__)


@contextmanager
def _cells_of(chars: int) -> Iterator[None]:
    """Let cells of a table have as many characters as the table; the csv module allows 131,072 by itself."""
    before = csv.field_size_limit(max(chars, csv.field_size_limit()))
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _cells(path: str, table: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """(the last line, texts by column) of each row below the header; empty lines are no rows. Raises UserError."""
    rows = filter(None, table)
    try:
        header: list[str] = next(rows, [])
        if len(set(header)) < len(header):
            raise csv.Error("two columns have one name")
        for row in rows:
            if len(row) != len(header):
                raise csv.Error(f"the row has {len(row)} cells, and the header {len(header)}")
            yield f"line {table.line_num}", dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise wrong(path, f"line {table.line_num}", error) from error
