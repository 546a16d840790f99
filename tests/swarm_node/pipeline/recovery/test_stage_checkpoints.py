"""Checkpoints of the stages that a peer holds: when they are written, and which of them a stage goes on from."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from swarm_node.errors import UserError
from swarm_node.pipeline.recovery.stage_checkpoints import StageCheckpoints, newest, stage_files
from swarm_node.storage import checkpoints
from swarm_node.storage.checkpoints import CheckpointStore
from swarm_protocol.crew import Kept, Source
from tests.support.held_stages_world import ARCHITECTURE, KINDS, RUN, World, same, source
from tests.support.pipeline_crew import Saved


@KINDS
def test_a_restart_goes_on_from_its_checkpoints(saved: Saved, tmp_path: Path, kind: str, lora: bool) -> None:
    world = World(saved(kind, lora), 2, tmp_path)
    a = world.peer("a")
    a.take(1)
    a.train(1, seed=1, updates=7)
    optimizer = a.held_stages.workers[1].optimizer
    next(iter(optimizer.state_dict().values())).fill_(0.25)  # a moment
    moments = {name: tensor.clone() for name, tensor in optimizer.state_dict().items()}
    expected = a.weights(1)
    a.held_stages.save_all()
    a.held_stages = a.new_held_stages()
    assert a.held_stages.holding().checkpoints == (Kept(1, 7),) and a.held_stages.holding().live == ()
    way = source("snapshot", a, updates=7)
    assert a.take(1, way) == (7, way) and same(a.weights(1), expected)
    assert a.held_stages.workers[1].omega == 1.5
    assert (
        same(a.held_stages.workers[1].optimizer.state_dict(), moments)
        and a.held_stages.workers[1].optimizer.updates == 7
    )


def test_checkpoints_come_every_few_updates(saved: Saved, tmp_path: Path) -> None:
    world = World(saved("llama"), 2, tmp_path)
    a = world.peer("a")
    plan = world.plan(a, a)
    a.take(0)
    for seed in range(12):
        a.train(0, seed)
        a.held_stages.updated(plan)
    a.held_stages.save_all()
    assert a.held_stages.holding().checkpoints == (Kept(0, 12), Kept(0, 10))


def test_an_extra_checkpoint_spares_the_common_one(saved: Saved, tmp_path: Path) -> None:
    world = World(saved("llama"), 2, tmp_path)
    a, b = world.peer("a"), world.peer("b")
    for stage, peer in enumerate((a, b)):
        peer.take(stage)
        for updates in (10, 10, 7, 3):
            peer.train(stage, seed=1, updates=updates)
            if peer.held_stages.updates < 30 or peer is a:  # the other has not made this one yet
                peer.held_stages.updated(world.plan(a, b))
            if peer.held_stages.updates == 27 and peer is a:
                assert a.held_stages.save_soon()
            peer.held_stages.checkpoints.store(stage).wait()
    assert a.held_stages.holding().checkpoints == (Kept(0, 30), Kept(0, 27), Kept(0, 20))
    assert b.held_stages.holding().checkpoints == (Kept(1, 20), Kept(1, 10))


def test_checkpoints_tell_which_layers_all_stages_had(saved: Saved, tmp_path: Path) -> None:
    world = World(saved("llama"), 2, tmp_path)
    a = world.peer("a")
    usual, world.spans = world.spans, ((0, 1), (1, 5))
    assert usual != world.spans
    a.take(1)
    a.train(1, seed=1, updates=3)
    a.held_stages.save_all()
    last = newest(stage_files(tmp_path / "a" / "stages"))
    assert last is not None and (last.spans, last.architecture, last.run) == (world.spans, ARCHITECTURE, RUN)
    a.held_stages = a.new_held_stages()
    a.held_stages.recall(world.spans)
    assert a.held_stages.holding().replicas == (Kept(1, 3),)
    world.spans = usual  # a crew that began without this peer: its files are of no use, but no mistake either
    base = Source("base")
    assert a.take(1, source("snapshot", a, updates=3), base) == (0, base)
    assert any("it is stage 1 of 2 (layers 1-4 of 5)" in line for line in a.said)


def test_a_checkpoint_of_something_else_is_not_taken(saved: Saved, tmp_path: Path) -> None:
    world = World(saved("llama"), 2, tmp_path)
    a = world.peer("a")
    a.take(0)
    a.train(0, seed=1)
    a.held_stages.save_all()
    (tmp_path / "a" / "stages" / "0").rename(tmp_path / "a" / "stages" / "1")
    a.held_stages = a.new_held_stages()
    way = source("snapshot", a, updates=1)
    assert "stage 0 of 2" in str(a.take(1, way))
    base = Source("base")
    assert a.take(1, way, base) == (0, base)  # the other ways are tried all the same


def test_the_checkpoint_that_was_asked_for_is_loaded(saved: Saved, tmp_path: Path) -> None:
    world = World(saved("llama"), 2, tmp_path)
    a = world.peer("a")
    a.take(1)
    a.train(1, seed=1, updates=90)
    expected = a.weights(1)
    a.held_stages.save(1)
    a.train(1, seed=2, updates=10)
    a.held_stages.save_all()
    a.held_stages = a.new_held_stages()
    older, newer = (source("snapshot", a, updates=n) for n in (90, 100))
    assert a.take(1, older, newer) == (90, older) and same(a.weights(1), expected)
    assert a.take(1, newer) == (100, newer) and not same(a.weights(1), expected)
    assert a.take(1, source("snapshot", a, updates=95)) == "there is no checkpoint after update 95"


def test_an_own_checkpoint_comes_first_if_as_new(saved: Saved, tmp_path: Path) -> None:
    world = World(saved("llama"), 2, tmp_path)
    a, b = world.peer("a"), world.peer("b")
    b.take(1), b.train(1, seed=3, updates=80)
    a.take(1), a.train(1, seed=1, updates=100)
    a.held_stages.save_all()
    a.held_stages = a.new_held_stages()
    live, mine = source("live", b, updates=80), source("snapshot", a, updates=100)
    assert a.take(1, live, mine) == (80, live)  # what is newer than the crew is of a branch that it has left
    b.train(1, seed=3, updates=20)
    live = source("live", b, updates=100)
    assert a.take(1, live, mine) == (100, mine)  # with its moments


def test_nobody_waits_for_a_slow_disk(saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(saved("llama"), 2, tmp_path)
    a, writes = world.peer("a"), threading.Event()
    plan = world.plan(a, a)
    a.take(0)
    save_file = checkpoints.save_file
    monkeypatch.setattr(checkpoints, "save_file", lambda *args, **keys: writes.wait(100) and save_file(*args, **keys))
    every = world.config.checkpoints.every
    for _ in range(2):
        a.train(0, seed=1, updates=every)
        a.held_stages.updated(plan)
    assert a.said[-1] == f"no checkpoint of stage 0 after update {2 * every}: the last is not written yet"
    writes.set()
    a.held_stages.checkpoints.store(0).wait()
    a.train(0, seed=1, updates=1)
    a.held_stages.updated(plan)
    assert a.held_stages.holding().checkpoints == (Kept(0, every),)  # all stages after the same updates
    a.train(0, seed=1, updates=every)
    a.held_stages.updated(plan)
    a.held_stages.save_all()
    assert a.held_stages.holding().checkpoints == (Kept(0, 3 * every + 1), Kept(0, every))


def test_all_checkpoints_are_finished_though_one_fails(tmp_path: Path) -> None:
    closed = []

    class Full(CheckpointStore):
        def close(self) -> None:
            closed.append(self)
            raise UserError("no space left")

    stores: dict[int, CheckpointStore] = {stage: Full(tmp_path, 1, print) for stage in (0, 1)}
    with pytest.raises(UserError, match="no space left"):
        StageCheckpoints(tmp_path, ARCHITECTURE, 1, print, stores=stores).close()
    assert len(closed) == 2


def test_a_failed_checkpoint_is_written_again(saved: Saved, tmp_path: Path) -> None:
    world = World(saved("llama"), 2, tmp_path)
    a, stages = world.peer("a"), tmp_path / "a" / "stages"
    a.take(1)
    a.train(1, seed=1, updates=3)
    stages.parent.mkdir()
    stages.write_text("a file, not a folder")
    a.held_stages.save(1)
    a.held_stages.checkpoints.store(1).wait()
    stages.unlink()
    a.held_stages.save_all()
    assert a.held_stages.holding().checkpoints == (Kept(1, 3),)
    assert any("checkpoint of round 3" in line for line in a.said)
