"""Records that peers exchange. Their constraints are checked by `protocol.codec`, not on construction."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from protocol.limits import (
    CONFIG_HASH_CHARS,
    MAX_ENVIRONMENT_CHARS,
    MAX_GENERATOR_CHARS,
    TASK_INDICES,
    TASK_SEEDS,
)


class TaskName(msgspec.Struct, frozen=True, order=True):
    """What a task is called: enough to regenerate it on any machine, and nothing to trust."""

    environment: Annotated[str, Meta(max_length=MAX_ENVIRONMENT_CHARS, pattern=r"^[a-z0-9_]+\Z")]
    """Generator of the question, for example `gcd`; `jsonl` = a file of questions."""
    config: Annotated[str, Meta(pattern=rf"^[0-9a-f]{{{CONFIG_HASH_CHARS}}}\Z")]
    """First hex digits of the sha256 of the environment's options as canonical JSON, or of the file."""
    generator: Annotated[str, Meta(max_length=MAX_GENERATOR_CHARS, pattern=r"^[ -~]+\Z")]
    """Package and version that make the item: another version may make another item."""
    seed: Annotated[int, Meta(ge=0, lt=TASK_SEEDS)]
    """0 for generators that seed item i with `seed + i`, so that no item has two names."""
    index: Annotated[int, Meta(ge=0, lt=TASK_INDICES)]
    """Which item; the line, counted from 0, for a file."""
