"""Rows of benchmarks: whole or not there; what the reports of README's walk and of rounding say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import rounding, walk
from benchmarks.common import write_row
from tests.support.disks import file_size_limit


def test_a_row_is_whole_or_not_there(tmp_path: Path) -> None:
    path, row = tmp_path / "part" / "arm-0.json", {"rewards": [0.5] * 100}
    with file_size_limit(50), pytest.raises(OSError):
        write_row(path, row)
    assert not path.exists(), "else it would count as there for --missing"
    write_row(path, row)
    with file_size_limit(50), pytest.raises(OSError):
        write_row(path, {"rewards": [0.25] * 100})
    assert json.loads(path.read_text()) == row
    assert list(tmp_path.rglob("*.json")) == [path], "a report reads no half of a row"


@pytest.mark.parametrize(
    ("pass_1", "interval_k", "judged"),
    [
        ((0.2, 0.5), (0.008, 0.211), (False, True)),
        ((0.2, 0.5), (-0.1, 0.0), (False, True)),
        ((0.2, 0.2), (-0.2, -0.001), (True, False)),
    ],
)
def test_a_member_is_judged_by_both_figures(
    pass_1: tuple[float, float], interval_k: tuple[float, float], judged: tuple[bool, bool]
) -> None:
    assert walk.judge({"pass_1": pass_1, "interval_k": interval_k}) == judged


def test_the_report_of_a_walk_counts_who_fell_and_who_rose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "FOLDER", tmp_path)
    alice = {"rounds": 9, "pass_1": [0.2, 0.5], "pass_k": [0.7, 0.4], "interval_k": [-0.4, -0.2]}
    bob = {"rounds": 8, "pass_1": [0.2, 0.1], "pass_k": [0.7, 0.8], "interval_k": [0.0, 0.2]}
    for seed in range(2):
        row = {"arm": "readme", "seed": seed, "cpu_s": 1800.0, "nodes": [alice, bob]}
        write_row(tmp_path / f"readme-{seed}.json", row)
    table, verdict, spent = walk.report().split("\n\n")
    lines = table.splitlines()
    assert lines[0].endswith("| pass@8 falls | pass@1 rises |")
    assert lines[2].endswith("| -0.400 to -0.200 | yes | yes |") and lines[3].endswith("| no | no |")
    assert verdict == "readme: pass@8 falls for 2, pass@1 rises for 2 of 4 members."
    assert "2.0 CPU hours" in spent


def test_packed_rows_are_judged_beside_the_native_engine() -> None:
    rows = rounding.measure("starter")
    assert {text for text, *_ in rows} == {"words", "random"} and len(rows) == 20
    judged = {by: how for text, by, *_, how in rows if text == "words"}
    assert judged["the native engine"] == judged["packed rows"] == "taken"
    wrong = [how for by, how in judged.items() if by.startswith("packed rows, ")]
    assert wrong == ["refused", "refused"]
    assert all((nats <= allowed) == (how == "taken") for _, _, nats, allowed, _, how in rows)
