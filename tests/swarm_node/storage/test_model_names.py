"""What models are called that lie in a cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from swarm_node.storage.model_names import keep_name, model_name

DIGEST = "b179c952" + "0" * 56


@pytest.mark.parametrize("model", ["starter", "smollm2", "Qwen/Qwen2.5-0.5B", "models/mine", "./a.gguf", f"{DIGEST}0"])
def test_what_a_user_names_is_called_so(model: str) -> None:
    assert model_name(model) == model


def test_a_model_from_members_is_called_as_its_swarm_does() -> None:
    folder = Path("cache", DIGEST)
    folder.mkdir(parents=True)
    assert model_name(str(folder)) == "model b179c952…", "fetched by an earlier version"
    keep_name(folder, "smollm2")
    assert model_name(str(folder)) == "smollm2" == model_name(f"{folder}/")
    keep_name(folder, "Qwen/Qwen2.5-0.5B")
    assert model_name(str(folder)) == "Qwen/Qwen2.5-0.5B"
    keep_name(Path("cache/mine"), "mine")
    assert not Path("cache/mine.name").exists()


@pytest.mark.parametrize("content", [b"", b"a\x1b[2J", b"\xff", b"x" * 200, b"two words"])
def test_a_name_that_is_none_is_not_shown(content: bytes) -> None:
    Path(f"{DIGEST}.name").write_bytes(content)
    assert model_name(DIGEST) == "model b179c952…"


def test_a_pipe_in_place_of_the_name_keeps_nobody_waiting() -> None:
    os.mkfifo(f"{DIGEST}.name")
    assert model_name(DIGEST) == "model b179c952…"


def test_a_model_of_the_hub_is_called_by_its_id() -> None:
    place = "/root/.cache/huggingface/hub/models--Qwen--Qwen2.5-0.5B/snapshots/" + "a" * 40
    assert model_name(place) == "Qwen/Qwen2.5-0.5B"
