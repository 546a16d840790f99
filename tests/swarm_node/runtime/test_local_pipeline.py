"""The processes of the other stages: each is started again by itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm_node.config import NetworkConfig, NodeConfig, PipelineConfig
from swarm_node.runtime import local_pipeline as local_crew
from swarm_node.runtime.local_pipeline import StageProcesses
from tests.support.waiting import until

HANGS_S = 100.0
"""Nothing takes so long, unless it hangs."""
CODES = {1: 1, 2: 0, 3: 2}
"""Stage -> what its process ends with at once; those of other stages live."""


class Watched(StageProcesses):
    """Processes that do nothing, on a clock that the test moves."""

    def __init__(self, folder: Path) -> None:
        self.said: list[str] = []
        self.clock = 0.0
        self.started: dict[int, list[float]] = {stage: [] for stage in range(1, 5)}
        self.newest: dict[int, subprocess.Popen[bytes]] = {}
        super().__init__(
            NodeConfig(pipeline=PipelineConfig(stages=5)), folder, lambda: "link", self.said.append, lambda: self.clock
        )

    def launch(self, stage: int, link: str) -> subprocess.Popen[bytes]:
        self.started[stage].append(self.clock)
        code = CODES.get(stage)
        command = "import os; os.read(0, 1)" if code is None else f"raise SystemExit({code})"
        self.newest[stage] = subprocess.Popen([sys.executable, "-ISc", command], stdin=subprocess.PIPE)
        return self.newest[stage]

    def ends(self, stage: int) -> int:
        return sum(f"process of stage {stage} ended" in line for line in self.said)


@pytest.fixture
def others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setattr(local_crew, "PROCESS_CHECK_S", 0.01)
    folder = tmp_path / "peers"
    folder.mkdir()
    (folder / "3.log").write_text("so and so\ngive it another name\n")
    watched = Watched(folder)
    with watched.running():
        yield watched


def test_each_stages_process_restarts_on_its_own(others: Watched) -> None:
    for times, again in enumerate((1.0, 3.0, 7.0), 1):
        until(lambda times=times: others.ends(1) == times, HANGS_S)  # type: ignore[misc]
        others.clock = again
        until(lambda times=times: len(others.started[1]) == times + 1, HANGS_S)  # type: ignore[misc]
    until(lambda: others.ends(1) == 4, HANGS_S)
    others.newest[4].kill()
    until(lambda: others.ends(4) == 1, HANGS_S)
    others.clock = 8.0
    until(lambda: len(others.started[4]) == 2, HANGS_S)
    others.clock = 100.0  # it has lived for long: its next death is as its first
    until(lambda: len(others.started[1]) == 5, HANGS_S)
    others.newest[4].kill()
    until(lambda: others.ends(4) == 2, HANGS_S)
    others.clock = 101.0
    until(lambda: len(others.started[4]) == 3, HANGS_S)
    assert others.started[1] == [0.0, 1.0, 3.0, 7.0, 100.0] and others.started[4] == [0.0, 8.0, 101.0]
    assert any("stage 4 ended with -9" in line for line in others.said)


def test_a_process_that_is_over_is_left_alone(others: Watched) -> None:
    until(lambda: others.ends(1) == others.ends(2) == others.ends(3) == 1, HANGS_S)
    others.clock = 9.0  # the run may be over, and this process not know it yet
    until(lambda: others.ends(1) == 2, HANGS_S)
    assert others.started[2] == [0.0]
    others.clock = 1000.0
    until(lambda: len(others.started[2]) == 2 and len(others.started[1]) == 3, HANGS_S)
    assert others.started[3] == [0.0]
    assert "the process of stage 3 ended: give it another name" in others.said


def test_each_stage_has_a_key_of_its_own() -> None:
    config = NodeConfig(pipeline=PipelineConfig(stages=2), network=NetworkConfig(identity="mounted.key"))
    assert local_crew.private(config).network.identity is None
