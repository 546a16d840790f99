"""Heads of exchanges of weights: golden bytes, limits, versions, and no bytes that break the decoder."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from swarm_protocol.codec import SPOKEN
from swarm_protocol.errors import LocalProtocolError
from swarm_protocol.limits import MAX_HEAD_BYTES
from swarm_protocol.messages import PROTOCOL_VERSION
from swarm_protocol.tensors import (
    AverageHead,
    BlobHead,
    KeepHead,
    WeightsHead,
    decode_head,
    encode_head,
)
from tests.support.wire import IDENTITY, STRANGER, SWARM, fields, mutations, refused, values

FIRST = 1  # protocol of the golden bytes; later ones keep the form of these records
DATA = Path(__file__).parents[1] / "data"
REASONS = {"size", "version", "schema"}
COHORT = "00112233445566aa"


@dataclass(frozen=True, eq=False)
class Kind:
    """One kind of head."""

    head: Any
    golden: str

    def open(self, data: bytes) -> Any:
        return decode_head(data, type(self.head))


AVERAGE = Kind(
    AverageHead(
        protocol=FIRST,
        swarm=SWARM,
        cohort=COHORT,
        sender=IDENTITY.peer_id,
        receiver=STRANGER.peer_id,
        round=30_000_000,
        fragment=3,
        phase=1,
        group="0123456789abcdef",
        codec="lattice4",
        reach=1.25e-4,
        written_out=5,
        version=42,
        draining=True,
    ),
    "average_head_v1.msgpack",
)
WEIGHTS = Kind(WeightsHead(FIRST, SWARM, COHORT, version=42), "weights_head_v1.msgpack")
KEEP = Kind(KeepHead(FIRST, SWARM, COHORT, stage=3, updates=42), "keep_head_v1.msgpack")
BLOB = Kind(BlobHead(FIRST, SWARM, sha256=COHORT * 4), "blob_head_v1.msgpack")
each = pytest.mark.parametrize("kind", [AVERAGE, WEIGHTS, KEEP, BLOB], ids=["average", "weights", "keep", "blob"])


def sealed(kind: Kind, **changes: object) -> bytes:
    return msgspec.msgpack.encode({**fields(kind.head), **changes})


def reason(kind: Kind, data: bytes) -> str | None:
    return refused(lambda: kind.open(data), REASONS)


# --------------------------------------------------------------------- what is sealed can be opened


@each
def test_golden_bytes(kind: Kind) -> None:
    golden = (DATA / kind.golden).read_bytes()
    assert encode_head(kind.head) == golden
    assert kind.open(golden) == kind.head


@each
def test_a_later_version_may_add_fields(kind: Kind) -> None:
    assert kind.open(sealed(kind, later={"deep": [1, [2, [3]]]})) == kind.head


def test_fields_with_defaults_may_be_missing() -> None:
    needed = ("protocol", "swarm", "cohort", "sender", "receiver", "round", "fragment")
    head = decode_head(msgspec.msgpack.encode({name: fields(AVERAGE.head)[name] for name in needed}), AverageHead)
    assert (head.phase, head.group, head.codec, head.reach, head.version) == (0, "", "float32", 0.0, 0)
    assert not head.draining
    needed = ("protocol", "swarm", "cohort")
    assert (
        decode_head(msgspec.msgpack.encode({name: fields(WEIGHTS.head)[name] for name in needed}), WeightsHead).version
        == 0
    )


def test_weight_calls_are_no_averaging_calls() -> None:
    assert reason(AVERAGE, encode_head(WEIGHTS.head)) == "schema"


# --------------------------------------------------------------------- what is refused


@each
@pytest.mark.parametrize("version", [PROTOCOL_VERSION + 1, min(SPOKEN) - 1, -1, 2**63])
def test_versions_are_checked_before_schemas(kind: Kind, version: int) -> None:
    assert reason(kind, sealed(kind, protocol=version)) == "version"
    assert reason(kind, msgspec.msgpack.encode({"protocol": version, "everything": "else"})) == "version"


@each
def test_size_is_checked_before_anything_else(kind: Kind) -> None:
    assert reason(kind, bytes(MAX_HEAD_BYTES + 1)) == "size"
    assert reason(kind, bytes(MAX_HEAD_BYTES)) == "schema"
    longest = sealed(kind, later="x" * (MAX_HEAD_BYTES - len(sealed(kind, later="x" * 256)) + 256))
    assert len(longest) == MAX_HEAD_BYTES and kind.open(longest) == kind.head
    assert reason(kind, longest + b"\0") == "size"


def test_unacceptable_heads_are_not_sent() -> None:
    with pytest.raises(LocalProtocolError, match="cannot be sent"):
        encode_head(replace(AVERAGE.head, sender=""))


def test_the_longest_heads_fit() -> None:
    longest = replace(AVERAGE.head, sender="p" * 64, receiver="q" * 64, round=2**53 - 1, fragment=2**53 - 1)
    assert decode_head(encode_head(longest), AverageHead) == longest
    assert len(encode_head(longest)) < MAX_HEAD_BYTES / 8


BAD: dict[str, dict[str, Any]] = {
    "swarm": {"swarm": "5a" * 31},
    "cohort": {"cohort": "0" * 15},
    "cohort and a line break": {"cohort": COHORT + "\n"},
    "version of weights": {"version": -1},
    "huge version": {"version": 2**53},
    "version NaN": {"version": math.nan},
}
BAD_KEEPS: dict[str, dict[str, Any]] = {
    "swarm": {"swarm": "5a" * 31},
    "architecture": {"architecture": "0" * 15},
    "stage": {"stage": -1},
    "huge stage": {"stage": 2**20},
    "updates": {"updates": -1},
    "huge updates": {"updates": 2**53},
    "half an update": {"updates": 0.5},
}
BAD_AVERAGES: dict[str, dict[str, Any]] = {
    **BAD,
    "no sender": {"sender": ""},
    "long receiver": {"receiver": "p" * 65},
    "receiver and a line break": {"receiver": "p\n"},
    "terminal escape": {"sender": "\x1b[2J"},
    "round": {"round": -1},
    "huge round": {"round": 2**53},
    "half a round": {"round": 0.5},
    "fragment": {"fragment": -1},
    "phase": {"phase": 3},
    "group": {"group": "0"},
    "group and a line break": {"group": "0123456789abcdef\n"},
    "codec": {"codec": "float16"},
    "reach NaN": {"reach": math.nan},
    "reach": {"reach": math.inf},
    "reach below": {"reach": -math.inf},
    "reach negative": {"reach": -1e-9},
    "reach too far": {"reach": 1.1e30},
    "reach of text": {"reach": "1"},
}


BAD_BLOBS: dict[str, dict[str, Any]] = {
    "swarm": {"swarm": "5a" * 31},
    "sha256": {"sha256": "0" * 63},
    "sha256 and a line break": {"sha256": COHORT * 4 + "\n"},
    "sha256 of bytes": {"sha256": bytes(32)},
}
ALL_BAD = (AVERAGE, BAD_AVERAGES), (WEIGHTS, BAD), (KEEP, BAD_KEEPS), (BLOB, BAD_BLOBS)


@pytest.mark.parametrize(
    ("kind", "change"),
    [(kind, change) for kind, bad in ALL_BAD for change in bad.values()],
    ids=[f"{kind.golden.split('_')[0]}: {name}" for kind, bad in ALL_BAD for name in bad],
)
def test_fields_out_of_range_are_refused(kind: Kind, change: dict[str, Any]) -> None:
    assert kind.open(sealed(kind)) == kind.head
    assert reason(kind, sealed(kind, **change)) == "schema"


NASTY: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda good: b"",
    "lists in lists": lambda good: b"\x91" * MAX_HEAD_BYTES,
    "lists in lists in an unknown field": lambda good: (
        (head := bytes([good[0] + 1]) + good[1:] + b"\xa1x") + b"\x91" * (MAX_HEAD_BYTES - len(head))
    ),
    "claims four billion items": lambda good: b"\x81\xa8protocol\xdd\xff\xff\xff\xff",
    "claims four billion bytes": lambda good: b"\x81\xa5swarm\xc6\xff\xff\xff\xff",
    "text that is not utf-8": lambda good: good.replace(b"445566", b"4455\xff6"),
    "surrogate": lambda good: good.replace(b"445566", b"445\xed\xa0\x80"),
    "two values": lambda good: good + b"\xc0",
    "cut off": lambda good: good[:-1],
    "extension": lambda good: b"\xd4\x01\x00",
    "no map": lambda good: b"\x01",
}


@each
@pytest.mark.parametrize("nasty", NASTY.values(), ids=NASTY)
def test_nonsense_is_refused(kind: Kind, nasty: Callable[[bytes], bytes]) -> None:
    assert reason(kind, nasty(encode_head(kind.head))) == "schema"


# --------------------------------------------------------------------- no bytes break it


@each
@given(noise=st.binary(max_size=400))
def test_random_bytes(kind: Kind, noise: bytes) -> None:
    assert reason(kind, noise) is not None


@each
@given(data=st.data())
def test_mutated_heads_keep_limits_or_are_refused(kind: Kind, data: st.DataObject) -> None:
    mutated = data.draw(mutations(encode_head(kind.head)))
    if reason(kind, mutated) is None:
        opened = kind.open(mutated)
        assert kind.open(encode_head(opened)) == opened


@each
@given(data=st.data())
def test_any_value_in_any_field(kind: Kind, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(fields(kind.head))))
    changed = sealed(kind, **{name: data.draw(values())})
    if reason(kind, changed) is None:
        opened = kind.open(changed)
        assert kind.open(encode_head(opened)) == opened
        assert math.isfinite(getattr(opened, "reach", 0.0))
