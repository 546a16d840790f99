"""Heads of messages between stages: golden bytes, limits, versions, and no bytes that break the decoder."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from swarm_protocol.codec import SPOKEN
from swarm_protocol.errors import LocalProtocolError
from swarm_protocol.limits import MAX_HEAD_BYTES
from swarm_protocol.messages import PROTOCOL_VERSION
from swarm_protocol.pipeline import (
    MAX_STAGES,
    Apply,
    Backward,
    Envelope,
    Forward,
    GradientNorm,
    GradientNormRequest,
    Head,
    Logprobs,
    LossGradient,
    Part,
    Prefill,
    Reset,
    SetUpdates,
    Share,
    StageStatus,
    StatusRequest,
    Step,
    TiedGradient,
    TiedMatrix,
    Tokens,
    TurnFailed,
    decode_envelope,
    encode_envelope,
)
from tests.support.wire import fields, mutations, refused, values

FIRST = 1  # protocol of the golden bytes; later ones keep the form of these records
GOLDEN = Path(__file__).parents[1] / "data" / "stage_envelope_v1.msgpack"
GOLDEN_CAME = GOLDEN.with_name("stage_envelope_v2_came.msgpack")
REASONS = {"size", "version", "schema"}
FORWARD = Forward(7, 3, 1, 4, 2, 0.9, entropy=True, reference=False, swapped=True, packed=True)
ENVELOPE = Envelope(
    FIRST,
    plan=5,
    stage=2,
    head=FORWARD,
    parts=(
        Part("bfloat16", (2, 9, 32)),
        *(Part("int32", (11,)),) * 3,
        Part("int32", (2, 9)),
        Part("bits", (2, 1, 9, 9)),
    ),
)
HEADS: list[Head] = [
    FORWARD,
    Backward(7, 1, 2),
    Logprobs(7, 1, True),
    LossGradient(7, 1),
    GradientNormRequest(3),
    TiedGradient(3),
    GradientNorm(3, 1, 0.25),
    GradientNorm(3, 1, None),
    GradientNorm(3, 1, 0.25, ((2, 0.5), (0, None))),
    Apply(8, 0.5, 1e-3),
    SetUpdates(8),
    Share(),
    TiedMatrix(),
    StatusRequest(),
    StageStatus(1, 8, 0.5),
    Prefill(9, 0, 8, 256, 1.0, 0.95),
    Step(9, 0, 17, True),
    Tokens(9, 0, 18),
    Reset(9),
    TurnFailed(9, 1, "memory"),
]


def reason(data: bytes) -> str | None:
    return refused(lambda: decode_envelope(data), REASONS)


def changed(**changes: object) -> bytes:
    return msgspec.msgpack.encode({**fields(ENVELOPE), **changes})


def with_head(**changes: object) -> bytes:
    return changed(head={**fields(ENVELOPE)["head"], **changes})  # type: ignore[dict-item]


def test_golden_bytes() -> None:
    assert encode_envelope(ENVELOPE) == GOLDEN.read_bytes()
    assert decode_envelope(GOLDEN.read_bytes()) == ENVELOPE


def test_golden_bytes_of_what_a_stage_was_sent() -> None:
    """Protocol 2 added them."""
    envelope = Envelope(2, 5, -1, GradientNorm(3, 1, 0.25, ((2, 0.5), (0, None))))
    assert encode_envelope(envelope) == GOLDEN_CAME.read_bytes()
    assert decode_envelope(GOLDEN_CAME.read_bytes()) == envelope
    before = {"type": "squared", "total": 3, "stage": 1, "squares": 0.25}
    assert fields(replace(envelope, head=GradientNorm(3, 1, 0.25)))["head"] == before, "as in protocol 1"


@pytest.mark.parametrize("head", HEADS, ids=str)
def test_every_head_arrives_as_it_was(head: Head) -> None:
    envelope = replace(ENVELOPE, head=head, stage=-1)
    assert decode_envelope(encode_envelope(envelope)) == envelope
    assert len(encode_envelope(envelope)) < MAX_HEAD_BYTES / 8


def test_a_later_version_may_add_fields() -> None:
    assert decode_envelope(changed(later=[1])) == ENVELOPE == decode_envelope(with_head(later=[1]))


@pytest.mark.parametrize(
    ("coding", "shape", "size"),
    [
        ("float32", (3, 5), 60),
        ("bfloat16", (3, 5), 32),  # filled up to a multiple of 4
        ("int8", (64,), 68),
        ("int8", (65,), 132),
        ("int32", (3,), 12),
        ("bits", (3, 5), 4),
        ("bits", (33,), 8),
    ],
)
def test_sizes_of_parts(coding: str, shape: tuple[int, ...], size: int) -> None:
    assert Part(coding, shape).size == size  # type: ignore[arg-type]


@pytest.mark.parametrize("version", [PROTOCOL_VERSION + 1, min(SPOKEN) - 1, -1, 2**63])
def test_versions_are_checked_before_schemas(version: int) -> None:
    assert reason(msgspec.msgpack.encode({"protocol": version, "everything": "else"})) == "version"


def test_size_is_checked_before_anything_else() -> None:
    assert reason(bytes(MAX_HEAD_BYTES + 1)) == "size"
    assert reason(bytes(MAX_HEAD_BYTES)) == "schema"


@pytest.mark.parametrize(
    "bad",
    [
        changed(stage=-2),
        changed(stage=MAX_STAGES),
        changed(head={"type": "shutdown"}),
        changed(parts=[["float64", [1]]]),
        changed(parts=[["float32", [0]]]),
        changed(parts=[["float32", [1] * 5]]),
        changed(parts=[["float32", [2**31]]]),
        changed(parts=[["float32", [1]]] * 7),
        with_head(temperature=0.0),
        with_head(temperature=float("nan")),
        with_head(microbatches=0),
        with_head(microbatch=-1),
        with_head(microbatches=2**20),
        with_head(turn=2**60),
        changed(head={"type": "squared", "total": 3, "stage": 1, "squares": None, "came": [[1, -1.0]]}),
        changed(head={"type": "squared", "total": 3, "stage": 1, "squares": None, "came": [[MAX_STAGES, 1.0]]}),
        changed(head={"type": "squared", "total": 3, "stage": 1, "squares": None, "came": [[1, 1.0]] * 9}),
    ],
)
def test_refused_messages(bad: bytes) -> None:
    assert reason(bad) == "schema"


@pytest.mark.parametrize(
    "head",
    [
        GradientNorm(1, 0, float("nan")),
        GradientNorm(1, 0, -1.0),
        StageStatus(0, 1, float("inf")),
        Apply(1, 2.0, 1e-3),
        Apply(1, 1.0, float("nan")),
        Prefill(1, 0, 2, 0, 1.0, 1.0),
        Prefill(1, 0, 2, 9, 1.0, 0.0),
        Step(1, 0, -1),
    ],
    ids=str,
)
def test_unacceptable_heads_are_not_sent(head: Head) -> None:
    with pytest.raises(LocalProtocolError, match="cannot be sent"):
        encode_envelope(replace(ENVELOPE, head=head))


@given(noise=st.binary(max_size=300))
def test_random_bytes(noise: bytes) -> None:
    assert reason(noise) is not None


@given(data=st.data())
def test_mutated_heads_keep_limits_or_are_refused(data: st.DataObject) -> None:
    head = data.draw(st.sampled_from(HEADS))
    mutated = data.draw(mutations(encode_envelope(replace(ENVELOPE, head=head))))
    if reason(mutated) is None:
        opened = decode_envelope(mutated)
        assert decode_envelope(encode_envelope(opened)) == opened


@given(data=st.data())
def test_any_value_in_any_field(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(fields(ENVELOPE))))
    some = changed(**{name: data.draw(values())})
    if reason(some) is None:
        opened = decode_envelope(some)
        assert decode_envelope(encode_envelope(opened)) == opened
