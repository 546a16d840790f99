"""Weights as bytes: blocks of 64 values, each quantised by its own largest magnitude s.

    body  = block block ...        block = s (bfloat16) | 64 codes        little-endian; the last is filled up with 0

    float32   the values themselves, no s                                 32    bits a value
    int8      x ~ code s / 127,   code = round(127 x / s)                  8.25
    e3m0      x ~ +-s 2^-k, k = 0..6, or 0, whichever is nearest           4.25   Streaming DiLoCo, arXiv 2501.18512

A code of e3m0 has 4 bits: the sign, then 7 - k, or 0 for zero. The first of two values is the low half of a byte. The
paper gives no scaling; ours is by block. s has the range of float32, as differences of weights are often too small for
float16; codes make up for its 8 bits of precision. Blocks with s < 1e-30 count as 0.

The relative error (RMS) of normally distributed values is about 0.006 with int8 and 0.19 with e3m0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from swarm_protocol.errors import LocalProtocolError, RemoteProtocolError
from swarm_protocol.tensors import WeightCodec

BLOCK = 64
PIECE = 4096 * BLOCK  # values that are encoded and decoded at a time: 1 MiB of float32, `MAX_CHUNK_BYTES`
LARGEST = 1e30
"""No weight, difference of weights, activation or gradient is larger. Sums of a few such values do not overflow."""
SMALLEST = 1e-30  # scales below this count as 0, so that 1 / s does not overflow


def coded_bytes(codec: WeightCodec, values: int) -> int:
    """Bytes of a body."""
    return -(-values // BLOCK) * _CODECS[codec].block_bytes


def pieces(codec: WeightCodec, flat: Tensor) -> Iterator[memoryview]:
    """The body for `flat` (float32 [n], contiguous, on the CPU), each piece encoded when asked for.

    Pieces are whole blocks of at most `MAX_CHUNK_BYTES`; in float32 they are views of `flat`. Raises
    LocalProtocolError if a value is not finite or too large.
    """
    for part in _parts(flat):
        yield memoryview(_encode(codec, part).numpy()).cast("B")


def lost(codec: WeightCodec, flat: Tensor) -> Tensor:
    """The error of encoding `flat` [n], to be added to what is sent next. Raises as `pieces`."""
    result = flat.clone()
    for part in _parts(result):
        part.sub_(_CODECS[codec].decode(_encode(codec, part)).flatten()[: len(part)])
    return result


class Reader(ABC):
    """Decodes a body of `values` values in blocks of `block_bytes`, which may arrive in pieces of any size."""

    def __init__(self, values: int, block_bytes: int) -> None:
        count = -(-values // BLOCK)
        self.missing = count * block_bytes  # bytes that have not arrived
        self._length = values
        self._values = torch.empty(count, BLOCK)
        self._parts = iter(self._values.split(PIECE // BLOCK) if count else ())
        self._buffer = torch.empty(min(count, PIECE // BLOCK), block_bytes, dtype=torch.uint8)
        self._room = memoryview(b"")  # for the missing bytes of the present part

    def write(self, piece: memoryview) -> None:
        """The next bytes. Raises RemoteProtocolError: size (more than there should be), values (not finite)."""
        if len(piece) > self.missing:
            raise RemoteProtocolError("size", f"{len(piece) - self.missing} bytes too many")
        self.missing -= len(piece)
        while piece:
            if not self._room:
                self._part = next(self._parts)
                self._blocks = self._buffer[: len(self._part)]
                self._room = memoryview(self._blocks.numpy()).cast("B")
            n = min(len(piece), len(self._room))
            self._room[:n] = piece[:n]
            self._room, piece = self._room[n:], piece[n:]
            if not self._room:
                self._decode(self._blocks, self._part)
                if not bounded(self._part, 2 * LARGEST):  # s may have been rounded up
                    raise RemoteProtocolError("values", "a value is not finite, or too large")

    def values(self) -> Tensor:
        """Float32 [values], once all bytes have arrived. Raises RemoteProtocolError: size."""
        if self.missing:
            raise RemoteProtocolError("size", f"{self.missing} bytes are missing")
        return self._values.view(-1)[: self._length]

    @abstractmethod
    def _decode(self, blocks: Tensor, part: Tensor) -> None:
        """Set `part` [blocks, 64], the next values, from any bytes [blocks, block_bytes]."""


class BodyDecoder(Reader):
    def __init__(self, codec: WeightCodec, values: int) -> None:
        super().__init__(values, _CODECS[codec].block_bytes)
        self._codec = _CODECS[codec]

    def _decode(self, blocks: Tensor, part: Tensor) -> None:
        part.copy_(self._codec.decode(blocks))


class Readers:
    """Decodes several bodies that follow each other."""

    def __init__(self, readers: Sequence[Reader]) -> None:
        self._readers = readers
        self.size = sum(reader.missing for reader in readers)

    def write(self, piece: memoryview) -> None:
        """The next bytes. Raises RemoteProtocolError as `Reader` does."""
        for reader in self._readers:
            if reader.missing and piece:
                part, piece = piece[: reader.missing], piece[reader.missing :]
                reader.write(part)
        if piece:
            raise RemoteProtocolError("size", f"{len(piece)} bytes too many")

    def values(self) -> list[Tensor]:
        """The values of each body, once all have arrived. Raises RemoteProtocolError: size."""
        return [reader.values() for reader in self._readers]


def _parts(flat: Tensor) -> tuple[Tensor, ...]:
    return flat.split(PIECE) if len(flat) else ()


def _encode(codec: WeightCodec, part: Tensor) -> Tensor:
    """Bytes [blocks, block_bytes]."""
    if not bounded(part):
        raise LocalProtocolError("weights that are not finite, or too large, are not sent")
    return _CODECS[codec].encode(blocks_of(part))


def blocks_of(part: Tensor) -> Tensor:
    """A flat tensor as [blocks, 64]; the last block is filled up with 0."""
    short = -len(part) % BLOCK
    return (pad(part, (0, short)) if short else part).view(-1, BLOCK)


def bounded(values: Tensor, limit: float = LARGEST) -> bool:
    """Whether all `values` lie in [-limit, limit] and none is NaN."""
    low, high = values.aminmax()
    return bool(low >= -limit) and bool(high <= limit)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scales (bfloat16 [blocks, 1]) and int8 codes [blocks, 64] of finite float32 values [blocks, 64]."""
    scale = _scales(x)
    return scale, _ratios(x, scale).mul_(127).round_().to(torch.int8)  # at most 127.3 before it is rounded


