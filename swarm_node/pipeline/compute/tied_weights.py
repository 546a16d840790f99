"""A matrix that the first stage holds as the embedding and the last stage as the head.

It may be too large for a message, so it travels in blocks of rows (`rows_of`).

    gradients    TiedGradient 0 <-> TiedGradient 0,  then TiedGradient 1 <-> TiedGradient 1, ...     both ends add up
    the matrix   Share 0 -> TiedMatrix 0 -> Share 1 -> TiedMatrix 1 -> ... -> taken over, and StageStatus

A block is sent when the block before it has come from the other end, so few bytes wait anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from swarm_protocol.errors import RemoteProtocolError
from swarm_protocol.pipeline import BLOCK

BLOCK_BYTES = 2**24  # most bytes of a block in float32, so that other messages can come in between


def rows_of(block: int, height: int, width: int) -> slice:
    """Rows of a matrix [height, width] that are in a block; empty = there is no such block.

    Blocks hold whole blocks of int8 scales, so that each row is encoded as in the whole matrix."""
    rows = max(1, BLOCK_BYTES // (4 * width * BLOCK)) * BLOCK
    return slice(min(block * rows, height), min((block + 1) * rows, height))


@dataclass
class TiedWeights:
    """One end's copy of the matrix."""

    name: str
    parameter: nn.Parameter
    other: int  # the stage at the other end
    _sent: int = 0  # blocks of the present sum
    _added: int = 0
    _came: Tensor | None = None  # the next block of the other end's gradient
    _taken: int = 0  # blocks of the other end's matrix
    _taking: Tensor | None = None  # the other end's matrix, as far as it has come

    def begin(self) -> None:
        """Begin another sum of gradients."""
        self._sent = self._added = 0
        self._came = None

    @property
    def begun(self) -> bool:
        """Whether rows of the own gradient have been sent."""
        return self._sent > 0

    @property
    def added(self) -> bool:
        """Whether both gradients are added up."""
        return self._empty(self._added)

    def came(self, block: int, rows: Tensor) -> None:
        """Rows [B, H] of the other end's gradient have come. Raises RemoteProtocolError (order) out of turn."""
        if block != self._added or self._came is not None or self.added:
            raise RemoteProtocolError("order", f"block {block} of a gradient, block {self._added} was to come")
        self._came = rows

    def advance(self, written: Callable[[Tensor], Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Add up the blocks that have come. Yields the blocks of the own gradient that must be sent now.

        written  rounds values as the other end will decode them"""
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter)
        gradient = self.parameter.grad
        while not self.added:
            rows = self._rows(self._added)
            if self._sent == self._added:
                own = written(gradient[rows])
                gradient[rows] = own
                self._sent += 1
                yield self._added, own
            if self._came is None:
                return
            gradient[rows] += self._came.to(gradient)
            self._added, self._came = self._added + 1, None

    def give(self, block: int) -> Tensor:
        """Rows [B, H] of the matrix, in float32. Raises RemoteProtocolError (order) if there is no such block."""
        if self._empty(block):
            raise RemoteProtocolError("order", f"the matrix has no block {block}")
        return self.parameter.detach()[self._rows(block)].to(torch.float32, copy=True)

    def take(self, block: int, rows: Tensor) -> Tensor | None:
        """Rows [B, H] of the other end's matrix have come; block 0 begins anew.

        Returns the whole matrix [V, H] once the last rows have come. Raises RemoteProtocolError (order) out of turn."""
        if block == 0:  # takes as much memory as the gradient, of which there is none now
            self._taken, self._taking = 0, torch.empty(self.parameter.shape, device=self.parameter.device)
        if self._taking is None or block != self._taken:
            raise RemoteProtocolError("order", f"block {block} of the matrix is not the next one")
        self._taking[self._rows(block)] = rows.to(self._taking)
        self._taken += 1
        if not self._empty(self._taken):
            return None
        matrix, self._taking = self._taking, None
        return matrix

    def _rows(self, block: int) -> slice:
        height, width = self.parameter.shape
        return rows_of(block, height, width)

    def _empty(self, block: int) -> bool:
        """Whether there is no such block."""
        rows = self._rows(block)
        return rows.start == rows.stop
