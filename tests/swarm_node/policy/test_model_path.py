"""Where a model is, and its size, without loading it."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm_node.errors import UserError
from swarm_node.policy.model_path import checked, parameters, starter_path
from tests.support.repository import ROOT

STARTER_PARAMETERS = 438_912


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("nothing", "there is no directory nothing, and a model of the hub is named OWNER/NAME"),
        ("./nothing", "no model at nothing"),
        ("~/nothing/at/all", "no model at"),
        ("a/b/c", "no model at a/b/c"),
        ("empty", "no model in empty: it has no config.json"),
        ("run", "it is a run: `swarm-node export` makes a model of it"),
    ],
)
def test_a_place_without_a_model_is_refused(
    named: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match=said):
        checked(named)


def test_directories_and_hub_ids_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert checked("Qwen/Qwen2.5-0.5B-Instruct") == "Qwen/Qwen2.5-0.5B-Instruct"
    assert checked(starter_path()) == starter_path()
    (tmp_path / "cache/models--gpt2").mkdir(parents=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    assert checked("gpt2") == "gpt2", "it was downloaded under this name"


def test_headers_tell_the_size(tmp_path: Path) -> None:
    assert parameters(starter_path()) == STARTER_PARAMETERS
    assert parameters(str(tmp_path)) is None
    assert parameters(str(ROOT / "nowhere")) is None


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 16, b"\x02\0\0\0\0\0\0\0[]", b"\x0f\0\0\0\0\0\0\0" + b'{"a": {"b": 1}}'[:15] + b"}"],
)
def test_a_damaged_header_tells_nothing(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert parameters(str(tmp_path)) is None
