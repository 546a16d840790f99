"""Out of memory, in every dialect torch speaks."""

from __future__ import annotations

import torch

_WORDS = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory")


def is_out_of_memory(exc: BaseException) -> bool:
    """Whether `exc` says that memory ran out (CUDA and MPS raise their own type, the CPU a RuntimeError)."""
    if isinstance(exc, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(exc, RuntimeError) and any(word in str(exc).lower() for word in _WORDS)
