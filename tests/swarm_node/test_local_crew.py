"""The processes of the other stages: each is started again by itself."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from swarm_node import local_crew
from swarm_node.config import NodeConfig, StagesConfig
from swarm_node.local_crew import Others


class Watched(Others):
    """Processes that do nothing but end with a given code, if one is given."""

    codes: dict[int, int]

    def _start(self, stage: int, link: str) -> None:
        self.started.append(stage)
        code = self.codes.get(stage)
        command = "import os; os.read(0, 1)" if code is None else f"raise SystemExit({code})"
        self._processes[stage] = subprocess.Popen([sys.executable, "-c", command], stdin=subprocess.PIPE)
        self._noted(stage)


@pytest.fixture
def others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(local_crew, "LOOK_S", 0.01)
    config = NodeConfig(stages=StagesConfig(count=4))
    said: list[str] = []
    found = Watched(config, tmp_path / "peers", lambda: "link", said.append)
    found.said, found.started, found.codes = said, [], {}
    return found


def until(condition) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_one_that_keeps_dying_does_not_delay_the_others(others: Watched) -> None:
    others.codes = {1: 1}
    others._wait_s[1] = 1000.0
    with others.running():
        until(lambda: 1 in others._again)
        assert others._again[1] > time.monotonic() + 500
        others._processes[2].kill()
        until(lambda: others.started.count(2) == 2)
    assert others.started.count(1) == 1 and others.started.count(3) == 1
    assert [line for line in others.said if "stage 2 ended with -9" in line]


def test_waits_grow_and_whoever_has_to_be_mended_is_left_alone(
    others: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_crew, "AGAIN_S", 0.01)
    others.codes = {1: 1, 2: 2}
    others._folder.mkdir()
    (others._folder / "2.log").write_text("so and so\ngive it another name\n")
    with others.running():
        until(lambda: others.started.count(1) >= 4)
    assert others.started.count(2) == 1 and others._wait_s[1] >= 0.08
    assert "the process of stage 2 ended: give it another name" in others.said
