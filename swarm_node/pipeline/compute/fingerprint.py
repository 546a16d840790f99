"""A fingerprint of 16 hexadecimal digits, equal for peers that can hold stages of one policy.

    model | weights | trained parameters | dtype        four digits of a sha256 each

It tells policies apart and says what differs, but proves nothing. This module loads no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

DIGITS = 4
ASPECTS = ("another model", "other weights of the same model", "other LoRA settings", "another policy.dtype")


def architecture(model: Sequence[object], weights: str, trained: Sequence[object], dtype: str) -> str:
    """The fingerprint; each aspect is hashed as JSON."""
    return "".join(
        hashlib.sha256(json.dumps(aspect).encode()).hexdigest()[:DIGITS] for aspect in (model, weights, trained, dtype)
    )


def difference(mine: str, theirs: str) -> str:
    """What differs between two fingerprints, in words. If the model differs, nothing else is said."""
    starts = range(0, DIGITS * len(ASPECTS), DIGITS)
    differs = [mine[start : start + DIGITS] != theirs[start : start + DIGITS] for start in starts]
    found = [aspect for aspect, other in zip(ASPECTS, differs, strict=True) if other]
    return found[0] if differs[0] else " and ".join(found)
