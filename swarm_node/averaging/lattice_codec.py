"""Lattice quantisation: a reader that has nearly the same values needs only their remainders.

    block of 64 values x, written with step s and b bits, q = round(x / s - u), t = q div 2^b:
        s (bfloat16) | check = sum_k (2k + 1) t_k mod 256 (1 byte) | codes q mod 2^b
    reader with values y:     x ~ s (q + u),   q = the integer nearest to y / s - u that has the code

u in [-1/2, 1/2), one for each block, is drawn each time from a seed that both know (subtractive dither). Without it
all peers round to the same values, and a swarm that agrees stays there.

Values are right to within s / 2 if |x - y| < (2^b - 1) s / 2: the error follows the distance of writer and reader. If
they are further apart, the values would be a multiple of 2^b s off, in the worst case exactly y, and the two would
never find together. The check shows that. The reader then keeps its own block, and writes it out in its next exchange,
with any peer: float32 with its number, after all blocks. (In simulation, doubling the step instead drove peers apart.)

The writer chooses the step of a block from what both say of themselves (`reach`, root mean square):

    2^(b-1) s = max(largest |theta_i - phi_i| of the block, REACH reach_i) + REACH reach_j

Source: Davies et al., New Bounds for Distributed Mean Estimation (ICLR 2021, arXiv 2002.09268), with a cubic lattice,
as in SwarmSGD (arXiv 1910.12308). Blocks and their steps are ours.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from swarm_node.averaging.codecs import BLOCK, LARGEST, PIECE, SMALLEST, Reader, blocks_of, bounded
from swarm_protocol.errors import LocalProtocolError, RemoteProtocolError

REACH = {8: 6.0, 4: 3.0}  # factor by bits: the limit is 8 or 4 standard deviations of normally distributed progress
MAX_WRITTEN_OUT = 1 / 8  # largest part of the blocks that may be written out
WRITTEN_OUT_BYTES = 4 + 4 * BLOCK
ROWS = 512  # blocks worked on at a time: temporaries of 256 KiB in float64 fit in a processor's cache
ODD = torch.arange(1, 2 * BLOCK, 2, dtype=torch.float64)[:, None]
"""Weights of the check [64, 1], which sees every change of one number by less than 256."""
HALVES = np.array([[code & 15, code >> 4] for code in range(256)], np.float32).view(np.uint64)[:, 0]
"""The two codes of each byte [256] as one item of 64 bits, the form of a table that is read fastest."""


def lattice_pieces(
    bits: int,
    flat: Tensor,
    slow: Tensor,
    own_reach: float,
    reach: float,
    seed: str,
    written_out: Tensor,
) -> Iterator[memoryview]:
    """The body for `flat` (float32 [n], on the CPU), each piece encoded when asked for.

    slow [n]          this node's slow weights
    own_reach, reach  how far this node and the reader may have moved, root mean square
    seed              a new one each time
    written_out       ascending numbers of the blocks to be written out

    Raises LocalProtocolError if a value is not finite or too large.
    """
    source = _source(seed)
    quotients, turns = torch.empty(2, ROWS, BLOCK, dtype=torch.float64)
    change, rests = torch.empty(ROWS, BLOCK), torch.empty(ROWS, BLOCK, dtype=torch.int32)
    for part, start in zip(map(blocks_of, flat.split(PIECE)), map(blocks_of, slow.split(PIECE)), strict=True):
        k = len(part)
        largest = torch.empty(k, 1)
        for x, y, most in _rows(part, start, largest):
            torch.amax(torch.sub(x, y, out=change[: len(x)]).abs_(), 1, keepdim=True, out=most)
        if not (bounded(part) and bounded(largest, 2 * LARGEST)):
            raise LocalProtocolError("weights that are not finite, or too large, are not sent")
        limit = largest.double().clamp_(min=REACH[bits] * own_reach) + REACH[bits] * reach
        step = (limit / 2 ** (bits - 1)).to(torch.bfloat16)
        step[step < SMALLEST] = 0  # says: the same as yours
        codes, check = torch.empty(k, BLOCK, dtype=torch.uint8), torch.empty(k, 1, dtype=torch.float64)
        for x, size, u, code, sum_ in _rows(part, step.double(), _draw(source, k), codes, check):
            q, t = quotients[: len(x)], turns[: len(x)]
            q.copy_(x).div_(size).sub_(u).round_()
            torch.mul(q, 2.0**-bits, out=t).floor_()
            code.copy_(rests[: len(x)].copy_(q.sub_(t, alpha=2**bits)))  # float64 to uint8 at once is slow
            _sum_up(t, q, sum_)
        none = step[:, 0] == 0
        if bool(none.any()):
            codes[none], check[none] = 0, 0
        if bits == 4:
            pairs = codes.numpy().view(np.uint16)
            codes = torch.from_numpy((pairs | pairs >> 4).astype(np.uint8))
        yield memoryview(torch.cat([step.view(torch.uint8), _modulo(check), codes], 1).numpy()).cast("B")
    for numbers in written_out.split(PIECE // BLOCK // 2) if len(written_out) else ():
        values = torch.stack([pad(part, (0, BLOCK - len(part))) for part in _each(flat, numbers)])
        rows = torch.cat([numbers.to(torch.int32)[:, None].view(torch.uint8), values.view(torch.uint8)], 1)
        yield memoryview(rows.numpy()).cast("B")


class LatticeReader(Reader):
    """Decodes a body for a reader that has `near` [n]. `written_out` blocks are written out."""

    def __init__(self, bits: int, near: Tensor, seed: str, written_out: int = 0) -> None:
        super().__init__(len(near), lattice_bytes(bits))
        self._rows = bytearray()
        self._rows_bytes = WRITTEN_OUT_BYTES * written_out
        self.missing += self._rows_bytes
        self._bits = bits
        self._near = near
        self._source = _source(seed)
        self.failed = torch.empty(block_count(len(near)), dtype=torch.bool)
        """Blocks that could not be decoded and are the reader's own, once all bytes have arrived."""
        self._done = 0  # blocks decoded so far
        self._squares = self._lost = 0.0
        self._scratch = torch.empty(3, ROWS, BLOCK, dtype=torch.float64)

    def write(self, piece: memoryview) -> None:
        of_blocks = min(len(piece), max(0, self.missing - self._rows_bytes))
        if of_blocks:
            super().write(piece[:of_blocks])
        rest = piece[of_blocks:]
        if len(rest) > self.missing:
            raise RemoteProtocolError("size", f"{len(rest) - self.missing} bytes too many")
        self._rows += rest
        self.missing -= len(rest)

    def values(self) -> Tensor:
        """Float32 [n], once all bytes have arrived. Raises RemoteProtocolError: size, values (impossible blocks)."""
        values = super().values()
        if self._rows:
            rows = torch.frombuffer(self._rows, dtype=torch.uint8).view(-1, WRITTEN_OUT_BYTES)
            numbers = rows[:, :4].contiguous().view(torch.int32)[:, 0].long()
            blocks = rows[:, 4:].contiguous().view(torch.float32)
            known = block_count(len(values))
            if not (numbers[0] >= 0 and numbers[-1] < known and (numbers.diff() > 0).all() and bounded(blocks)):
                raise RemoteProtocolError("values", "an impossible block was written out")
            for part, block in zip(_each(values, numbers), blocks, strict=True):
                part.copy_(block[: len(part)])
            self._rows = bytearray()
        return values

    def apart(self) -> float:
        """Root mean square difference of writer and reader, once all bytes have arrived. It excludes the error of
        encoding, otherwise steps that follow this figure would grow by themselves."""
        return math.sqrt(max(0.0, self._squares - self._lost) / (BLOCK * len(self.failed)))

    def _decode(self, blocks: Tensor, part: Tensor) -> None:
        k, first = len(blocks), self._done
        self._done += k
        scale = torch.empty(k, 1, dtype=torch.bfloat16)
        scale.view(torch.uint8).copy_(blocks[:, :2])
        step = scale.double()
        if not bool((step >= 0).all() and (step <= 1e30).all()):
            raise RemoteProtocolError("values", "a step is not finite, or negative")
        near, us = blocks_of(self._near[BLOCK * first : BLOCK * (first + k)]), _draw(self._source, k)
        check, squares = torch.empty(2, k, 1, dtype=torch.float64)
        for values, y, size, u, code, sum_, square in _rows(part, near, step, us, blocks[:, 3:], check, squares):
            p, q, t = self._scratch[:, : len(y)]  # place of y, nearest number with the code, its turns
            p.copy_(y).div_(size).sub_(u)
            q.copy_(code if self._bits == 8 else torch.from_numpy(HALVES.take(code.numpy()).view(np.float32)))
            torch.sub(p, q, out=t).mul_(2.0**-self._bits).round_()
            q.add_(t, alpha=2**self._bits)
            torch.sum(torch.sub(q, p, out=p).square_(), 1, keepdim=True, out=square)
            values.copy_(q.add_(u).mul_(size))
            _sum_up(t, q, sum_)
        wrong = (step > 0) & (_modulo(check) != blocks[:, 2:3])
        read = (step > 0) & ~wrong
        if not bool(read.all()):
            part[~read[:, 0]] = near[~read[:, 0]]
        self.failed[first : first + k] = wrong[:, 0]
        size = step[read].square()
        self._squares += float(squares[read] @ size)
        self._lost += float(size.sum()) * BLOCK / 12


