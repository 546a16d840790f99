"""Disks with little room, as runs and checkpoints see them."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest

STARTER_BYTES = 12 * 438_912
"""The starter's weights and the optimiser's two moments, four bytes each."""


def leave(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """Let every disk have so many bytes of room."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=2**40, used=2**40 - free, free=free))
