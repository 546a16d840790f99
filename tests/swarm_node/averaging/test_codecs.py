"""Codecs: error bounds, sizes, and bytes that a peer made up."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm_node.averaging.codecs import BLOCK, LARGEST, PIECE, BodyDecoder, coded_bytes, lost, pieces
from swarm_protocol.errors import LocalProtocolError, RemoteProtocolError
from swarm_protocol.limits import MAX_CHUNK_BYTES
from tests.support.random_vectors import normal

CODECS = ["float32", "int8", "e3m0"]
codecs = pytest.mark.parametrize("codec", CODECS)


def body(codec, flat: Tensor) -> bytes:
    return b"".join(pieces(codec, flat))


def decode(codec, values: int, data: bytes) -> Tensor:
    decoder = BodyDecoder(codec, values)
    for i in range(0, len(data), MAX_CHUNK_BYTES):
        decoder.write(memoryview(data)[i : i + MAX_CHUNK_BYTES])
    return decoder.values()


def through(codec, flat: Tensor) -> Tensor:
    return decode(codec, len(flat), body(codec, flat))


@codecs
@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 70])
def test_sizes(codec, n):
    flat = normal(n)
    lengths = [len(piece) for piece in pieces(codec, flat)]
    assert sum(lengths) == coded_bytes(codec, n)
    assert max(lengths, default=0) <= MAX_CHUNK_BYTES
    assert through(codec, flat).shape == (n,)


def test_bits_a_value():
    assert [coded_bytes(codec, 6400) * 8 / 6400 for codec in CODECS] == [32, 8.25, 4.25]
    assert [coded_bytes(codec, 65) for codec in CODECS] == [512, 132, 68]


@pytest.mark.parametrize("n", [1, 100, PIECE + 100])
def test_float32_is_exact(n):
    flat = normal(n) * 10.0 ** torch.randint(-40, 29, (n,), generator=torch.Generator().manual_seed(1))
    assert torch.equal(through("float32", flat), flat)
    assert not lost("float32", flat).any()


def test_int8_error():
    """At most half a step, of max / 127, and the largest value what s is off by: 1/512, a quarter of a step. Relative
    RMS 0.0060 for normally distributed values."""
    flat = normal(PIECE + 640)
    error = through("int8", flat) - flat
    largest = flat.view(-1, BLOCK).abs().amax(1, keepdim=True)
    assert ((error.view(-1, BLOCK) / largest).abs() <= (0.5 + 0.25) / 127).all()
    assert error.norm() / flat.norm() == pytest.approx(0.0060, abs=1e-4)


def test_e3m0_error():
    """Relative RMS 0.188 and gain E[x x'] / E[x^2] 0.973 for normally distributed values."""
    flat = normal(PIECE + 640)
    received = through("e3m0", flat)
    assert (received - flat).norm() / flat.norm() == pytest.approx(0.188, abs=1e-3)
    assert (received @ flat / (flat @ flat)).item() == pytest.approx(0.973, abs=2e-3)


def test_e3m0_is_nearest():
    magnitudes = torch.tensor([0.0] + [2.0**-k for k in range(7)])
    flat = normal(64 * 500).clamp(-3.9, 3.9)
    flat[::BLOCK] = 4.0  # s is exact, and the largest by far
    flat[1:130:2] *= 0.01
    ratio = flat.view(-1, BLOCK) / 4
    nearest = magnitudes[(ratio.abs()[..., None] - magnitudes).abs().argmin(-1)] * ratio.sign() * 4
    assert torch.equal(through("e3m0", flat).view(-1, BLOCK), nearest)


def test_e3m0_between_two_values():
    s = 1.0
    ties = [0.75, 0.375, 1.5 * 2**-6, 2.0**-7]
    below = [t * 0.999 for t in ties]
    received = through("e3m0", torch.tensor([s, *ties, *below, *(-t for t in ties)]))
    assert received.tolist() == [s, 1, 0.5, 2**-5, 2**-6, 0.5, 0.25, 2**-6, 0, -1, -0.5, -(2**-5), -(2**-6)]


@pytest.mark.parametrize(("codec", "bound"), [("int8", 0.006), ("e3m0", 0.26)])
@pytest.mark.parametrize("scale", [1e-20, 1e-8, 1.0, 1e5, 1e25])
def test_error_is_relative_to_the_block(codec, bound, scale):
    flat = normal(640) * scale
    error = (through(codec, flat) - flat).view(-1, BLOCK).abs()
    assert (error <= bound * flat.view(-1, BLOCK).abs().amax(1, keepdim=True)).all()


@codecs
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38, -1e-31])
def test_tiny_values_may_become_zero(codec, value):
    flat = torch.full((70,), value)
    assert through(codec, flat).tolist() in ([0.0] * 70, flat.tolist())


