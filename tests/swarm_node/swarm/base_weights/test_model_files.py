"""What is in a model's directory, what of it is listed, and what the cache keeps."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from swarm_node.errors import UserError
from swarm_node.swarm.base_weights import files
from swarm_node.swarm.base_weights.files import (
    as_model,
    cached_model,
    holds,
    known_listing,
    list_model,
    pieces_of,
    read_piece,
    remember,
    starter_folder,
)
from swarm_node.swarm.base_weights.finding import describe_model
from swarm_node.swarm.manifests import make_manifest, render
from swarm_protocol.manifest import ManifestModel, parse_manifest
from swarm_protocol.model_listing import digest_of, encode_listing
from tests.support.model_folders import PIECE, make_model


def test_a_listing_has_all_that_loading_reads(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    (folder / "modeling.py").write_text("print()")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    listing = list_model(folder)
    assert [file.name for file in listing.files] == ["config.json", "model.safetensors", "tokenizer.json"]
    assert listing.size == sum(file.size for file in listing.files)
    for file in listing.files:
        parts = [read_piece(folder, piece) or b"" for piece in pieces_of(listing) if piece.name == file.name]
        assert b"".join(parts) == (folder / file.name).read_bytes()
        assert all(len(part) == PIECE for part in parts[:-1])
    assert holds(folder, listing)


def test_equal_files_have_equal_digests_wherever_they_lie(tmp_path: Path) -> None:
    one, other = (list_model(make_model(tmp_path / name)) for name in "ab")
    assert encode_listing(one) == encode_listing(other)
    changed = make_model(tmp_path / "c", seed=1)
    assert encode_listing(list_model(changed)) != encode_listing(one)
    assert not holds(changed, one)


def test_a_directory_is_compared_byte_for_byte(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    listing = list_model(folder)
    digest, size = digest_of(encode_listing(listing)), listing.size
    assert as_model(folder, digest, size, None) == as_model(folder, digest, size, listing)
    assert as_model(folder, digest, size + 1, None) is None
    assert as_model(tmp_path / "none", digest, size, None) is as_model(tmp_path / "none", digest, size, listing) is None
    (folder / "vocab.json").write_text("{}")  # more than is listed: known by its listing alone
    assert as_model(folder, digest, size, None) is None
    assert as_model(folder, digest, size, listing) is not None
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[PIECE + 1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    assert as_model(folder, digest, size, listing) is None


@pytest.mark.parametrize("is_known", [False, True])
def test_an_unchanged_directory_is_not_read_again(
    tmp_path: Path, cached: Path, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MUCH_BYTES", 1000)
    folder, said = make_model(tmp_path / "m"), list[str]()
    listing = list_model(folder)
    digest, weights = digest_of(encode_listing(listing)), folder / "model.safetensors"

    def found() -> bool:
        model = as_model(folder, digest, listing.size, listing if is_known else None, said.append)
        assert model is None or model == files.Model(digest, folder, listing)
        return model is not None

    assert found() and len(said) == 1 and str(folder) in said[0]
    assert found() and len(said) == 1
    (memory,) = cached.glob("*.checked")
    for damage in (b"", b"{}", b"\xff", memory.read_bytes().replace(b'"size":', b'"size":1'), memory.read_bytes()[:-1]):
        memory.write_bytes(damage)
        said.clear()
        assert found() and len(said) == 1
    times, data = weights.stat(), bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    assert not found()
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert found()  # nobody has looked
    (tmp_path / "new").write_bytes(data)
    os.utime(tmp_path / "new", ns=(times.st_atime_ns, times.st_mtime_ns))
    (tmp_path / "new").replace(weights)
    assert not found()


def test_digests_that_cannot_be_kept_are_read_again(
    tmp_path: Path, cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MUCH_BYTES", 1000)
    folder, said = make_model(tmp_path / "m"), list[str]()
    listing = list_model(folder)
    cached.parent.mkdir(parents=True)
    cached.touch()  # in the way
    for times in (1, 2):
        assert as_model(folder, digest_of(encode_listing(listing)), listing.size, None, said.append) is not None
        assert len(said) == times


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_only_a_model_can_be_listed(tmp_path: Path, missing: str) -> None:
    folder = make_model(tmp_path / "m")
    (folder / missing).unlink()
    with pytest.raises(UserError, match=r"needs a config\.json and weights in safetensors"):
        list_model(folder)


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="LoRA adapter"):
        list_model(folder)


def test_cached_listings_are_believed_by_digest_only(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    listing = list_model(folder)
    digest = remember(listing, folder)
    assert known_listing(digest) == listing
    (path,) = files.cache().glob("*.json")
    path.write_bytes(path.read_bytes() + b" ")
    assert known_listing(digest) is None
    assert known_listing("0" * 64) is None
    assert cached_model(digest) is None


def test_a_model_is_described_for_a_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model(tmp_path / "my model")
    model = describe_model(str(folder))
    assert model == ManifestModel("my-model", digest_of(encode_listing(list_model(folder))), list_model(folder).size)
    monkeypatch.chdir(folder)
    assert describe_model(".") == model
    manifest = make_manifest("sums", ["small"], model=model)
    assert parse_manifest(render(manifest), manifest.swarm_id).model == model
    starter = describe_model("starter")
    assert (starter.name, starter.bytes) == ("starter", list_model(starter_folder()).size)


@pytest.mark.parametrize(("named", "message"), [("./none", "no model at"), ("some/model", "from the hub")])
def test_a_model_that_is_not_there_is_explained(named: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        describe_model(named)
