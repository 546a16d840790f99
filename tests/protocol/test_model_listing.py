"""Listings of models: golden bytes, what belongs to a model, limits, and no bytes that break the decoder."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.manifest import Manifest, ManifestModel, ManifestTask, parse_manifest
from swarm_protocol.model_listing import (
    MAX_FILES,
    MAX_LISTING_BYTES,
    MAX_MODEL_BYTES,
    MAX_OTHER_BYTES,
    PIECE_BYTES,
    ListedFile,
    ModelListing,
    decode_listing,
    digest_of,
    encode_listing,
    names_of,
)
from tests.support.wire import mutations, refused

REASONS = {"size", "digest", "schema"}
A, B = "ab" * 32, "0f" * 32
LISTING = ModelListing(
    [ListedFile("config.json", [A], 700), ListedFile("model.safetensors", [A, B], PIECE_BYTES + 1)],
)
GOLDEN = (
    f'{{"files":[{{"name":"config.json","pieces":["{A}"],"size":700}},'
    f'{{"name":"model.safetensors","pieces":["{A}","{B}"],"size":8388609}}]}}'
).encode()
DIGEST = "42e2ac40bdc848fdd3a619c2059587e60534ebda7957333c2c483d1f9e3d8913"


def opened(document: Any, digest: str | None = None) -> ModelListing:
    return decode_listing(json.dumps(document, separators=(",", ":"), sort_keys=True).encode(), digest)


def document() -> dict[str, Any]:
    made: dict[str, Any] = msgspec.to_builtins(LISTING)
    return made


# --------------------------------------------------------------------- one form, one digest


def test_golden_bytes() -> None:
    assert encode_listing(LISTING) == GOLDEN
    assert digest_of(GOLDEN) == DIGEST
    assert decode_listing(GOLDEN, DIGEST) == LISTING
    assert LISTING.size == PIECE_BYTES + 701
    assert LISTING.files[1].lengths() == [PIECE_BYTES, 1]


def test_another_listing_than_was_asked_for() -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode_listing(GOLDEN + b" ", digest_of(GOLDEN))
    assert caught.value.reason == "digest"


SPELT = {
    "blanks": GOLDEN.replace(b",", b", "),
    "a newline": GOLDEN + b"\n",
    "another order": GOLDEN.replace(
        b'"name":"config.json","pieces":["' + A.encode() + b'"],',
        b'"pieces":["' + A.encode() + b'"],"name":"config.json",',
    ),
    "an escape": GOLDEN.replace(b"config", b"\\u0063onfig"),
    "said twice": GOLDEN.replace(b'"size":700', b'"size":701,"size":700'),
}


@pytest.mark.parametrize("data", SPELT.values(), ids=SPELT)
def test_a_listing_has_one_form(data: bytes) -> None:
    assert data != GOLDEN and msgspec.json.decode(data, type=ModelListing) == LISTING
    with pytest.raises(RemoteProtocolError) as caught:
        decode_listing(data, digest_of(data))
    assert caught.value.reason == "schema"


def test_only_what_loading_reads_belongs_to_a_model() -> None:
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    others = ["README.md", "modeling_evil.py", "pytorch_model.bin", "optimizer.pt", "training_args.pkl", ".env", "a/b"]
    assert names_of(["tokenizer.json", "config.json", *others, *shards]) == ["config.json", *shards, "tokenizer.json"]
    assert names_of(["config.json", "model.safetensors", *shards]) == ["config.json", "model.safetensors"]
    for name in ("model-1-of-2.safetensors", "model-00001-of-00002.safetensors\n", "adapter_model.safetensors"):
        assert names_of([name]) == []


# --------------------------------------------------------------------- what is refused

FILE = {"name": "config.json", "pieces": [A], "size": 700}
WEIGHTS = {"name": "model.safetensors", "pieces": [A], "size": 9}
BAD: dict[str, Any] = {
    "nothing": {},
    "a list": [],
    "no files": {"files": []},
    "no weights": {"files": [FILE, {**FILE, "name": "tokenizer.json"}]},
    "no config": {"files": [WEIGHTS, {**FILE, "name": "tokenizer.json"}]},
    "not in order": {"files": [WEIGHTS, FILE]},
    "twice": {"files": [FILE, FILE, WEIGHTS]},
    "code": {"files": [FILE, WEIGHTS, {**FILE, "name": "modeling.py"}]},
    "a pickle": {"files": [FILE, WEIGHTS, {**FILE, "name": "pytorch_model.bin"}]},
    "a path": {"files": [{**FILE, "name": "../config.json"}, FILE, WEIGHTS]},
    "an absolute path": {"files": [{**FILE, "name": "/etc/passwd"}, FILE, WEIGHTS]},
    "shards beside the whole": {"files": [FILE, {**WEIGHTS, "name": "model-00001-of-00001.safetensors"}, WEIGHTS]},
    "no pieces": {"files": [FILE, {**WEIGHTS, "pieces": []}]},
    "a piece too many": {"files": [FILE, {**WEIGHTS, "pieces": [A, B]}]},
    "a piece too few": {"files": [FILE, {**WEIGHTS, "size": PIECE_BYTES + 1}]},
    "no digest": {"files": [FILE, {**WEIGHTS, "pieces": [A[:-1]]}]},
    "upper case": {"files": [FILE, {**WEIGHTS, "pieces": [A.upper()]}]},
    "empty": {"files": [FILE, {**WEIGHTS, "size": 0}]},
    "negative": {"files": [FILE, {**WEIGHTS, "size": -1}]},
    "half a byte": {"files": [FILE, {**WEIGHTS, "size": 0.5}]},
    "huge": {"files": [FILE, {**WEIGHTS, "size": MAX_MODEL_BYTES + 1}]},
    "unknown key": {"files": [FILE, WEIGHTS], "more": 1},
    "unknown key of a file": {"files": [FILE, {**WEIGHTS, "mode": 777}]},
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_bad_listings_are_refused(bad: Any) -> None:
    assert opened({"files": [FILE, WEIGHTS]})
    with pytest.raises(RemoteProtocolError) as caught:
        opened(bad)
    assert caught.value.reason == "schema"


def test_sizes_are_bounded() -> None:
    def file(name: str, size: int) -> ListedFile:
        return ListedFile(name, [A] * -(-size // PIECE_BYTES), size)

    def shards(size: int) -> list[ListedFile]:
        return [file(f"model-{i:05d}-of-00004.safetensors", size) for i in range(4)]

    config = ListedFile("config.json", [A], 1)
    largest = ModelListing([config, *shards(MAX_MODEL_BYTES // 4 - 1)])
    data = encode_listing(largest)
    assert decode_listing(data) == largest and len(data) < MAX_LISTING_BYTES
    for listing in (
        ModelListing([config, *shards(MAX_MODEL_BYTES // 4)]),
        ModelListing([config, LISTING.files[1], file("tokenizer.json", MAX_OTHER_BYTES + 1)]),
    ):
        with pytest.raises(RemoteProtocolError) as caught:
            decode_listing(encode_listing(listing))
        assert caught.value.reason == "size"
    with pytest.raises(RemoteProtocolError) as caught:
        decode_listing(bytes(MAX_LISTING_BYTES + 1))
    assert caught.value.reason == "size"
    many = [config, *(file(f"model-{i:05d}-of-{MAX_FILES:05d}.safetensors", 1) for i in range(MAX_FILES))]
    with pytest.raises(RemoteProtocolError):
        decode_listing(encode_listing(ModelListing(many)))
    assert decode_listing(encode_listing(ModelListing(many[:-1])))


@given(st.binary(max_size=200) | mutations(GOLDEN))
def test_any_bytes_are_a_listing_or_refused(data: bytes) -> None:
    if refused(lambda: decode_listing(data), REASONS) is None:
        listing = decode_listing(data)
        assert decode_listing(encode_listing(listing)) == listing


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=8), lambda kids: st.lists(kids)))
def test_any_document_is_a_listing_or_refused(inner: Any) -> None:
    for made in (inner, {"files": inner}, {"files": [inner, inner]}, {"files": [FILE, {**WEIGHTS, "pieces": inner}]}):
        refused(lambda made=made: opened(made), REASONS)


# --------------------------------------------------------------------- in a manifest

MODEL = ManifestModel("org/model-7b.v2", A, 123, "c" * 40)
PLAIN = Manifest(name="sums", tasks=[ManifestTask(env="gcd")])


def manifest(table: dict[str, Any]) -> bytes:
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in table.items())
    return f'name = "sums"\n[[tasks]]\nenv = "gcd"\n[model]\n{lines}\n'.encode()


def test_the_id_covers_the_model_s_digest() -> None:
    with_model = replace(PLAIN, model=MODEL)
    assert parse_manifest(manifest(msgspec.to_builtins(MODEL)), with_model.swarm_id).model == MODEL
    changed = [replace(with_model, model=replace(MODEL, **change)) for change in ({"digest": B}, {"bytes": 124})]
    assert len({PLAIN.swarm_id, with_model.swarm_id, *(one.swarm_id for one in changed)}) == 4


@pytest.mark.parametrize(
    "change",
    [
        {"name": "../model"},
        {"name": "/etc"},
        {"name": "~"},
        {"name": "a/b/c"},
        {"name": "a b"},
        {"name": ""},
        {"name": "a\n"},
        {"digest": A[:-1]},
        {"digest": ""},
        {"bytes": 0},
        {"bytes": MAX_MODEL_BYTES + 1},
        {"revision": "main"},
        {"url": "https://example.org"},
    ],
)
def test_a_manifest_can_say_little_about_its_model(change: dict[str, Any]) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        parse_manifest(manifest({**msgspec.to_builtins(MODEL), **change}))
    assert caught.value.reason == "schema"