def dequantise(scale: Tensor, codes: Tensor) -> Tensor:
    """Float32 values [blocks, 64] of what `quantise` gives."""
    return codes * (scale.float() / 127)


def _scales(x: Tensor) -> Tensor:
    """The largest magnitude of each block, bfloat16 [blocks, 1]; 0 if it is less than `SMALLEST`."""
    scale = x.abs().amax(1, keepdim=True).to(torch.bfloat16)
    scale[scale < SMALLEST] = 0
    return scale


def _ratios(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale, 0 where the scale is 0."""
    return x * scale.float().reciprocal().nan_to_num_(posinf=0)


E3M0 = np.array([0.0] + [2.0**-k for k in range(6, -1, -1)], np.float32)  # magnitudes of the codes 0..7
E3M0_PAIRS = np.stack([np.tile(np.r_[E3M0, -E3M0], 16), np.repeat(np.r_[E3M0, -E3M0], 16)], 1).view(np.uint64)[:, 0]
"""The two values of each byte [256] as one item of 64 bits, the form of a table that is read fastest."""


_LEADING = (np.arange(1024, dtype=np.uint32) << 22).view(np.float32)  # by their leading ten bits
_MEANS = (E3M0[1:] + E3M0[:-1]) / 2  # of neighbouring magnitudes
E3M0_CODES = (np.searchsorted(_MEANS, np.abs(_LEADING), side="right") + 8 * np.signbit(_LEADING)).astype(np.uint8)
"""Codes [1024] by the leading ten bits of a float32: sign, exponent and one bit. They suffice, because the means of
neighbouring magnitudes are 2^-7 and 1.5 * 2^-j."""


def _encode_e3m0(x: Tensor) -> Tensor:
    scale = _scales(x)
    codes = E3M0_CODES.take(_ratios(x, scale).numpy().view(np.uint32) >> 22)
    return torch.cat([scale.view(torch.uint8), torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4)], 1)


def _decode_e3m0(blocks: Tensor) -> Tensor:
    values = E3M0_PAIRS.take(blocks.numpy()[:, 2:]).view(np.float32)
    return torch.from_numpy(values).mul_(blocks[:, :2].view(torch.bfloat16))


class _Codec(NamedTuple):
    block_bytes: int
    encode: Callable[[Tensor], Tensor]  # finite values [blocks, 64] -> bytes [blocks, block_bytes]
    decode: Callable[[Tensor], Tensor]  # any bytes [blocks, block_bytes] -> values [blocks, 64]


_CODECS: dict[WeightCodec, _Codec] = {
    "float32": _Codec(4 * BLOCK, lambda x: x.view(torch.uint8), lambda blocks: blocks.view(torch.float32)),
    "int8": _Codec(
        2 + BLOCK,
        lambda x: torch.cat([part.view(torch.uint8) for part in quantise(x)], 1),
        lambda blocks: dequantise(blocks[:, :2].view(torch.bfloat16), blocks[:, 2:].view(torch.int8)),
    ),
    "e3m0": _Codec(2 + BLOCK // 2, _encode_e3m0, _decode_e3m0),
}
