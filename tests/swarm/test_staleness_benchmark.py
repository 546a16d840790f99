"""The benchmark of staleness: groups are trained on as late as an arm says, and the table reads its rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import sharing, staleness
from benchmarks.sharing_settings import SETTINGS, Setting
from benchmarks.staleness import ARMS, ON_POLICY

UPDATES = 8


@pytest.fixture
def setting(small: Callable[[Setting], Setting], monkeypatch: pytest.MonkeyPatch) -> Setting:
    monkeypatch.setattr(sharing, "QUESTIONS", 4)
    return small(SETTINGS["plain"])


@pytest.mark.parametrize("name", [ON_POLICY, "delay 4 none", "delay 4 truncated_sequence"])
def test_a_learner_trains_so_many_updates_late(setting: Setting, name: str) -> None:
    late = ARMS[name]
    figures = staleness.run(setting, late, 0, updates=UPDATES)
    assert json.loads(json.dumps(figures)) == figures
    (kind,) = figures["kinds"]
    assert (kind["rounds"], kind["updates"]) == (UPDATES + late.delay, UPDATES)
    assert kind["lag"] == sum(min(i, late.delay) for i in range(UPDATES)) / UPDATES
    assert ("off_policy/stale/ess" in kind["off_policy"]) == bool(late.delay)


def test_peers_of_unequal_speed(setting: Setting) -> None:
    late = replace(ARMS["speed 10 icepop"], slower=4)
    fast, slow = staleness.run(setting, late, 0, seconds=30.0)["kinds"]
    assert 2 <= slow["rounds"] < fast["rounds"] / 3
    for kind in (fast, slow):
        assert kind["lag"] == 0 and kind["off_policy"]["off_policy/foreign_logp"] < 0
        assert 0 < kind["off_policy"]["off_policy/foreign/ess"] <= 1


def test_report_compares_by_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staleness, "FOLDER", tmp_path)
    measured = {"off_policy/stale/ess": 0.5, "off_policy/foreign/ess": 0.25}
    for arm, seed, level in (
        (ON_POLICY, 0, 0.3),
        (ON_POLICY, 1, 0.5),
        ("delay 64 none", 1, 0.4),
        ("speed 10 recorded", 0, 0.2),
        ("speed 10 truncated", 0, 0.25),
    ):
        held = {"pass_1": level, "pass_8": 0.5}
        kind = {"held_out": held, "level": level, "lag": 3.0, "off_policy": measured}
        row = {"setting": "plain", "arm": arm, "seed": seed, "kinds": [kind] * (2 if ARMS[arm].slower else 1)} | {
            "cpu_s": 3600.0
        }
        path = staleness.path_of("plain", arm, seed)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(row))
    lines = [line.split(" | ") for line in staleness.report("plain").splitlines() if "|" in line]
    cells = {line[0].removeprefix("| "): line[1:] for line in lines}
    assert cells[ON_POLICY][:4] == ["2", "3.0", "0.400", ""]
    assert cells["delay 64 none"][3:5] == ["-10.0 [-10.0, -10.0]", "0.400"]
    assert cells["speed 10 truncated, slow"][3] == "+5.0 [+5.0, +5.0]"
    assert cells["speed 10 truncated"][-1] == "0.25 |" and cells["delay 64 none"][-1] == "0.5 |"
