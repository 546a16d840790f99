"""Which file a path means."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from swarm_node.errors import UserError
from swarm_node.policy.gguf_files.naming import gguf_at
from swarm_node.policy.model_path import check_hub, checked, local_folder, parameters, starter_path
from tests.support.gguf_files import tensors


def test_a_file_and_a_directory_with_one_file_are_taken(tiny: Path) -> None:
    assert gguf_at(str(tiny)) == tiny
    assert gguf_at(str(tiny.parent)) == tiny
    assert checked(str(tiny.parent)) == str(tiny)
    assert parameters(str(tiny)) == sum(each.size for each in tensors().values())
    assert local_folder(str(tiny)) is None, "it was not dequantised yet"
    check_hub(str(tiny))


def test_a_config_beside_it_changes_nothing(tiny: Path) -> None:
    (tiny.parent / "config.json").write_text("{}")
    (tiny.parent / "mmproj-model-f16.gguf").write_bytes(b"GGUF")
    assert gguf_at(str(tiny.parent)) == tiny


def test_safetensors_beside_it_are_taken_instead(tiny: Path) -> None:
    shutil.copytree(starter_path(), tiny.parent, dirs_exist_ok=True)
    assert gguf_at(str(tiny.parent)) is None
    assert checked(str(tiny.parent)) == str(tiny.parent)


def test_of_several_files_one_must_be_named(tiny: Path) -> None:
    shutil.copy(tiny, tiny.with_name("other.gguf"))
    with pytest.raises(
        UserError, match=r"several GGUF files: name the one to train, as .*other.gguf \(other.gguf, tiny"
    ):
        checked(str(tiny.parent))
    assert checked(str(tiny)) == str(tiny)


@pytest.mark.parametrize("named", ["model-00001-of-00003.gguf", ""])
def test_a_part_is_refused(named: str, tmp_path: Path) -> None:
    for part in (1, 2, 3):
        (tmp_path / f"model-0000{part}-of-00003.gguf").touch()
    with pytest.raises(UserError, match="model-00001-of-00003.gguf is one of 3 parts of a model: join them first"):
        checked(str(tmp_path / named))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no file .*no\.gguf"):
        checked(str(tmp_path / "no.gguf"))


def test_a_directory_without_a_model(tmp_path: Path) -> None:
    assert gguf_at(str(tmp_path)) is None
    assert gguf_at("Qwen/Qwen2.5-0.5B-Instruct") is None
