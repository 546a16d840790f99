"""Two nodes with one key: the second ends and says why, the first says it and goes on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from swarm_node.cli.app import USER_ERROR
from tests.support.processes import LOCAL, Start, make_manifest

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]


def test_a_key_that_is_used_twice_is_told(start: Start, tmp_path: Path) -> None:
    hub = start("bootstrap", str(make_manifest(tmp_path)), *LOCAL, run_dir=tmp_path / "hub", sets=())
    first = start("join", hub.link(), "--name", "alice", run_dir=tmp_path / "a")
    first.until(lambda: first.last("swarm/peers") == 1)
    first.until_rounds(5)
    shutil.copy(tmp_path / "a/identity.key", tmp_path / "copy.key")
    second = start("join", hub.link(), "--identity", str(tmp_path / "copy.key"), run_dir=tmp_path / "b")
    assert second.ended() == USER_ERROR
    assert "runs with this node's key" in second.output and "was there first" in second.output
    first.until(lambda: "runs with this node's key" in first.output)
    assert first.output.count("runs with this node's key") == 1
    rounds = first.rounds
    first.until(lambda: first.rounds > rounds)
