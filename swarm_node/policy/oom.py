"""Out of memory, in every dialect torch speaks; what a GPU has left; and how the C library hands memory out."""

from __future__ import annotations

import ctypes
import ctypes.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

NO_ROOM_TO_SAMPLE = "not enough memory to sample one group: lower rollouts.group_size or max_new_tokens"
NO_ROOM_TO_TRAIN = (
    "not enough memory to train on one rollout of {} tokens: lower rollouts.max_new_tokens, train an adapter "
    "(policy.lora = true) or take a smaller model"
)
_WORDS = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory")


def is_out_of_memory(exc: BaseException) -> bool:
    """Whether `exc` says that memory ran out (CUDA and MPS raise their own type, the CPU a RuntimeError)."""
    if isinstance(exc, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(exc, RuntimeError) and any(word in str(exc).lower() for word in _WORDS)


def free_on_gpu(device: torch.device) -> int:
    """Bytes that tensors can still take on a GPU: those that are free, and those that torch holds for later tensors. A
    limit of `torch.cuda.set_per_process_memory_fraction` counts."""
    (free, whole), held = torch.cuda.mem_get_info(device), torch.cuda.memory_reserved(device)
    if fraction := getattr(torch.cuda, "get_per_process_memory_fraction", None):  # torch 2.6 has none
        free = min(free, int(whole * fraction(device)) - held)
    return int(free + held - torch.cuda.memory_allocated(device))


_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # constants of glibc's malloc.h


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory for the next tensor instead of returning it and faulting it in again.

    A training step frees and asks for the same few megabytes a hundred times. That makes 5,000 page faults a step, a
    tenth of the time of an update at 0.44 million parameters. Without Linux and glibc this does nothing.
    """
    _mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)  # the most it takes; larger tensors are mapped and unmapped as before
    _mallopt(_M_TRIM_THRESHOLD, 256 * 2**20)
    _mallopt(_M_TOP_PAD, 64 * 2**20)


@contextmanager
def large_tensors_mapped() -> Iterator[None]:
    """Have tensors from a megabyte on mapped one by one, and returned when they are freed, until the context is left.

    glibc cannot give freed aligned memory to the next tensor of the same size, so a heap of large tensors has gaps: up
    to half of what they take. What was freed before, and large tensors would not use again, is returned at once. Only
    updates keep so many tensors; sampling would lose a twentieth of its speed.
    """
    _mallopt(_M_MMAP_THRESHOLD, 2**20)
    return_freed_memory()
    try:
        yield
    finally:
        keep_freed_memory()


def return_freed_memory() -> None:
    """Have the C library give back what was freed. Without Linux and glibc this does nothing."""
    if (trim := _find("malloc_trim")) is not None:
        trim(0)


def _mallopt(parameter: int, value: int) -> None:
    if (mallopt := _find("mallopt")) is not None:
        mallopt(parameter, value)


@cache
def _find(name: str) -> Any:
    """A function of the C library; None if it has none of that name."""
    libc = ctypes.util.find_library("c") if sys.platform.startswith("linux") else None  # it starts a process
    return None if libc is None else getattr(ctypes.CDLL(libc), name, None)
