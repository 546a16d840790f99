"""The same text, or the same plain number: how an answer of the kind `text` is compared."""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal

_NUMBER = re.compile(r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+|(?=\.[0-9]))(?:\.[0-9]*)?")


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
