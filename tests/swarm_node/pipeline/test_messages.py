"""Messages as bytes: exact where they must be, and refused where they make no sense."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from torch import Tensor

from swarm_node.pipeline import messages
from swarm_node.pipeline.compute import tied_weights
from swarm_node.pipeline.compute.tensor_codec import rounded
from swarm_node.pipeline.messages import LEADER, Limits, StageMessage, encode_message
from swarm_protocol.errors import LocalProtocolError, RemoteProtocolError
from swarm_protocol.limits import MAX_MESSAGE_BYTES
from swarm_protocol.pipeline import (
    ActivationCodec,
    Apply,
    Backward,
    Forward,
    GradientNorm,
    GradientNormRequest,
    Head,
    Logprobs,
    LossGradient,
    Prefill,
    Reset,
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
from tests.support.wire import mutations

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

H, V, STAGES, PLAN = 8, 20, 4, 3
LIMITS = Limits(
    plan=PLAN,
    stages=STAGES,
    here=frozenset({2, 3, LEADER}),
    sender=frozenset(range(STAGES)),
    width=H,
    vocabulary=V,
    tokens=64,
    rows=12,
    prompt=10,
    length=6,
)
REASONS = {"size", "schema", "version", "plan", "stage", "sender", "place", "shape", "nonfinite", "values"}


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def whole(below: int, *shape: int) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(sum(shape)))


N = 7
FORWARD = StageMessage(
    2,
    Forward(4, 1, 0, 3, 2, 0.9, packed=True),
    (
        rand(2, 9, H),
        whole(2, N),
        whole(9, N),
        whole(V, N),
        whole(9, 2, 9),
        whole(2, 2, 1, 9, 9).bool(),
    ),
)
MESSAGES = [
    FORWARD,
    StageMessage(2, Forward(4, 0, 0, 3, 2, 1.0), FORWARD.tensors[:4]),
    StageMessage(2, Backward(4, 0, 2), (rand(2, 9, H),)),
    StageMessage(LEADER, Logprobs(4, 0, True), (-rand(N).abs(), rand(N))),
    StageMessage(3, LossGradient(4, 0), (rand(N),)),
    StageMessage(3, TiedGradient(1), (rand(V, H),)),
    StageMessage(3, TiedMatrix(), (rand(V, H),)),
    StageMessage(2, Prefill(5, 0, 3, 6, 1.0, 0.9), (rand(2, 4, H), torch.tensor([4, 1]), torch.rand(6))),
    StageMessage(2, Step(5, 0, 2, True), (rand(2, H), torch.rand(2), torch.tensor([1]), torch.tensor([[0, 2]]))),
    StageMessage(2, Step(5, 0, 2), (rand(6, H), torch.rand(6))),
    StageMessage(LEADER, Tokens(5, 0, 3), (whole(V, 6), -rand(6).abs())),
    StageMessage(2, GradientNormRequest(1)),
    StageMessage(LEADER, GradientNorm(1, 3, None)),
    StageMessage(2, Apply(1, 1.0, 1e-3)),
    StageMessage(3, StatusRequest()),
    StageMessage(3, Share(True)),
    StageMessage(3, Share(True, 1)),
    StageMessage(LEADER, StageStatus(1, 1, 0.5, True)),
    StageMessage(3, Reset(5)),
    StageMessage(LEADER, TurnFailed(5, 1, "memory")),
]
CODECS: list[ActivationCodec] = ["float32", "bfloat16", "int8"]


def judge(head: bytes, size: int, limits: Limits) -> None:
    messages.check_message(decode_envelope(head), size, limits)


def decode(head: bytes, body: bytearray, limits: Limits) -> StageMessage:
    return messages.decode_message(decode_envelope(head), body, limits)


def sent(message: StageMessage, codec: ActivationCodec = "float32", plan: int = PLAN) -> tuple[bytes, bytearray]:
    head, pieces = encode_message(message, codec, plan)
    body = bytearray(b"".join(pieces))
    assert len(body) == messages.encoded_size(message, codec)
    return head, body


def reason(head: bytes, body: bytes | bytearray, limits: Limits = LIMITS) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        decode(head, bytearray(body), limits)
    assert caught.value.reason in REASONS
    return caught.value.reason


@pytest.mark.parametrize(("value", "taken"), [(1e-4, True), (0.1, False), (300.0, False)])
def test_log_probabilities_are_at_most_0(value: float, taken: bool) -> None:
    """Rounding aside; a ratio of probabilities of e^300 is infinite."""
    logprobs = torch.tensor([-1.0, value, -2.0])
    for head, others in ((Logprobs(4, 0), ()), (Tokens(5, 0, 3), (whole(V, 3),))):
        message = StageMessage(LEADER, head, (*others, logprobs))
        if taken:
            assert torch.equal(decode(*sent(message), LIMITS).tensors[-1], logprobs)
        else:
            assert reason(*sent(message)) == "values"


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m.head).__name__)
def test_a_message_arrives(message: StageMessage, codec: ActivationCodec) -> None:
    head, body = sent(message, codec)
    judge(head, len(body), LIMITS)
    arrived = decode(head, body, LIMITS)
    assert (arrived.stage, arrived.head) == (message.stage, message.head)
    coded = isinstance(message.head, Forward | Backward | TiedGradient | Prefill | Step)
    for i, (a, b) in enumerate(zip(arrived.tensors, message.tensors, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype
        if coded and i == 0 and codec != "float32":
            error = (a - b).norm() / b.norm()
            assert 0 < error < (0.004 if codec == "bfloat16" else 0.01)
            assert torch.equal(a, rounded(b, codec))
            again = decode(*sent(replace(message, tensors=(a, *message.tensors[1:])), codec), LIMITS)
            assert torch.equal(again.tensors[0], a)
        else:
            assert torch.equal(a, b)


@pytest.mark.parametrize("codec", CODECS)
def test_zeros_and_tiny_and_large_numbers(codec: ActivationCodec) -> None:
    x = torch.zeros(1, 16, H)
    x[0, 8:] = 1e-35
    x[0, 12:] = 1e20
    arrived = decode(*sent(StageMessage(2, Backward(4, 0, 2), (x,)), codec), LIMITS).tensors[0]
    torch.testing.assert_close(arrived, x, rtol=0.02, atol=1e-30)
    assert not rounded(x[:, :4], codec).any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e31])
def test_non_finite_numbers_are_neither_sent_nor_taken(value: float) -> None:
    x = rand(2, 9, H)
    x[1, 3, 4] = value
    with pytest.raises(LocalProtocolError, match="not finite"):
        encode_message(StageMessage(2, Backward(4, 0, 2), (x,)), "float32", PLAN)
    head, _ = sent(StageMessage(2, Backward(4, 0, 2), (rand(2, 9, H),)))
    assert reason(head, x.numpy().tobytes()) == "nonfinite"


def test_scales_that_are_not_finite_are_not_taken() -> None:
    head, body = sent(StageMessage(2, Backward(4, 0, 2), (rand(2, 9, H),)), "int8")
    body[:2] = b"\xff\x7f"
    assert reason(head, body) == "nonfinite"


def put(message: StageMessage, i: int, tensor: Tensor, **changes: object) -> StageMessage:
    tensors = [*message.tensors]
    tensors[i] = tensor
    return StageMessage(message.stage, structs.replace(message.head, **changes), tuple(tensors))


PREFILL = next(m for m in MESSAGES if isinstance(m.head, Prefill))
STEP = next(m for m in MESSAGES if isinstance(m.head, Step) and m.head.picked)
BAD: dict[str, tuple[StageMessage, str]] = {
    "another width": (put(FORWARD, 0, rand(2, 9, H + 1)), "shape"),
    "too many tokens": (put(MESSAGES[2], 0, rand(5, 13, H)), "shape"),
    "rows that differ": (put(FORWARD, 4, whole(9, 3, 9)), "shape"),
    "lengths that differ": (put(FORWARD, 2, whole(9, N + 1)), "shape"),
    "too many targets": (put(MESSAGES[4], 0, rand(64 * 64 + 1)), "shape"),
    "row beyond": (put(FORWARD, 1, torch.full((N,), 2)), "values"),
    "column before": (put(FORWARD, 2, torch.full((N,), -1)), "values"),
    "token beyond": (put(FORWARD, 3, torch.full((N,), V)), "values"),
    "position beyond": (put(FORWARD, 4, torch.full((2, 9), 9)), "values"),
    "sampled token beyond": (put(MESSAGES[10], 0, torch.full((6,), V)), "values"),
    "another vocabulary": (put(MESSAGES[5], 0, rand(V + 1, H)), "shape"),
    "place of another stage": (put(FORWARD, 0, FORWARD.tensors[0], place=1), "place"),
    "place beyond": (put(FORWARD, 0, FORWARD.tensors[0], place=9), "place"),
    "empty prompt": (put(PREFILL, 1, torch.tensor([4, 0])), "values"),
    "prompt longer than its row": (put(PREFILL, 1, torch.tensor([4, 5])), "values"),
    "uniform 1": (put(PREFILL, 2, torch.ones(6)), "values"),
    "other number of samples": (put(PREFILL, 2, torch.rand(6), n=4), "shape"),
    "samples too long": (put(PREFILL, 2, torch.rand(6), limit=7), "shape"),
    "prompts too long": (put(PREFILL, 0, rand(2, 11, H)), "shape"),
    "too many rows": (put(put(PREFILL, 2, torch.rand(20), n=10), 0, rand(2, 4, H)), "shape"),
    "token too late": (put(STEP, 0, STEP.tensors[0], step=6), "shape"),
    "grid that does not fit": (put(STEP, 3, torch.tensor([[0, 1, 2]])), "shape"),
    "stage elsewhere": (replace(MESSAGES[2], stage=1), "stage"),
    "question for the lead": (StageMessage(LEADER, StatusRequest()), "stage"),
    "answer for a stage": (StageMessage(2, StageStatus(1, 1, 0.5)), "stage"),
    "a block too many": (put(MESSAGES[5], 0, rand(V, H), block=1), "shape"),
    "part of a block": (put(MESSAGES[6], 0, rand(V - 1, H)), "shape"),
    "shared by the middle": (StageMessage(2, Share()), "stage"),
    "tied in the middle": (replace(MESSAGES[5], stage=2), "stage"),
    "loss in the middle": (replace(MESSAGES[4], stage=2), "stage"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_message_that_does_not_fit_is_refused(name: str) -> None:
    message, expected = BAD[name]
    head, body = sent(message)
    assert reason(head, body) == expected
    if expected != "values":  # before the body is read
        with pytest.raises(RemoteProtocolError):
            judge(head, len(body), LIMITS)


@pytest.mark.parametrize(
    ("message", "must"),
    [
        (FORWARD, 1),
        (MESSAGES[3], 3),
        (MESSAGES[4], 0),
        (MESSAGES[5], 0),
        (PREFILL, 1),
        (MESSAGES[10], 3),
        (StageMessage(3, Share(block=1)), 0),
        (StageMessage(3, Share()), 0),
        (StageMessage(2, GradientNormRequest(1)), 0),
        (StageMessage(2, Apply(1, 1.0, 1e-3)), 0),
        (StageMessage(LEADER, StageStatus(1, 1, 0.5)), 1),
        (StageMessage(LEADER, GradientNorm(1, 2, 0.5)), 2),
    ],
    ids=lambda x: type(x.head).__name__ if isinstance(x, StageMessage) else "",
)
def test_messages_come_from_whom_they_must_come_from(message: StageMessage, must: int) -> None:
    head, body = sent(message)
    decode(head, body, replace(LIMITS, sender=frozenset({must})))
    assert reason(head, body, replace(LIMITS, sender=frozenset(range(STAGES)) - {must})) == "sender"


def test_the_last_stage_asks_for_all_later_blocks() -> None:
    for block, must in ((0, 0), (1, 3)):
        head, body = sent(StageMessage(0, Share(block=block)))
        limits = replace(LIMITS, here=frozenset({0}))
        judge(head, len(body), replace(limits, sender=frozenset({must})))
        assert reason(head, body, replace(limits, sender=frozenset({3 - must}))) == "sender"


@pytest.mark.parametrize(("height", "width"), [(151_936, 896), (V, H), (256_000, 16_384), (64, 2**20)])
def test_blocks_cover_a_matrix_within_their_limit(height: int, width: int) -> None:
    bounds, block = [0], 0
    while (rows := tied_weights.rows_of(block, height, width)).stop > rows.start:
        assert rows.start == bounds[-1] and 4 * width * (rows.stop - rows.start) <= MAX_MESSAGE_BYTES
        bounds.append(rows.stop)
        block += 1
    assert bounds[-1] == height == tied_weights.rows_of(2**62, height, width).start
    assert (height, block) in {(151_936, 33), (V, 1), (256_000, 1000), (64, 1)}


@pytest.mark.parametrize("codec", CODECS)
def test_blocks_are_written_as_in_the_whole_matrix(codec: ActivationCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tied_weights, "BLOCK_BYTES", 1)
    matrix, limits = rand(150, H), replace(LIMITS, vocabulary=150)
    found = []
    for block, height in enumerate((64, 64, 22)):
        rows = tied_weights.rows_of(block, 150, H)
        head, body = sent(StageMessage(3, TiedGradient(1, block), (matrix[rows],)), codec)
        judge(head, len(body), limits)
        found.append(decode(head, body, limits).tensors[0])
        assert len(found[-1]) == height
        other = StageMessage(3, TiedGradient(1, 1 if block == 2 else 2), (matrix[rows],))
        assert reason(*sent(other), limits) == "shape"
    assert torch.equal(torch.cat(found), rounded(matrix, codec))


def test_another_plan_and_another_size() -> None:
    assert reason(*sent(FORWARD, plan=PLAN - 1)) == "plan"
    head, body = sent(FORWARD)
    assert reason(head, body[:-1]) == "size" == reason(head, body + b"\0")


def test_too_few_and_too_many_parts() -> None:
    head, body = sent(MESSAGES[1])
    envelope = decode_envelope(head)
    for parts in (envelope.parts[:-1], (*envelope.parts, envelope.parts[-1])):
        changed = encode_envelope(structs.replace(envelope, parts=parts))
        assert reason(changed, bytes(sum(part.size for part in parts))) == "shape"


@given(data=st.data())
def test_mutated_messages_decode_or_are_refused(data: st.DataObject) -> None:
    message = data.draw(st.sampled_from(MESSAGES))
    codec: ActivationCodec = data.draw(st.sampled_from(CODECS))
    head, body = sent(message, codec)
    if data.draw(st.booleans()):
        head = data.draw(mutations(head))
    else:
        body = bytearray(data.draw(mutations(bytes(body)))) if body else body
    try:
        arrived = decode(head, body, LIMITS)
    except RemoteProtocolError as error:
        assert error.reason in REASONS
        return
    again: Head = decode(*sent(arrived, codec), LIMITS).head
    assert again == arrived.head and all(t.isfinite().all() for t in arrived.tensors)


@given(head=st.binary(max_size=200), body=st.binary(max_size=200))
def test_random_bytes(head: bytes, body: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(head, bytearray(body), LIMITS)