def lattice_bytes(bits: int) -> int:
    """Bytes of a block."""
    return 3 + BLOCK * bits // 8


def lattice_size(bits: int, values: int, written_out: int) -> int:
    return block_count(values) * lattice_bytes(bits) + WRITTEN_OUT_BYTES * written_out


def most_written_out(values: int) -> int:
    return math.ceil(block_count(values) * MAX_WRITTEN_OUT)


def block_count(values: int) -> int:
    return -(-values // BLOCK)


def _sum_up(turns: Tensor, spare: Tensor, out: Tensor) -> None:
    """Put the check of `turns` [blocks, 64], before `_modulo`, into `out`: float64 [blocks, 1]. `turns` and `spare` are
    overwritten."""
    turns.sub_(torch.mul(turns, 1 / 256, out=spare).floor_(), alpha=256)
    torch.mm(turns, ODD, out=out)


def _modulo(sums: Tensor) -> Tensor:
    """Sums modulo 256, uint8 [blocks, 1]."""
    return sums.remainder(256).to(torch.uint8)


def _rows(*vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of the same `ROWS` blocks of each vector."""
    return zip(*(vector.split(ROWS) for vector in vectors), strict=True)


def _source(seed: str) -> np.random.Philox:
    return np.random.Philox(key=int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big"))


def _draw(source: np.random.Philox, blocks: int) -> Tensor:
    """The dither u of the next blocks, float64 [blocks, 1]."""
    return torch.from_numpy((source.random_raw(blocks) >> np.uint64(11)) * 2.0**-53 - 0.5)[:, None]


def _each(flat: Tensor, numbers: Tensor) -> list[Tensor]:
    """Views of the blocks with these numbers."""
    return [flat[BLOCK * k : BLOCK * (k + 1)] for k in numbers.tolist()]
