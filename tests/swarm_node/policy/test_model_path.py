"""Where a model is, and its size, without loading it."""

from __future__ import annotations

import socket
from contextlib import closing
from pathlib import Path

import pytest
from huggingface_hub import constants

from swarm_node.errors import UserError
from swarm_node.policy.model_path import check_hub, checked, parameters, starter_path
from tests.support.repository import ROOT

STARTER_PARAMETERS = 438_912


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("smolm2", r"there is no directory smolm2 \(did you mean smollm2\?\), and a model of the hub"),
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


def test_a_hub_out_of_reach_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
    with pytest.raises(UserError, match="the hub cannot be reached; give a directory"):
        check_hub("some/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"cannot be reached \(HF_HUB_OFFLINE is set\)"):
        check_hub("some/model")
    check_hub(starter_path())
