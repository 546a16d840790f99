"""The expression of mathematics that a sentence ends with, or that stands in its last dollar signs; or its words."""

from __future__ import annotations

import re

from swarm_node.tasks.judging import numbers
from swarm_node.tasks.judging.expressions import MAX_CHARS, Unreadable
from swarm_node.tasks.judging.maths import read
from swarm_node.tasks.judging.spelling import MAX_READ_CHARS, NO_UNITS, behind
from swarm_node.tasks.judging.texts import stated

_SPAN = re.compile(r"\$\$(.+?)\$\$|\\\[((?:(?!\\\[).)+?)\\\]|\\\(((?:(?!\\\().)+?)\\\)|\$([^$]+?)\$", re.DOTALL)
_BETWEEN = re.compile(r"\s*(?:,|;|(?:,\s*)?\b(?:and|or|to)\b)\s*", re.IGNORECASE)
_MARK = re.compile(r"\b(?:is|are|equals|answer\s*:|result\s*:)\s*:?\s*|\banswer\b\s*:?\s+(?=[\d\\-])", re.IGNORECASE)
_SENTENCE = re.compile(r"\.(?=\s|\Z)|\n")
_NOT_AFTER = re.compile(rf"\s*(?:{NO_UNITS}|(?:is|are)\s*(?:not\b|n't|wrong|incorrect|unknown))", re.IGNORECASE)
_SIGN = re.compile(r"\s*(?:\\?%|percent\b|pct\b)")
_AROUND = " \n.*_`\"'“”"  # markup and punctuation around words
_HEDGED = re.compile(
    r"\b(?:n?or|n?either|if|whether|not|none?|cannot|never|false|wrong|suppose|assume|may|might|could|maybe)\b"
    r"|n['’]t\b|\?",
    re.IGNORECASE,
)


def expression_in(place: str) -> str | None:
    """The expression that the text in `place` ends with; None if it has none."""
    text = place[-MAX_READ_CHARS:].replace(r"\$", " ").strip()
    if _is_read(text):
        return text
    after = behind(_MARK, text).strip()
    spans = list(_SPAN.finditer(text))
    if spans:
        return _in_spans(text, spans) if after else None
    sentence = _SENTENCE.split(after, maxsplit=1)[0].strip().strip("*` ")
    if sentence and sentence != text and _is_read(sentence):
        return sentence
    number = None if re.search(r"\\(?:begin|end)", text) else numbers.read_number(text)
    if number is None or re.search(rf"\bor\s*{re.escape(number.text)}", text):
        return None
    return number.text


def words_in(place: str) -> list[str]:
    """The text in `place`, and what it states, as `even` in "So f is even."; without what reads as an expression."""
    text = place[-MAX_READ_CHARS:].strip(_AROUND)
    last = _SENTENCE.split(text)[-1]
    said = stated(text)
    if said == text and (after := behind(_MARK, last)) != last:
        said = after
    before = _SENTENCE.split(text[: text.rindex(said)].rstrip())[-1]
    told = [text] if _HEDGED.search(before) else [text, said.strip(_AROUND)]
    return [each for each in told if each and not _is_read(each)]


def _is_read(text: str) -> bool:
    try:
        return len(text) <= MAX_CHARS and read(text).kind != "text"
    except (Unreadable, RecursionError):
        return False


def _in_spans(text: str, spans: list[re.Match[str]]) -> str | None:
    """The last mathematics of a text that marks it, with what it is joined to by `and` or `or`; or the number after
    it."""
    tail = text[spans[-1].end() :]
    if _NOT_AFTER.match(tail):
        return None
    if re.search(r"\d", tail):
        found = numbers.read_number(tail)
        return None if found is None else found.text
    joined = [spans[-1]]
    for span in reversed(spans[:-1]):
        if not _BETWEEN.fullmatch(text[span.end() : joined[0].start()]):
            break
        joined.insert(0, span)
    before = text[max(0, joined[0].start() - 40) : joined[0].start()].replace("**", "")
    if before[-1:].isdigit() or numbers.is_denied(before):
        return None
    inside = ", ".join(next(filter(None, span.groups())).strip(" \n.") for span in joined)
    return inside + ("%" if _SIGN.match(tail) else "") if inside else None
