"""Pieces of a few bytes, and a cache of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.model_folders import PIECE


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (
        "swarm_protocol.model_listing",
        "swarm_node.swarm.base_weights.files",
        "swarm_node.swarm.base_weights.fetching",
    ):
        monkeypatch.setattr(f"{module}.PIECE_BYTES", PIECE)


@pytest.fixture(autouse=True)
def cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where models from members are kept."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "hf"))
    return tmp_path / "hf" / "swarm-node"
