"""Directories that look like models."""

from __future__ import annotations

import random
from pathlib import Path

PIECE = 1000


def make_model(folder: Path, seed: int = 0, size: int = 10_500) -> Path:
    """Nothing in it can be loaded: files are bytes here."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_bytes(rng.randbytes(1200))
    (folder / "model.safetensors").write_bytes(rng.randbytes(size))
    return folder
