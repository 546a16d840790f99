"""Whether two peers can hold stages of one policy, in 16 hexadecimal digits; and if they cannot, what differs.

    model | weights | what is trained | dtype        four digits of a sha256 each: they tell apart, they prove nothing

Loads no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

DIGITS = 4
ASPECTS = ("another model", "other weights of the same model", "other LoRA settings", "another policy.dtype")


def architecture(model: Sequence[object], weights: str, trained: Sequence[object], dtype: str) -> str:
    """Equal for those who agree in everything; all of it as JSON."""
    return "".join(
        hashlib.sha256(json.dumps(aspect).encode()).hexdigest()[:DIGITS] for aspect in (model, weights, trained, dtype)
    )


def difference(mine: str, theirs: str) -> str:
    """What they have, in words, whose architecture is another one. Of another model the rest says nothing."""
    starts = range(0, DIGITS * len(ASPECTS), DIGITS)
    differs = [mine[start : start + DIGITS] != theirs[start : start + DIGITS] for start in starts]
    found = [aspect for aspect, other in zip(ASPECTS, differs, strict=True) if other]
    return found[0] if differs[0] else " and ".join(found)
