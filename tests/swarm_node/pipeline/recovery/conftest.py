"""What the tests of stages that a peer holds share."""

from __future__ import annotations

import pytest

from swarm_node.pipeline.recovery import rebuild
from tests.support.pipeline_crew import Saved, saver


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return saver(tmp_path_factory)


@pytest.fixture(autouse=True)
def clock_moves_when_an_assignment_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebuild, "WAIT_S", 0.0)
