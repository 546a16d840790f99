r"""What the readers of all kinds share: one spelling of characters, and where an answer is announced.

`½`, `²` and `₂` become `\frac{1}{2}`, `^{2}` and `_{2}`; the rest becomes Unicode NFKC.
"""

from __future__ import annotations

import re
import unicodedata
from collections import deque

MAX_READ_CHARS = 4_000  # at the end of a place; an answer stands there

WRAPPED = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it)|mbox|operatorname)\s*\{([^{}]*)\}")
NO_UNITS = (
    "(?:hundred|thousand|million|billion|trillion|squared|cubed|factorial|hal(?:f|ves)"
    "|(?:third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|hundredth|thousandth)s?)(?![a-z])"
)  # words behind a number that make it another one

_VULGAR = re.compile("[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞]")
_RAISED, _LOWERED = (re.compile(f"[{digits}]+") for digits in ("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "₀₁₂₃₄₅₆₇₈₉"))
_DASHES = str.maketrans(dict.fromkeys("−–‐‑‒", "-"))
_UNSURE = re.compile(
    r"(?:(?:n't|n’t|\bnot)\s+(?:think|believe|say|sure)|\bdoubt|\bwhether|\bunlikely)\s+(?:that\s+|if\s+)?(?:the\s+)?"
    r"(?:\w+\s+)?\Z",
    re.IGNORECASE,
)
_WRONG = re.compile(r"\b(?:wrong|incorrect)\s+\Z", re.IGNORECASE)


def spelt(text: str) -> str:
    """The end of `text`, with one spelling of its characters."""
    text = _VULGAR.sub(_fraction, text[-MAX_READ_CHARS:])
    text = _RAISED.sub(lambda m: f"^{{{_plain(m[0])}}}", text)
    text = _LOWERED.sub(lambda m: f"_{{{_plain(m[0])}}}", text)
    return _plain(text)[-MAX_READ_CHARS:]


def behind(mark: re.Pattern[str], text: str) -> str:
    """What stands behind the last match of `mark`; all of `text` if there is none, nothing if the text takes it back:
    `I doubt that the answer is 5`."""
    last = deque(mark.finditer(text), maxlen=1)
    if not last:
        return text
    start, end = last[0].span()
    return "" if is_unsure(text, start) or _WRONG.search(text[max(0, start - 20) : start]) else text[end:]


def is_unsure(text: str, start: int) -> bool:
    """Whether what stands there is doubted: `I don't think the answer is 5`."""
    return _UNSURE.search(text[max(0, start - 40) : start]) is not None


def _plain(text: str) -> str:
    return unicodedata.normalize("NFKC", text).translate(_DASHES)


def _fraction(match: re.Match[str]) -> str:
    above, _, below = unicodedata.normalize("NFKC", match[0]).partition("⁄")
    return rf"\frac{{{above}}}{{{below}}}"
