"""What a question file's row holds under the name of a column, which its user gives.

    answer                      a column
    reward_model.ground_truth   a value inside one; `choices.text.0` is the first of a list
    {question}\\nA) {choices.text.0}    a template of those: plain look-ups, and `{{` or `}}` for a brace

A row is somebody else's text, so a template never becomes code or a format: it is cut at its braces, and each name
between them is looked up.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from string import ascii_uppercase
from typing import Any

from swarm_node.config.training import COLUMNS

MAX_LISTED = 8  # names in a message
MAX_INDEX_CHARS = 9  # digits of an index into a list
SHOWN_CHARS = 70  # of a template, where it is shown
CHOICES = "choices"  # the usual column of the choices of a question
_PIECE = re.compile(r"\{\{|\}\}|\{([^{}]+)\}|([{}])")
QUESTIONS = ("question", "problem", "prompt")
ANSWERS = ("answer", "answerKey", "solution", "reward_model.ground_truth")
"""Usual columns of question and answer, the first that is there wins: GSM8K, ARC, MATH, and the layouts that TRL and
verl read."""


class NoColumn(ValueError):
    """A row has nothing under a name; the text says what it has."""


def is_template(name: str) -> bool:
    """Whether the name of a column is a template over several."""
    return "{" in name or "}" in name


def roots(name: str) -> list[str]:
    """The names that `name` looks up: one, or those of a template. The ValueError says what is wrong with it."""
    return [name] if not is_template(name) else [name for text, name in _pieces(name) if name]


def has(row: Mapping[str, Any], name: str) -> bool:
    """Whether a row has something under a name that is no template."""
    try:
        look_up(row, name)
    except NoColumn:
        return False
    return True


def value_of(row: Mapping[str, Any], name: str) -> Any:
    """What a row has under `name`: a value as it is, or the text of a template. The ValueError says what is wrong."""
    if name in row or not is_template(name):
        return look_up(row, name)
    return "".join(text or _shown(look_up(row, field), field) for text, field in _pieces(name))


def look_up(row: Mapping[str, Any], name: str) -> Any:
    """The value of a column, or inside one by a name with dots. Raises NoColumn."""
    if name in row:
        return row[name]
    value: Any = row
    path: list[str] = []
    for part in name.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and _is_index(part, len(value)):
            value = value[int(part)]
        else:
            raise NoColumn(f"no column `{name[:80]}`; {_inside(value, path)}")
        path.append(part)
    return value


def text_of(value: Any) -> str | None:
    """A text, a number or a truth value (`yes`, `no`) as a text; None for everything else."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return format(Decimal(repr(value)), "f") if math.isfinite(value) else None
    return str(value) if isinstance(value, (str, int)) else None


def found_columns(columns: tuple[str, str], row: Mapping[str, Any]) -> tuple[str, str]:
    """`columns`, where each one that nobody named and that is missing is that of a usual layout, if `row` has one."""
    question, answer = (
        _usual(name, usual, row) if name == default else name
        for name, default, usual in zip(columns, COLUMNS, (QUESTIONS, ANSWERS), strict=True)
    )
    if answer == "answerKey" and not is_template(question) and _is_list_of_choices(row.get(CHOICES)):
        question = f"{{{question}}}\n{{{CHOICES}}}"
    return question, answer


def unseen_choices(columns: tuple[str, str], row: Mapping[str, Any]) -> bool:
    """Whether a row has choices that its question, under these columns, does not show."""
    seen = [name.partition(".")[0] for name in roots(columns[0])]
    return CHOICES not in seen and _is_list_of_choices(row.get(CHOICES))


def described(name: str) -> str:
    """The name of a column, or a template, for a sentence."""
    shown = json.dumps(name, ensure_ascii=False) if is_template(name) else f"`{name}`"
    return shown if len(shown) <= SHOWN_CHARS else f"{shown[: SHOWN_CHARS - 1]}…"


def listed_names(names: Mapping[str, Any]) -> str:
    """Some of the names, for a sentence."""
    return ", ".join(f"`{name[:40]}`" for name in list(names)[:MAX_LISTED]) or "none"


