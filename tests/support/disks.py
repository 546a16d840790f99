"""Disks with little room."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

STARTER_BYTES = 12 * 438_912
"""The starter's weights and the optimiser's two moments, four bytes each."""


def leave(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """Let every disk have so many bytes of room."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=2**40, used=2**40 - free, free=free))


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """A disk that is full beyond `size` bytes a file, as far as this process can tell: writes really fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