@codecs
def test_the_largest_value_survives(codec):
    flat = torch.tensor([LARGEST, -LARGEST, 0.0])
    torch.testing.assert_close(through(codec, flat), flat, rtol=0.002, atol=0)


@codecs
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 2 * LARGEST])
def test_values_that_are_not_finite_are_not_sent(codec, bad):
    flat = normal(PIECE + 500)
    flat[PIECE + 300] = bad
    sent = pieces(codec, flat)
    next(sent)
    with pytest.raises(LocalProtocolError):
        next(sent)


@codecs
def test_lost_is_the_error_of_the_receiver(codec):
    flat = normal(PIECE + 100)
    assert torch.equal(lost(codec, flat), flat - through(codec, flat))


@pytest.mark.parametrize("codec", ["int8", "e3m0"])
def test_error_feedback_delivers_the_sum(codec):
    """With errors added to the next message, the error of a sum of messages stays that of one."""
    flat = normal(6400)
    delivered, residual, plain = torch.zeros(6400), torch.zeros(6400), torch.zeros(6400)
    for _ in range(30):
        sent = flat + residual
        residual = lost(codec, sent)
        delivered += through(codec, sent)
        plain += through(codec, flat)
    error = (delivered / 30 - flat).norm()
    assert error < (plain / 30 - flat).norm() / 5
    torch.testing.assert_close(delivered + residual, 30 * flat, rtol=1e-4, atol=1e-4)


def test_pieces_are_encoded_when_asked_for():
    flat = normal(2 * PIECE)
    sent = pieces("int8", flat)
    first = bytes(next(sent))
    flat[PIECE:] = 0.0
    second = bytes(next(sent))
    assert any(first) and not any(second)


@settings(max_examples=60)
@given(
    st.sampled_from(CODECS),
    st.sampled_from([1, 64, 1000, PIECE + 1]),
    st.lists(st.integers(0, 400_000), max_size=20),
)
def test_pieces_may_be_cut_anywhere(codec, n, cuts):
    flat = normal(n)
    data = body(codec, flat)
    ends = sorted(cut % (len(data) + 1) for cut in cuts)
    decoder = BodyDecoder(codec, n)
    for start, end in zip([0, *ends], [*ends, len(data)], strict=True):
        decoder.write(memoryview(data)[start:end])
    assert torch.equal(decoder.values(), through(codec, flat))


@settings(max_examples=200)
@given(st.sampled_from(CODECS), st.integers(1, 200), st.data())
def test_made_up_bytes_are_values_or_an_error(codec, n, data):
    size = coded_bytes(codec, n)
    made_up = data.draw(st.binary(min_size=size, max_size=size))
    try:
        values = decode(codec, n, made_up)
    except RemoteProtocolError as error:
        assert error.reason == "values"
    else:
        assert values.shape == (n,)
        assert (values.abs() <= 2 * LARGEST).all()


@codecs
@pytest.mark.parametrize("n", [1, 200, PIECE + 1])
def test_too_few_or_too_many_bytes(codec, n):
    data = body(codec, normal(n))
    for few in (b"", data[:1], data[:-1]):
        with pytest.raises(RemoteProtocolError) as error:
            decode(codec, n, few)
        assert error.value.reason == "size"
    decoder = BodyDecoder(codec, n)
    for i in range(0, len(data), MAX_CHUNK_BYTES):
        decoder.write(memoryview(data)[i : i + MAX_CHUNK_BYTES])
    decoder.write(memoryview(b""))
    with pytest.raises(RemoteProtocolError) as error:
        decoder.write(memoryview(b"x"))
    assert error.value.reason == "size"
    with pytest.raises(RemoteProtocolError) as error:
        BodyDecoder(codec, n).write(memoryview(data + b"x"))
    assert error.value.reason == "size"


@codecs
@pytest.mark.parametrize(
    "bad", [b"\x80\x7f", b"\x80\xff", b"\xc0\x7f", b"\x7f\x7f"], ids=["inf", "-inf", "nan", "3e38"]
)
def test_values_that_are_not_finite_are_refused(codec, bad):
    """`bad`: a bfloat16, or the upper half of a float32."""
    data = bytearray(body(codec, normal(200)))
    block = coded_bytes(codec, BLOCK)
    data[block : block + 2] = bad
    if codec == "float32":
        data[block : block + 4] = b"\x00\x00" + bad
    with pytest.raises(RemoteProtocolError) as error:
        decode(codec, 200, bytes(data))
    assert error.value.reason == "values"
