"""Runs that nothing can come of end before they train, in one sentence."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from swarm_node.cli.app import app
from swarm_node.config import NodeConfig
from swarm_node.errors import TemporaryError, UserError
from swarm_node.pipeline.assemble import check_disk_room
from swarm_node.pipeline.footprint import Footprint
from swarm_node.policy.loading import prepare
from swarm_node.storage.checkpoints import CheckpointStore
from swarm_node.storage.rundir import RunDir
from swarm_node.swarm import join
from tests.support.disks import STARTER_BYTES, leave
from tests.support.fake_transport import FakeTransport, address
from tests.support.starting import train_locally


def config(folder: Path, **more: Any) -> NodeConfig:
    few = {"groups": 2, "group_size": 2, "max_new_tokens": 4}
    return NodeConfig.model_validate(
        {"run_dir": str(folder / "run"), "rounds": 1, "rollouts": few, "eval": {"questions": 0}, **more}
    )


def test_a_disk_too_small_for_checkpoints_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(monkeypatch, 2 * STARTER_BYTES - 2**16)
    with pytest.raises(UserError, match=r"run/checkpoints for two checkpoints of 5\.0 MiB: 10\.0 MiB are free"):
        train_locally(config(tmp_path))
    assert not list(tmp_path.glob("run/checkpoints/round-*"))
    assert not (tmp_path / "run/metrics.jsonl").exists() or not (tmp_path / "run/metrics.jsonl").read_text()
    leave(monkeypatch, 2 * STARTER_BYTES + 2**16)
    assert train_locally(config(tmp_path)) == 0
    (made,) = tmp_path.glob("run/checkpoints/round-*")
    size = sum(file.stat().st_size for file in made.iterdir())
    assert STARTER_BYTES <= size <= STARTER_BYTES + 2**16, "what was said is what it takes"
    leave(monkeypatch, STARTER_BYTES + 2**16)
    assert train_locally(config(tmp_path, rounds=2)) == 0, "beside one that is there, there is room for the next"


def test_a_stage_needs_room_for_two_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crew = config(tmp_path, pipeline={"stages": 2, "stage": 1, "crew": "c"})
    run, footprint = RunDir(crew.directory), Footprint(crew, prepare(crew.policy))
    each = footprint.checkpoints(((0, 1), (1, 2)))
    assert sum(each) >= STARTER_BYTES
    leave(monkeypatch, 2 * each[1])
    check_disk_room(crew, run, footprint)
    with pytest.raises(UserError, match="no room"):
        check_disk_room(crew, run, footprint, everybody=True)
    leave(monkeypatch, 2 * each[1] - 1)
    with pytest.raises(TemporaryError, match=r"no room at .*run/stages for two checkpoints"):
        check_disk_room(crew, run, footprint)


def test_room_is_checked_at_the_future_directory(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    CheckpointStore(tmp_path / "not/yet/there", 2, print).check_room(1)
    with pytest.raises(UserError, match="--run-dir"):
        CheckpointStore(tmp_path / "not/yet/there", 2, print).check_room(free)


def test_minutes_end_the_wait_for_a_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def visitor(*arguments: object) -> Iterator[FakeTransport]:
        yield FakeTransport()

    monkeypatch.setattr(join, "visitor", visitor)
    link = f"swarm://{'ab' * 32}?peer={address(1)}"
    told = CliRunner().invoke(app, ["join", link, "--minutes", "0.01", "--run-dir", str(tmp_path / "run"), "--json"])
    assert told.exit_code == 1, told.output
    assert f"0.01 minutes are over before training began: nobody answers at {address(1)}" in told.stderr
    assert '{"error": ' in told.stdout
