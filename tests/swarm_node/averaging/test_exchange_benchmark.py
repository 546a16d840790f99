"""The benchmark of real exchanges, with very few weights: two processes with torch and a p2pd each, several times.

Real exchanges between processes are covered by tests/integration in `make test`."""

from __future__ import annotations

import pytest

from benchmarks.averaging_exchange import exchanges, overlaps, speeds


@pytest.mark.long
def test_two_processes_exchange_and_say_what_it_took() -> None:
    row = exchanges(0.4, "float32", repeats=1, links=(0.0,))
    assert row["body_mb"] == pytest.approx(0.4, rel=0.01)
    assert row["mb_per_s"] == pytest.approx(2 * row["body_mb"] / row["seconds"][0])
    assert row["growth"] > 0 and row["all"] > row["state"]
    [overlap] = row["overlap"].values()
    assert overlap["exchange_s"] > 0 and overlap["waiting_exchange_s"] > 0 and overlap["hidden"] <= 1
    assert len(speeds([row]).splitlines()) == len(overlaps([row]).splitlines()) == 3
