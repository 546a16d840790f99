"""A cache of the test's own, and a tiny model as a GGUF file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gguf_files import write_gguf


@pytest.fixture(autouse=True)
def cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where that is kept which was made of GGUF files."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "hf"))
    return tmp_path / "hf" / "swarm-node" / "models"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")
