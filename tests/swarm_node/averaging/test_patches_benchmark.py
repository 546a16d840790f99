"""Patches of the benchmark are lossless, whatever the weights are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.patches import bf16_patch, bf16_patched, bits, compared, float32_patch, float32_patched, measure

U16 = st.lists(st.tuples(st.integers(0, 2**16 - 1), st.integers(0, 2**16 - 1), st.booleans()), min_size=1)
U32 = st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)), min_size=1)


@given(U16)
def test_a_bf16_patch_gives_the_new_bits(rows: list[tuple[int, int, bool]]) -> None:
    base = np.array([old for old, _, _ in rows], np.uint16)
    new = np.array([now if changed else old for old, now, changed in rows], np.uint16)
    assert np.array_equal(bf16_patched(base, bf16_patch(base, new)), new)


def test_far_places_are_coded() -> None:
    base = np.zeros(70_000, np.uint16)
    new = base.copy()
    new[[0, 127, 128, 129, 16_600, 69_999]] = 7
    assert np.array_equal(bf16_patched(base, bf16_patch(base, new)), new)


@given(U32)
def test_a_float32_patch_gives_the_new_bits(rows: list[tuple[int, int]]) -> None:
    base, new = (np.array([row[i] for row in rows], np.uint32) for i in (0, 1))
    assert np.array_equal(float32_patched(base, float32_patch(base, new)), new)


def test_a_small_step_is_invisible_in_bf16() -> None:
    base = torch.full((1000,), 0.02)
    new = base.clone()
    new[:10] += 1e-3
    new[10:] += 1e-6
    figures = compared(base, new)
    assert figures["bf16_changed"] == pytest.approx(0.01) and figures["float32_changed"] == 1.0
    assert figures["bf16_bytes"] < 100 and figures["bf16_whole"] == 2000
    assert bits(base, True).dtype == np.uint16


def test_the_benchmark_trains_and_compares() -> None:
    [one] = measure(1e-6, [1], seed=0, groups=1)
    assert 0.0 < one["bf16_changed"] < 0.1 < one["float32_changed"] and one["updates"] == 1
