"""From rollouts to rows of tokens, in microbatches.

packed  one row holds completions of one group behind one copy of their prompt,

            [prompt, c1 without its last token, c2 without its last token, ...]

        where each completion sees the prompt and itself only, and its positions go on from the prompt's end.
        The last prompt position predicts the first token of each of them.
plain   one row a rollout, [prompt, completion without its last token].

A dialogue of several turns is one completion, of which only the answers are targets: what the environment says between
them is read, as the prompt is.

Packed rows halve the time of an update with 24 + 8 x 16 tokens. Attention in a packed row costs the square of its
length, so a group with long completions is cut into several rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

import numpy as np
import torch
from torch import Tensor

from swarm_node.policy.logprobs import TokenBatch

NEARLY_CHEAPEST = 1.15
"""A group is cut into the fewest rows that cost at most this much more than the cheapest cut. Rows of all groups then
have similar lengths, which saves more padding than the rest of the difference."""
PADDING = 256
"""Padding tokens that cost as much as another pass, on a GPU or through a model of width `SMALL` (measured on a CPU:
5 ms, 30 microseconds a token)."""
SMALL = 128
LEAST_PADDING = 32  # likewise through a wide model: a pass reads all weights, and products with few rows are slow


@dataclass(frozen=True)
class Row:
    """Completions behind their prompt: all of a group that are trained on, or some of them after `plan`."""

    prompt: list[int]
    completions: list[list[int]]
    first: int  # number of the first completion, counted over all rollouts of the step that are trained on
    targets: list[np.ndarray] | None = None
    """Of each completion, the places of the tokens that are trained on, in order; None = all of all."""

    def part(self, start: int, stop: int) -> Row:
        """The row of completions `start` to `stop`."""
        targets = None if self.targets is None else self.targets[start:stop]
        return Row(self.prompt, self.completions[start:stop], self.first + start, targets)

    def places(self, number: int) -> np.ndarray:
        """Of completion `number`, the places of the tokens that are trained on."""
        return np.arange(len(self.completions[number])) if self.targets is None else self.targets[number]

    @property
    def length(self) -> int:
        """Tokens of the packed row."""
        return len(self.prompt) + sum(len(c) - 1 for c in self.completions)


@dataclass(frozen=True)
class Flat:
    """All completion tokens of a step that are trained on, laid end to end."""

    target: np.ndarray  # [N] the tokens
    sequence: np.ndarray  # [N] number of the rollout each belongs to
    start: np.ndarray  # [B] where each rollout begins


def flatten(groups: Sequence[Row]) -> Flat:
    """Lay the targets of all groups end to end."""
    targets = [np.array(c, dtype=np.int64)[row.places(j)] for row in groups for j, c in enumerate(row.completions)]
    lengths = np.array(list(map(len, targets)))
    return Flat(
        target=np.concatenate(targets),
        sequence=np.repeat(np.arange(len(targets)), lengths),
        start=np.cumsum(lengths) - lengths,
    )


def plan(
    groups: Sequence[Row], packing: bool, limit: int, hidden: int, most_padding: float = PADDING
) -> list[list[Row]]:
    """Microbatches of rows: at most `limit` tokens each, padding included, unless one row alone is longer.

    Rows of similar length go together, with at most `most_padding` tokens a microbatch. `hidden` is the model's width,
    for the cost of a long row.
    """
    rows = [row for group in groups for row in _rows(group, packing, limit, hidden)]
    rows.sort(key=lambda row: row.length, reverse=True)
    microbatches: list[list[Row]] = []
    padding = 0
    for row in rows:
        longest = microbatches[-1][0].length if microbatches else 0
        padding += longest - row.length
        if microbatches and longest * (len(microbatches[-1]) + 1) <= limit and padding <= most_padding:
            microbatches[-1].append(row)
        else:
            microbatches.append([row])
            padding = 0
    return microbatches


def padding_on_cpu(hidden: int) -> float:
    """Padding tokens that cost as much as another pass on a CPU: a token's products grow with the square of the width,
    what a pass costs besides does not."""
    return max(LEAST_PADDING, PADDING * min(1.0, (SMALL / hidden) ** 2))


def tokens(microbatch: Sequence[Row]) -> int:
    """Tokens in one forward pass over the microbatch, padding included."""
    return microbatch[0].length * len(microbatch)


def _rows(group: Row, packing: bool, limit: int, hidden: int) -> list[Row]:
    """The group in the number of rows that costs least. A row of T tokens costs T (12 hidden^2 + 2 T hidden)
    multiplications a layer, in weights and in attention."""
    n = len(group.completions)
    total = sum(len(c) - 1 for c in group.completions)

    def length(per_row: int) -> float:
        return len(group.prompt) + total * per_row / n

    def cost(per_row: int) -> float:
        return length(per_row) * (6 * hidden + length(per_row)) / per_row

    costs = {k: cost(k) for k in range(1, n + 1) if k == 1 or (packing and length(k) <= limit)}
    cheap = [k for k, c in costs.items() if c <= NEARLY_CHEAPEST * min(costs.values())]
    per_row = ceil(n / ceil(n / max(cheap)))  # so that the last row is not much shorter
    rows = []
    for i in range(0, n, per_row):
        rows += _within(group.part(i, i + per_row), limit)
    return rows


def _within(row: Row, limit: int) -> list[Row]:
    """The row, cut where it would be longer than `limit`, because its completions are longer than most of the group."""
    starts, length = [0], len(row.prompt)
    for i, completion in enumerate(row.completions):
        if i > starts[-1] and length + len(completion) - 1 > limit:
            starts.append(i)
            length = len(row.prompt)
        length += len(completion) - 1
    return [row.part(*ends) for ends in pairwise([*starts, len(row.completions)])]


def token_batch(microbatch: Sequence[Row], flat: Flat, pad_id: int, device: torch.device) -> TokenBatch:
    """Tensors of one microbatch on `device`."""
    packed = any(len(row.completions) > 1 for row in microbatch)
    width = max(row.length for row in microbatch)
    input_ids = np.full((len(microbatch), width), pad_id, dtype=np.int64)
    position_ids = np.zeros((len(microbatch), width), dtype=np.int64)
    segment = np.full((len(microbatch), width), -1, dtype=np.int64)  # 0 = prompt, j = j-th completion, -1 = padding
    rows, cols, index = [], [], []
    for r, row in enumerate(microbatch):
        end = len(row.prompt)
        input_ids[r, :end] = row.prompt
        position_ids[r, :end] = np.arange(end)
        segment[r, :end] = 0
        for j, completion in enumerate(row.completions):
            n = len(completion)
            input_ids[r, end : end + n - 1] = completion[:-1]
            position_ids[r, end : end + n - 1] = np.arange(len(row.prompt), len(row.prompt) + n - 1)
            segment[r, end : end + n - 1] = j + 1
            col = np.arange(end - 1, end + n - 1)
            col[0] = len(row.prompt) - 1
            trained = row.places(j)
            rows.append(np.full(len(trained), r))
            cols.append(col[trained])
            start = flat.start[row.first + j]
            index.append(np.arange(start, start + len(trained)))
            end += n - 1
    places = np.concatenate(index)
    of_tokens = np.concatenate(rows), np.concatenate(cols), flat.target[places], flat.sequence[places], places
    ids, positions, segments, *tensors = _on(device, [input_ids, position_ids, segment, *of_tokens])
    return TokenBatch(ids, positions if packed else None, block_mask(segments) if packed else None, *tensors)


def _on(device: torch.device, arrays: Sequence[np.ndarray]) -> list[Tensor]:
    """Arrays of integers as tensors on `device`, in one copy, for which nothing waits on a GPU."""
    whole = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
    if device.type == "cuda":
        whole = whole.pin_memory()
    parts = whole.to(device, non_blocking=device.type == "cuda").split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def block_mask(segment: Tensor) -> Tensor:
    """Mask [R, 1, T, T]: a token sees earlier tokens of the prompt (segment 0) and of its own segment [R, T]."""
    query, key = segment[:, :, None], segment[:, None, :]
    causal = torch.ones(segment.shape[1], segment.shape[1], dtype=torch.bool, device=segment.device).tril()
    return (((key == 0) | (key == query)) & causal)[:, None]
