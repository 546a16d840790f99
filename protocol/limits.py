"""Bounds on what a peer may send, each with its reason."""

from __future__ import annotations

from typing import Final

MAX_TASK_NAME_BYTES: Final = 512
"""An encoded task name: the longest legal one takes under 220 bytes; the rest is room for later fields."""

MAX_ENVIRONMENT_CHARS: Final = 64
"""Environment name: the longest in reasoning-gym 0.1.25 has 27 characters."""

CONFIG_HASH_CHARS: Final = 16
"""64 bits of sha256: a collision gains nothing, the receiver looks the hash up among its own sources."""

MAX_GENERATOR_CHARS: Final = 64
"""Package name and version, for example `reasoning-gym 0.1.25`."""

TASK_SEEDS: Final = 2**32
"""Seeds lie below this: the range that common random generators take."""

TASK_INDICES: Final = 2**31
"""Indices lie below this: far more items than any run draws, and a signed 32-bit integer still holds them."""
