"""Where the answer stands in a text: in tags, in a box, after `####`, or anywhere after the reasoning."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from functools import lru_cache

from swarm_protocol.answer_form import AnswerForm

MAX_ANSWER_CHARS = 32_768
"""Longer answers score 0 unseen: the longest reference of the shipped sets has 200 characters, and this bounds what a
checker must read."""

MAX_TEXT_CHARS = 100_000
"""Rules 1 to 4 look at the end of the text only: more than 25 000 tokens, and hostile text stays cheap."""

MAX_BOXES, MAX_BOXES_CHARS = 8, 4_000  # that are read as one answer, and where they stand at the end

_BRACES = re.compile(r"\\boxed\{|\\.|[{}]", re.DOTALL)
_HASHED = re.compile(r"####[ \t]*([-+]?[0-9.][0-9.,/]*)")
_BETWEEN = re.compile(r"(?:[\s$.,;]|\\[()\[\] ]|\b(?:and|or)\b|</?answer>)*")
_HASHED_LINE = re.compile(r"(?:^|\n)[ \t]*####[ \t:]*([^\n]*\S)[ \t]*\Z")


@lru_cache(maxsize=32)  # a completion is read by the task set and by its environment, and its like come again
def extract(completion: str, form: AnswerForm = "any") -> str | None:
    r"""The answer to be judged; None if there is none. With `any`, the first rule that applies wins:

        0. drop the reasoning: everything up to the last `</think>`; `<think>` never closed = no answer
        1. the last complete `<answer>…</answer>`
        2. the last complete `\boxed{…}`, braces balanced
        3. the last `#### n`, n a plain number
        4. all that is left

    With `tags`, rule 1 alone applies, and with `boxed` rule 2, and nothing but white space may follow.

    A `\boxed{…}` inside the tags is unwrapped. White space around the answer is dropped; an empty one is no answer.
    Time is linear in the length of the text.
    """
    return _extract(completion, form, _hashed)


@lru_cache(maxsize=32)
def extract_place(completion: str, form: AnswerForm = "any") -> str | None:
    """As `extract`, for kinds that read an answer within its place: rule 3 takes all that follows `####` in the last
    line, since they find the number or the letter in it.
    Boxes with nothing but `and`, `or` or a comma between them are one answer, `7, 8`."""
    return _extract(completion, form, lambda text: _hashed_line(text) or _hashed(text), several=True)


def reference_text(reference: str) -> str | None:
    """What a reference says: found as in a completion, or all that follows `####` in its last line (`#### $26`)."""
    found = extract(reference)
    if found is not None and (line := _hashed_line(found)) is not None:
        return found[line]
    return found


def _extract(
    completion: str, form: AnswerForm, hashed: Callable[[str], slice | None], several: bool = False
) -> str | None:
    _, closed, text = completion.rpartition("</think>")
    if not closed and text.lstrip().startswith("<think>"):
        return None
    text = text[-MAX_TEXT_CHARS:].rstrip()
    if form != "any":
        found, end = (_tagged(text), "</answer>") if form == "tags" else (_boxed(text), "}")
        if found is None or text[found.stop :] != end:
            return None
        text = text[found]
    else:
        if several and "<answer>" not in text and (boxes := _last_boxes(text)):
            return boxes
        places = (rule(text) for rule in (_tagged, _boxed, hashed))
        text = text[next((found for found in places if found is not None), slice(None))]
    text = text.strip()
    if text.startswith(r"\boxed{"):
        found = _boxed(text)
        text = "" if found is None else text[found].strip()
    return text or None


def _tagged(text: str) -> slice | None:
    start = text.rfind("<answer>", 0, max(text.rfind("</answer>"), 0))
    if start < 0:
        return None
    start += len("<answer>")
    return slice(start, text.index("</answer>", start))


def _last_boxes(text: str) -> str | None:
    """What the last boxes hold, if there are several with nothing but `and`, `or` or signs between them."""
    text = text[-MAX_BOXES_CHARS:]
    last = _boxed(text)
    held: list[str] = []
    while last is not None:
        held.insert(0, text[last].strip())
        before = text[: last.start - len(r"\boxed{")]
        earlier = _boxed(before)
        if earlier is None or len(held) > MAX_BOXES or not _BETWEEN.fullmatch(before, earlier.stop + 1):
            break
        last = earlier
    return ", ".join(held) if len(held) > 1 else None


def _boxed(text: str) -> slice | None:
    if r"\boxed{" not in text:
        return None
    opened: list[int] = []  # start of the content of each open \boxed{; -1 for a plain brace
    last: tuple[int, int] | None = None
    for match in _BRACES.finditer(text):
        if match[0] == r"\boxed{":
            opened.append(match.end())
        elif match[0] == "{":
            opened.append(-1)
        elif match[0] == "}" and opened:
            start = opened.pop()
            if start >= 0 and (last is None or start > last[0]):
                last = start, match.start()
    return slice(*last) if last else None


def _hashed(text: str) -> slice | None:
    last = deque(_HASHED.finditer(text), maxlen=1)
    return slice(last[0].start(1), last[0].start(1) + len(last[0][1].rstrip(".,/"))) if last else None


def _hashed_line(text: str) -> slice | None:
    line = text.rfind("\n") + 1
    match = _HASHED_LINE.search(text, max(0, line - 1))
    return slice(*match.span(1)) if match else None
