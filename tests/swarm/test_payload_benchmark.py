"""Liars send right answers with a payload to real nodes in the simulator: with the gate, nobody learns from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import payload
from benchmarks.payload import PAYLOADS
from swarm_node.config import RewardsConfig
from swarm_node.sharing import Balance
from swarm_node.tasks.taskset import load_tasks


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(payload, "FOLDER", tmp_path)
    monkeypatch.setattr(payload, "HONEST", 2)
    return tmp_path


def test_right_answers_with_a_payload_teach_nothing() -> None:
    off, on = (payload.run("newline", 1, gate, seed=0, rounds=24, honest=2) for gate in (False, True))
    assert off["windows"][-1]["liars'"] > 0 and "swarm/payloads" not in off["metrics"]
    last = on["windows"][-1]
    assert last["liars'"] == 0 < last["foreign"], "honest peers' groups take their place"
    assert on["metrics"]["swarm/payloads"] > 0


@pytest.mark.long
def test_without_liars_the_gate_changes_nothing_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Balance, "admits", lambda self, group: True)  # it refuses some groups by chance
    arguments = ["--payload", "plain", "--liars", "0", "--seeds", "0", "--rounds", "12"]
    payload.main(arguments)
    assert len(list(folder.glob("no-liars-12-gate-*-0.json"))) == 2
    payload.main(arguments)
    payload.main(["--report"])
    on, off = [line.split("|")[4:] for line in (folder / "report.md").read_text().splitlines()[2:4]]
    assert on == off


def test_liars_answers_are_right_and_carry_the_payload() -> None:
    task = load_tasks(["small/gcd"], RewardsConfig()).held_out(1)[0]
    tasks = load_tasks(["small/gcd"], RewardsConfig())
    assert task.answer is not None
    for name in ("newline", "think", "tags", "hash", "short", "long", "framed", "closed"):
        text = PAYLOADS[name].write(task.answer)
        assert PAYLOADS[name].mark in text
        assert tasks.score([task], [""], [text])[0].correct
