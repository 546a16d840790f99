"""Fixtures of tests that copy checkpoints."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def nothing_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_node.storage.mirror.MENTION_S", 600.0)


@pytest.fixture
def away(tmp_path: Path) -> Path:
    """The share."""
    folder = tmp_path / "away"
    folder.mkdir()
    return folder


@pytest.fixture
def answered() -> Iterator[threading.Event]:
    """A driver hangs until this is set; the end of the test sets it."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}/away" if request.param == "file" else f"memory://{tmp_path.name}/away"
