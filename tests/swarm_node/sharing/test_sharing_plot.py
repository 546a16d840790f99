"""The picture of a member against nodes alone, from stored rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.sharing_plot import mean_curve, plot


def test_a_mean_curve_ends_where_one_seed_ends() -> None:
    curve = mean_curve([[(0.0, 0.0), (4.0, 0.4)], [(1.0, 0.3), (2.0, 0.4), (9.0, 0.9)]])
    assert curve[0] == (1.0, pytest.approx(0.2)) and curve[-1][0] == 4.0
    assert dict(curve)[4.0] == pytest.approx((0.4 + 0.4 + 0.5 * 2 / 7) / 2)


def test_stored_rows_are_drawn(tmp_path: Path) -> None:
    plot("specialists", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
