"""Rows, masks and microbatches."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from swarm_node.grpo.batch import PADDING, Row, flatten, padding_on_cpu, plan, token_batch, tokens
from tests.support.tiny_policy import batch


def test_a_packed_row_by_hand():
    b = batch([Row([5, 6, 7], [[10, 11], [20], [30, 31, 32]], first=0)], packing=True)
    assert b.input_ids.tolist() == [[5, 6, 7, 10, 30, 31]]
    assert b.position_ids.tolist() == [[0, 1, 2, 3, 3, 4]]
    assert b.target.tolist() == [10, 11, 20, 30, 31, 32]
    assert b.col.tolist() == [2, 3, 2, 2, 4, 5]  # the prompt's last token predicts each first one
    assert b.sequence.tolist() == [0, 0, 1, 2, 2, 2]
    seen = b.attention_mask[0, 0].int().tolist()
    assert seen == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 0, 1, 0],  # the third completion does not see the first
        [1, 1, 1, 0, 1, 1],
    ]


def test_plain_rows_by_hand():
    b = batch([Row([5, 6], [[10, 11], [20, 21, 22]], first=0)], packing=False)
    assert b.input_ids.tolist() == [[5, 6, 20, 21], [5, 6, 10, 0]]  # longest first, padded to the right
    assert b.attention_mask is None
    assert b.row.tolist() == [0, 0, 0, 1, 1]
    assert b.col.tolist() == [1, 2, 3, 1, 2]
    assert b.sequence.tolist() == [1, 1, 1, 0, 0]
    assert b.index.tolist() == [2, 3, 4, 0, 1]  # laid end to end: 10 11 20 21 22


def test_what_is_said_between_answers_is_read_and_not_trained_on():
    row = Row([5, 6], [[10, 90, 91, 11, 12], [20, 21]], first=0, targets=[np.array([0, 3, 4]), np.array([0, 1])])
    b = batch([row], packing=True)
    assert b.input_ids.tolist() == [[5, 6, 10, 90, 91, 11, 20]]
    assert b.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 2]]
    assert b.target.tolist() == [10, 11, 12, 20, 21]
    assert b.col.tolist() == [1, 4, 5, 1, 6] and b.sequence.tolist() == [0, 0, 0, 1, 1]
    plain = batch([row], packing=False)
    assert plain.target.tolist() == [10, 11, 12, 20, 21] and plain.index.tolist() == [0, 1, 2, 3, 4]
    (rows,) = [plan([row], True, limit=6, hidden=4096)]
    assert [[list(each.places(0)) for each in part] for part in rows] == [[[0, 3, 4]], [[0, 1]]]


def test_a_microbatch_goes_to_a_device_in_one_copy():
    copies = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            copies.extend([args[0].shape] if function.name() == "aten::_to_copy" else [])
            return function(*args, **kwargs or {})

    (rows,) = plan(groups := [Row([5, 6, 7], [[10, 11], [20]], first=0)], True, 100, hidden=64)
    with Copies():
        b = token_batch(rows, flatten(groups), 0, torch.device("meta"))
    assert len(copies) == 1
    assert b.input_ids.device.type == b.index.device.type == b.attention_mask.device.type == "meta"


def test_every_token_is_predicted_once_whatever_the_microbatches():
    rng = random.Random(0)
    groups, first = [], 0
    for _ in range(7):
        completions = [[rng.randrange(3, 99) for _ in range(rng.randint(1, 9))] for _ in range(rng.randint(1, 6))]
        groups.append(Row([rng.randrange(3, 99) for _ in range(rng.randint(1, 8))], completions, first))
        first += len(completions)
    flat = flatten(groups)
    wanted = [t for g in groups for c in g.completions for t in c]
    for packing in (True, False):
        for limit in (1, 20, 50, 10_000):
            found = {}
            for rows in plan(groups, packing, limit, hidden=64):
                assert tokens(rows) <= limit or len(rows) == 1
                b = token_batch(rows, flat, 0, torch.device("cpu"))
                assert b.input_ids.numel() == tokens(rows)
                for place, token, row, col in zip(b.index, b.target, b.row, b.col, strict=True):
                    assert place.item() not in found
                    found[place.item()] = token.item()
                    assert col < b.input_ids.shape[1] and row < len(rows)
            assert [found[i] for i in range(len(wanted))] == wanted


def test_short_completions_share_rows_long_ones_do_not():
    def rows(prompt: int, completion: int, hidden: int) -> int:
        groups = [Row([1] * prompt, [[2] * completion for _ in range(8)], 0)]
        return sum(len(m) for m in plan(groups, True, 10**6, hidden))

    assert rows(prompt=24, completion=16, hidden=128) == 1
    assert rows(prompt=24, completion=2000, hidden=128) == 8  # attention over 16,000 tokens would cost more
    assert 1 < rows(prompt=1000, completion=500, hidden=128) < 8


def test_wide_models_take_another_pass_rather_than_padding():
    groups = [Row([1] * 40, [[2] * n for n in (4, 4, 4, new)], 0) for new in (4, 10, 40, 60)]
    small, wide = (plan(groups, True, 10**6, hidden, padding_on_cpu(hidden)) for hidden in (128, 576))
    assert len(small) == 1 and len(wide) == 2
    assert padding_on_cpu(128) == PADDING and padding_on_cpu(10**4) < PADDING
    for rows in wide:
        assert tokens(rows) - sum(row.length for row in rows) <= padding_on_cpu(576)


def test_a_packed_row_splits_at_the_limit():
    groups = [Row([1] * 10, [[2] * 11 for _ in range(8)], 0)]
    microbatches = plan(groups, True, limit=30, hidden=4096)
    assert [[len(row.completions) for row in rows] for rows in microbatches] == [[2]] * 4


def test_long_completions_among_short_keep_the_limit():
    completions = [[2] * 40] * 5 + [[2]] * 59
    (microbatches,) = [plan([Row([1] * 10, completions, 3)], True, limit=100, hidden=4096)]
    rows = sorted((row for rows in microbatches for row in rows), key=lambda row: row.first)
    assert max(tokens(rows) for rows in microbatches) <= 100 and len(completions) > len(rows)
    assert [c for row in rows for c in row.completions] == completions
    assert [row.first for row in rows] == [3 + sum(len(r.completions) for r in rows[:i]) for i in range(len(rows))]
    (rows,) = plan([Row([1] * 10, [[2] * 200], 0)], True, limit=100, hidden=4096)
    assert tokens(rows) == 209  # one alone is as long as it is