def _usual(name: str, usual: tuple[str, ...], row: Mapping[str, Any]) -> str:
    if name in row:
        return name
    by_lower: dict[str, str] = {}
    for column in row:
        by_lower.setdefault(column.lower(), column)  # `Question`, as spreadsheets have it
    for each in usual:
        if each.lower() in by_lower:
            return by_lower[each.lower()]
        if has(row, each):
            return each
    return name


def _is_index(part: str, length: int) -> bool:
    return part.isascii() and part.isdigit() and len(part) <= MAX_INDEX_CHARS and int(part) < length


def _inside(value: Any, path: list[str]) -> str:
    """What there is where a look-up ended, for a message."""
    place = f"`{'.'.join(path)}`" if path else "it"
    if isinstance(value, Mapping):
        return f"{place} has {listed_names(value)}"
    if isinstance(value, list):
        return f"{place} is a list of {len(value)}, counted from 0"
    return f"{place} is a single value"


def _pieces(template: str) -> list[tuple[str, str]]:
    """(text, "") or ("", name) of each piece of a template. The ValueError names a lone brace."""
    pieces, end = [], 0
    for match in _PIECE.finditer(template):
        if match[2]:
            raise ValueError(
                f"{described(template)} has a `{match[2]}` without its other half: `{{column}}` puts a column in, "
                f"and a brace of the text is doubled, `{match[2] * 2}`"
            )
        pieces += [(template[end : match.start()], ""), ("", match[1]) if match[1] else (match[0][0], "")]
        end = match.end()
    return [*(piece for piece in pieces if any(piece)), *([(template[end:], "")] if template[end:] else [])]


def _shown(value: Any, name: str) -> str:
    """A value as a template puts it in: a text, a number, or choices in lines. The ValueError says what is wrong."""
    text = text_of(value)
    if text is not None:
        return text
    if _is_list_of_choices(value):
        return _choices(value, name)
    if isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
        return text_of_messages(value, name)
    inside = f": it has {listed_names(value)}, so name one as `{name}.…`" if isinstance(value, Mapping) else ""
    raise ValueError(f"`{name}` is {value_kind(value)}, which a template cannot put in{inside}")


def value_kind(value: Any) -> str:
    """What a value is, for a message."""
    if value is None:
        return "null"
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "a text", list: "a list"}
    return next((words for kind, words in kinds.items() if isinstance(value, kind)), "an object")


def _is_list_of_choices(value: Any) -> bool:
    """Whether a value is a list of texts and numbers, or of such with their labels, `{"text": […], "label": […]}`."""
    if isinstance(value, Mapping):
        return {"text", "label"} <= value.keys() and all(_is_list_of_choices(value[key]) for key in ("text", "label"))
    return isinstance(value, list) and bool(value) and all(text_of(each) is not None for each in value)


def _choices(value: Any, name: str) -> str:
    """A line for each choice, `A) its text`."""
    texts, labels = (value["text"], value["label"]) if isinstance(value, Mapping) else (value, ascii_uppercase)
    if len(texts) > len(labels) or (isinstance(value, Mapping) and len(texts) < len(labels)):
        raise ValueError(f"`{name}` has {len(texts)} choices and {len(labels)} labels")
    return "\n".join(f"{text_of(label)}) {text_of(text)}" for label, text in zip(labels, texts, strict=False))


def text_of_messages(messages: list[Any], column: str) -> str:
    """The question in messages of the system, if there are any, and then of the user. The ValueError says what is
    wrong."""
    roles = [each.get("role") if isinstance(each, Mapping) else None for each in messages]
    contents = [_text_of_content(each, column) if isinstance(each, Mapping) else None for each in messages]
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
    if not all(contents):
        raise ValueError(f"each `content` in `{column}` must be a text: empty messages are not read")
    return "\n\n".join(filter(None, contents))


def _text_of_content(message: Mapping[str, Any], column: str) -> str | None:
    """The text of one message, which may come in parts; None if it has none. The ValueError names a part that is no
    text."""
    content = message.get("content")
    if not isinstance(content, list):
        return content.strip() if isinstance(content, str) else None
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            what = f"of type `{str(kind)[:40]}`" if kind and kind != "text" else "without a text"
            raise ValueError(f"`content` in `{column}` has a part {what}: only text is read, no images and no sound")
        texts.append(text)
    return "".join(texts).strip()
