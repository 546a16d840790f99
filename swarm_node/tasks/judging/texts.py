"""The same text, or the same plain number: how an answer of the kind `text` is compared.

    text -> what stands behind the last "answer is" or "answer:" in its sentence, else all of it -> without markup

Case, an article in front, quotes and the punctuation at the end say nothing. All other words count: `Paris, Texas` is
not `Paris`, nor is `Paris or Rome`.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal

from swarm_node.tasks.judging.spelling import MAX_READ_CHARS, WRAPPED, behind

_NUMBER = re.compile(r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+|(?=\.[0-9]))(?:\.[0-9]*)?")
_CODE = re.compile(r"[-+]?0[0-9]")  # 007: its zeros count

_ANSWER_IS = re.compile(r"\banswer\s*(?:is\s*:?|[:=])\s*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\n|(?<=[.!?])\s+(?=[A-Z])")
_TAKEN_BACK = re.compile(r"no\s*[,.!:;-]|(?:wait|actually|sorry|correction|or)\b", re.IGNORECASE)
_MARKUP = "*_`\"'“”‘’«»$ "
_END = ".,;:!?"
_ARTICLE = re.compile(r"(?:the|an?)\s+(?=\S)")


def stated(text: str) -> str:
    """What a text states as its answer."""
    text = text[-MAX_READ_CHARS:]
    found = behind(_ANSWER_IS, text)
    if found == text:
        return text.strip()
    first, *more = _SENTENCE_END.split(found.strip(), maxsplit=1)
    return text.strip() if more and _TAKEN_BACK.match(more[0]) else first


def plain(text: str) -> str:
    """`text` in lower case, without markup, an article in front and the punctuation at its end."""
    bare = WRAPPED.sub(r"\1", normalise(text)).strip(_MARKUP)
    for _ in range(2):  # **"Paris".**
        bare = bare.rstrip(_END).strip(_MARKUP)
    return _ARTICLE.sub("", bare.casefold(), count=1) or bare


def states(answer: str, reference: str) -> bool:
    """Whether an answer states the text or the plain number of the reference."""
    if normalise(answer) == normalise(reference):
        return True
    said, wanted = plain(stated(answer)), plain(reference)
    return bool(wanted) and (said == wanted or (not _CODE.match(wanted) and bool(text_or_number(said, wanted))))


def normalise(text: str) -> str:
    """Unicode NFC, outer white space removed, inner white space collapsed to single spaces."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def parse_number(text: str) -> Decimal | None:
    """A plain decimal number such as `-1,234.50`; no exponent, so a short text is never a huge number."""
    return Decimal(text.replace(",", "")) if _NUMBER.fullmatch(text) else None


def text_or_number(answer: str, reference: str) -> float:
    """1 if both are the same text after normalisation, or the same number."""
    answer, reference = normalise(answer), normalise(reference)
    if answer == reference:
        return 1.0
    number = parse_number(answer)
    return float(number is not None and number == parse_number(reference))
