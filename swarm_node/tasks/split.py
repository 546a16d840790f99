"""Training or evaluation? Decided by the question's own content, so that it holds on every machine:

    evaluation  <=>  sha256(utf-8(normalise(question))) mod 5 = 0

A split by index would leak: small question spaces repeat one question under many indices.
"""

from __future__ import annotations

import hashlib
import unicodedata

EVALUATION_SHARE = 5
"""One question in five is for evaluation."""


def normalise(text: str) -> str:
    """Unicode NFC, outer white space removed, inner white space collapsed to single spaces."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def is_held_out(question: str) -> bool:
    """Whether `question` is kept for evaluation: nothing may ever train on it."""
    digest = hashlib.sha256(normalise(question).encode("utf-8")).digest()
    return int.from_bytes(digest, "big") % EVALUATION_SHARE == 0
