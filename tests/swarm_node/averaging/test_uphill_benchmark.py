"""The benchmark of a partner that goes uphill: every arm runs, and the report compares them by seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import averaging_uphill as uphill


def test_every_arm_runs_and_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uphill, "FOLDER", tmp_path)
    for name, value in {"STEPS": 1, "BATCH": 2, "OWN": 1, "HELD_OUT": 14}.items():
        monkeypatch.setattr(uphill, name, value)
    world = uphill.World()
    for arm in uphill.ARMS:
        figures = uphill.run(world, arm, 0, 3, 3e-4)
        assert 0 <= figures["pass_1"] <= 1 and 0 < figures["loss"] < 10
        honest, _ = uphill.PEERS[uphill.TEN if arm.endswith(uphill.TEN) else ""]
        assert sum(figures["counts"].values()) == 3 * honest or arm.startswith("none"), "all nodes in three rounds"
        uphill.path_of(arm, 0, 3, 3e-4).write_text(json.dumps(figures))
    rows = uphill.report().splitlines()[2:]
    assert [row.split("|")[3].strip() for row in rows] == uphill.ARMS


def test_a_liar_that_goes_uphill_raises_the_loss() -> None:
    world = uphill.World()
    node = uphill.Honest(world, "0", 3e-4)
    node.train()
    name, theirs = uphill.Liar(world, "uphill", 0, 0).answers(0, [node])
    held = world.tasks.held_out(32)
    assert name == "liar 0" and world.loss(theirs, held) > world.loss(node.fast, held) + 0.05
