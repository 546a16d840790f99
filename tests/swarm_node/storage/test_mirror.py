"""Copying checkpoints to a URL: what is copied and kept, and which failures are survived."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm_node.storage import checkpoints as checkpoints
from swarm_node.storage.checkpoints import CheckpointStore
from tests.support.mirrors import HANGS_S, SWARM, Says, checkpoint, copied, mirror, sent, tear, whole
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("away", "nothing_is_slow")


def test_checkpoints_are_copied_and_two_kept(tmp_path: Path) -> None:
    run, away, said = tmp_path / "run", tmp_path / "away", Says()
    one = mirror(f"file://{away}", run, said)
    one.start()
    there = away / SWARM[:16] / "a-aaaaaaaa" / "checkpoints"
    for round in (1, 2, 3):
        checkpoint(run / "checkpoints", round)
        until(lambda round=round: (there / f"round-{round:08}" / "SHA256SUMS").exists(), HANGS_S)
    until(lambda: len(list(there.iterdir())) == 2, HANGS_S)
    one.finish(HANGS_S)
    assert sorted(path.name for path in there.iterdir()) == ["round-00000002", "round-00000003"]
    assert said == []


def test_an_unwritable_place_is_said_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (tmp_path / "away").rmdir()
    (tmp_path / "away").write_text("a file, not a folder")
    checkpoint(run / "checkpoints", 1)
    said = copied(f"file://{tmp_path}/away", run)
    assert len(said) == 2
    assert said[0].startswith(f"checkpoints do not get to file://{tmp_path}/away (")
    assert said[1] == f"the last checkpoint is not at file://{tmp_path}/away; there: none of this start"
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["round-00000001"]


def test_without_the_right_to_remove_it_writes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, away, said = tmp_path / "run", tmp_path / "away", Says()
    one = mirror(f"file://{away}", run, said)

    def rm(*args: Any, **options: Any) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(one.bucket.fs, "rm", rm)
    one.start()
    there = away / SWARM[:16] / "a-aaaaaaaa" / "checkpoints"
    for round in (1, 2, 3, 4):
        checkpoint(run / "checkpoints", round)
        until(lambda round=round: (there / f"round-{round:08}" / "SHA256SUMS").exists(), HANGS_S)
    one.finish(HANGS_S)
    assert len(said) == 1 and "old copies stay at" in said[0] and "not yours" in said[0]
    assert len(list(there.iterdir())) == 4


def test_a_restored_copy_is_not_sent_again(url: str, tmp_path: Path) -> None:
    run, said = tmp_path / "new", Says()
    checkpoint(tmp_path / "old" / "checkpoints", 1)
    assert copied(url, tmp_path / "old") == []
    with pytest.MonkeyPatch.context() as patch:
        one = mirror(url, run, said)
        one.restore()
        files = sent(one, patch)
        one.start()
        one.finish(HANGS_S)
        again = mirror(url, run, said)  # the same volume, later
        again.start()
        again.finish(HANGS_S)
        assert files == []
        checkpoint(run / "checkpoints", 2)
        assert copied(url, run) == []
        assert {file.split("/")[0] for file in files} == {"round-00000002"}
    assert len(said) == 1


def test_copies_of_another_peer_become_ones_own(url: str, tmp_path: Path) -> None:
    checkpoint(tmp_path / "old" / "checkpoints", 1)
    copied(url, tmp_path / "old")
    one = mirror(url, tmp_path / "new", [], peer="12D3KooWbbbbbbbb")
    one.restore()
    with pytest.MonkeyPatch.context() as patch:
        files = sent(one, patch)
        one.start()
        one.finish(HANGS_S)
    assert files[-1] == "round-00000001/SHA256SUMS"


def test_an_overwritten_copy_counts_when_whole(url: str, tmp_path: Path) -> None:
    run, said = tmp_path / "run", Says()
    checkpoint(run / "checkpoints", 1)
    copied(url, run)
    checkpoint(run / "checkpoints", 2)
    copied(url, run)
    checkpoint(tmp_path / "other" / "checkpoints", 2, model="n")
    with pytest.MonkeyPatch.context() as patch:
        one = mirror(url, tmp_path / "other", said)

        def put_file(source: str, target: str) -> None:
            raise OSError("the machine was taken back")

        patch.setattr(one.bucket.fs, "put_file", put_file)
        one.start()
        one.finish(HANGS_S)
    assert "taken back" in said[0]
    assert whole(one, "a-aaaaaaaa") == ["round-00000001"]


def test_an_unreadable_folder_leaves_others_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_node.storage.mirror.NEW_CHECKPOINT_CHECK_S", 0.01)
    monkeypatch.setattr("swarm_node.storage.mirror.COPY_RETRY_S", 0.0)
    run, away, said = tmp_path / "run", tmp_path / "away", Says()
    (run / "stages").mkdir(parents=True)
    (run / "stages" / "3").write_text("a file, not a folder")
    one = mirror(f"file://{away}", run, said)
    looks, rounds = list[Path](), one.here.rounds

    def look(folder: Path) -> list[Path]:
        looks.append(folder)
        return rounds(folder)

    monkeypatch.setattr(one.here, "rounds", look)
    one.start()
    for round in (1, 2, 3):
        checkpoint(run / "checkpoints", round)
        until(
            lambda round=round: (
                (away / SWARM[:16] / f"a-aaaaaaaa/checkpoints/round-{round:08}/SHA256SUMS").exists()
                and looks.count(run / "stages" / "3") > 2 * round
            ),
            HANGS_S,
        )
    one.finish(HANGS_S)
    assert len(said) == 2 and "(stages/3: NotADirectoryError" in said[0]
    assert said[1] == f"the last checkpoint is not at file://{away}; there: checkpoints/round-00000003"


def test_a_failed_listing_does_not_end_the_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_node.storage.mirror.NEW_CHECKPOINT_CHECK_S", 0.01)
    run, said = tmp_path / "run", Says()
    checkpoint(run / "checkpoints", 1)
    one, looks = mirror(f"file://{tmp_path}/away", run, said), list[int]()
    folders = one.here.folders
    one.start()

    def fail() -> list[Path]:
        looks.append(1)
        if len(looks) < 3:
            raise OSError(errno.EIO, "Input/output error")
        return folders()

    monkeypatch.setattr(one.here, "folders", fail)
    until(lambda: len(looks) > 3, HANGS_S)
    checkpoint(run / "checkpoints", 2)
    one.finish(HANGS_S)
    assert len(said) == 2 and "Input/output error" in said[0]
    assert said[1] == f"checkpoints get to file://{tmp_path}/away again (stages)"
    assert list(tmp_path.glob("away/*/a-aaaaaaaa/checkpoints/round-00000002/SHA256SUMS"))


def test_a_hanging_copy_is_mentioned_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answered: threading.Event
) -> None:
    monkeypatch.setattr("swarm_node.storage.mirror.SLOW_S", 0.05)
    run, said = tmp_path / "run", Says()
    checkpoint(run / "checkpoints", 1)
    one = mirror(f"file://{tmp_path}/away", run, said)
    put = one.bucket.fs.put_file

    def put_file(source: str, target: str) -> None:
        assert answered.wait(HANGS_S)
        put(source, target)

    monkeypatch.setattr(one.bucket.fs, "put_file", put_file)
    one.start()
    until(lambda: said, HANGS_S)
    answered.set()
    one.finish(HANGS_S)
    assert said == [
        f"checkpoints/round-00000001 is not at file://{tmp_path}/away after 0 minutes of copying, which go on"
    ]


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP, errno.EMLINK])
def test_copies_need_no_hard_links(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: Path, target: Path) -> None:
        raise OSError(code, os.strerror(code), str(source), None, str(target))

    monkeypatch.setattr("swarm_node.storage.mirror.os.link", link)
    run = tmp_path / "run"
    checkpoint(run / "checkpoints", 1)
    assert copied(f"file://{tmp_path}/away", run) == []
    assert list(tmp_path.glob("away/*/a-aaaaaaaa/checkpoints/round-00000001/SHA256SUMS"))
    assert not list(run.rglob(".*"))


def test_nothing_is_copied_beneath_an_unmounted_share(
    away: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_node.storage.mirror.NEW_CHECKPOINT_CHECK_S", 0.01)
    monkeypatch.setattr("swarm_node.storage.mirror.COPY_RETRY_S", 0.0)
    run, said = tmp_path / "run", Says()
    one = mirror(f"file://{away}", run, said)
    away.rmdir()
    one.start()
    checkpoint(run / "checkpoints", 1)
    until(lambda: said, HANGS_S)
    assert not away.exists() and "FileNotFoundError" in said[0]
    away.mkdir()
    one.finish(HANGS_S)
    assert said[1:] == [f"checkpoints get to file://{away} again (checkpoints)"]
    assert list(away.glob("*/a-aaaaaaaa/checkpoints/round-00000001/SHA256SUMS"))


def test_a_torn_checkpoint_replaces_no_whole_copy(url: str, tmp_path: Path) -> None:
    run, said = tmp_path / "run", Says()
    checkpoint(run / "checkpoints", 1)
    checkpoint(run / "checkpoints", 2)
    assert copied(url, run) == []
    tear(run / "checkpoints" / "round-00000002")
    said += copied(url, run)
    assert len(said) == 1 and said[0].startswith(
        f"checkpoints/round-00000002 is not copied to {url}: policy.safetensors"
    )
    one = mirror(url, tmp_path / "new", said)
    one.restore()
    assert said[1:] == [f"continues from the checkpoints of a-aaaaaaaa at {url}: checkpoints/round-00000002"]
    assert whole(one, "a-aaaaaaaa") == ["round-00000001", "round-00000002"]


def test_the_last_written_is_copied_whatever_its_number(tmp_path: Path) -> None:
    run, away, said = tmp_path / "run", tmp_path / "away", Says()
    there = away / SWARM[:16] / "a-aaaaaaaa" / "checkpoints"
    checkpoint(run / "checkpoints", 50)
    one = mirror(f"file://{away}", run, said)
    one.start()
    for round in (50, 31, 32):  # gone back to 30
        if round < 50:
            store = CheckpointStore(run / "checkpoints", 3, print)
            store.save(round, {"policy": {"w": torch.full((3,), float(round))}}, {"model": "m"})
            store.close()
        until(lambda round=round: (there / f"round-{round:08}" / "SHA256SUMS").exists(), HANGS_S)
    one.finish(HANGS_S)
    assert sorted(path.name for path in there.iterdir()) == ["round-00000031", "round-00000032"]
    assert said == []


@pytest.mark.parametrize(("times", "newest"), [((5.0, 9.0), 31), ((9.0, 5.0), 50)])
def test_of_earlier_checkpoints_the_last_made_is_copied(
    times: tuple[float, float], newest: int, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    store = CheckpointStore(run / "checkpoints", 3, print)
    for round, made in zip((50, 31), times, strict=True):
        store.save(round, {"policy": {"w": torch.zeros(3)}}, {"model": "m", "time": made})
    store.close()
    assert copied(f"file://{tmp_path}/away", run) == []
    [there] = tmp_path.glob("away/*/a-aaaaaaaa/checkpoints/*")
    assert there.name == f"round-{newest:08}"


def test_a_wait_at_the_end_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_node.storage.mirror.MENTION_S", 0.05)
    run, said = tmp_path / "run", Says()
    checkpoint(run / "checkpoints", 1)
    one = mirror(f"file://{tmp_path}/away", run, said)
    put = one.bucket.fs.put_file

    def put_file(source: str, target: str) -> None:
        until(lambda: said, HANGS_S)
        put(source, target)

    monkeypatch.setattr(one.bucket.fs, "put_file", put_file)
    one.start()
    one.finish(HANGS_S)
    assert said == [
        f"waiting until the last checkpoint is at file://{tmp_path}/away, {HANGS_S:.0f} s at most; "
        "a signal cuts that to seconds"
    ]


def test_three_copies_of_a_stage_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_node.storage.mirror.NEW_CHECKPOINT_CHECK_S", 0.01)
    run, away = tmp_path / "run", tmp_path / "away"
    there = away / SWARM[:16] / "a-aaaaaaaa" / "stages" / "0"

    def updates(*ones: int) -> list[int]:
        one = mirror(f"file://{away}", run, [])
        one.start()
        for update in ones:
            checkpoint(run / "stages" / "0", update)
            until((there / f"round-{update:08}" / "SHA256SUMS").exists, HANGS_S)
        one.finish(HANGS_S)
        return sorted(int(path.name[6:]) for path in there.iterdir())

    assert updates(80, 100, 120, 127) == [100, 120, 127]
    assert 120 in updates(140)
    (there / "round-00000150").mkdir()  # an upload that was broken off
    assert updates(160, 180) == [140, 160, 180]


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE, errno.ESTALE])
def test_a_read_error_does_not_make_checkpoints_torn(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_node.storage.mirror.NEW_CHECKPOINT_CHECK_S", 0.01)
    monkeypatch.setattr("swarm_node.storage.mirror.COPY_RETRY_S", 0.0)
    run, said, failed = tmp_path / "run", Says(), list[Path]()
    digest = checkpoints._digest

    def fail(path: Path) -> str:
        if path.parent.name == ".leaving-round-00000001" and len(failed) < 3:
            failed.append(path)
            raise OSError(code, os.strerror(code), str(path))
        return digest(path)

    checkpoint(run / "checkpoints", 1)
    monkeypatch.setattr(checkpoints, "_digest", fail)
    one = mirror(f"file://{tmp_path}/away", run, said)
    one.start()
    until(lambda: len(failed) == 3, HANGS_S)
    one.finish(HANGS_S)
    assert len(said) == 2 and os.strerror(code) in said[0] and "again (checkpoints)" in said[1]
    assert list(tmp_path.glob("away/*/a-aaaaaaaa/checkpoints/round-00000001/SHA256SUMS"))


def test_an_uncopied_last_checkpoint_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, said = tmp_path / "run", Says()
    checkpoint(run / "checkpoints", 1)
    one = mirror(f"file://{tmp_path}/away", run, said)
    one.start()
    until(lambda: list(tmp_path.glob("away/*/a-aaaaaaaa/checkpoints/round-00000001/SHA256SUMS")), HANGS_S)
    copy = one._copy_newest

    def and_then(folder: Path, where: str) -> None:
        copy(folder, where)
        checkpoint(run / "checkpoints", 2)

    monkeypatch.setattr(one, "_copy_newest", and_then)
    monkeypatch.setattr("swarm_node.storage.mirror.NEW_CHECKPOINT_CHECK_S", 600.0)
    one.finish(HANGS_S)
    assert said == [f"the last checkpoint is not at file://{tmp_path}/away; there: checkpoints/round-00000001"]
