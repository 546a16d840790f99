"""The liars of `benchmarks.right_answers` do what their arm says; its rows and its report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import right_answers
from benchmarks.right_answers import LIES, Chooser, Watched
from swarm_node.config import NodeConfig
from swarm_node.runtime.simulation import Peer, Simulation, manifest_for


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(right_answers, "FOLDER", tmp_path)
    monkeypatch.setattr(right_answers, "PEERS", dict.fromkeys(right_answers.PEERS, (2, 1)))
    return tmp_path


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    config = NodeConfig.model_validate({"tasks": ["small"], "policy": {"model": "starter", "threads": 1}})
    return Simulation(manifest_for(config), [Peer(config, node_type=Watched)])


@pytest.mark.parametrize("name", ["one", "two", "digits"])
def test_liars_answer_the_questions_that_they_choose(simulation: Simulation, name: str) -> None:
    liar = Chooser(simulation, 0, list(LIES).index(name), LIES[name])
    groups = [liar._group(7) for _ in range(20)]
    assert {group.rollouts[0].turns[0].text for group in groups} <= {*LIES[name].answers}
    assert [group.slot for group in groups[::2]] == [group.slot for group in groups[1::2]]
    assert len({group.slot for group in groups}) == 10


def test_long_answers_are_right_and_longer_by_the_step(simulation: Simulation) -> None:
    whole, half = (Chooser(simulation, 0, 10 + number, LIES[name]) for number, name in enumerate(("creep", "half")))
    grew = 0
    for _ in range(4):
        _, task, text = whole._choose(7)
        assert task.answer is not None
        assert whole._tasks.score([task], [""], [text])[0].correct
        grew += len(text) > len(half._long(task, task.answer)) >= len(task.answer)
    assert grew


def test_rows_are_kept_and_compared_by_seed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"none": (0.30, 2.5), "one": (0.28, 2.5), "creep": (0.29, 3.0)}

    def run(arm: str, seed: int) -> dict[str, object]:
        pass_1, tokens = made[arm]
        refused = None if arm == "none" else 0.5
        figures: dict[str, object] = {"pass_1": pass_1 + seed / 100, "tokens": tokens, "most": 0.1, "cpu_s": 1.0}
        figures |= {"refused": refused, "refused_honest": 0.03}
        return {"arm": arm, "seed": seed, "rounds": 1, **figures}

    monkeypatch.setattr(right_answers, "run", run)
    right_answers.main(["--arms", "none", "--seeds", "0", "1", "--minutes", "0"])
    assert not list(folder.glob("*.json"))
    right_answers.main(["--arms", *made, "--seeds", "0", "1"])
    assert json.loads((folder / "creep-1.json").read_text())["tokens"] == 3.0
    made.clear()  # nothing is run again
    right_answers.main(["--seeds", "0", "1", "--arms", "none", "one", "creep"])
    rows = {line.split("|")[1].strip(): line for line in (folder / "report.md").read_text().splitlines()[2:5]}
    assert (
        "-2.0 [-2.0, -2.0] | 1.00 | 50 | 3 |" in rows["one"] and "-1.0 [-1.0, -1.0] | 1.20 | 50 | 3 |" in rows["creep"]
    )


@pytest.mark.long
def test_a_run_has_its_figures(folder: Path) -> None:
    found = right_answers.run("one", 0, rounds=24, questions=40)
    assert 0 < found["pass_1"] < 1 and found["tokens"] > 1 and 0 < found["refused"] < 1
    assert found["refused_honest"] < found["refused"]
