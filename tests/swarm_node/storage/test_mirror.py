"""Copies of checkpoints at a URL: which are there, which are gone on from, what is survived."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm_node.errors import UserError
from swarm_node.storage import checkpoints as checkpoints
from swarm_node.storage.checkpoints import CheckpointStore, read_checkpoint
from swarm_node.storage.mirror import Mirror, in_time
from tests.support.waiting import until

SWARM = "5" * 64
Says = list[str]
HANGS_S = 100.0
"""Seconds; a limit for what hangs, not for what is slow."""


def checkpoint(folder: Path, round: int, model: str = "m") -> None:
    store = CheckpointStore(folder, 2, print)
    store.save(round, {"policy": {"w": torch.full((3,), float(round))}}, {"model": model})
    store.close()


def mirror(url: str, run: Path, said: Says, name: str = "a", peer: str = "12D3KooWaaaaaaaa") -> Mirror:
    return Mirror(url, SWARM, name, peer, run, said.append)


def copied(url: str, run: Path, name: str = "a", peer: str = "12D3KooWaaaaaaaa") -> Says:
    """All that `run` has, copied to the end."""
    said: Says = []
    one = mirror(url, run, said, name, peer)
    one.start()
    one.finish(HANGS_S)
    return said


def whole(one: Mirror, owner: str) -> list[str]:
    """Rounds of which `owner` has whole copies."""
    one.fs.invalidate_cache()
    files = [file.split("/")[-4:] for file in one.fs.find(one.place)]
    return sorted(
        name for of, folder, name, file in files if (of, folder, file) == (owner, "checkpoints", "SHA256SUMS")
    )


@pytest.fixture(autouse=True)
def nothing_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_node.storage.mirror.SAY_S", 600.0)


@pytest.fixture(autouse=True)
def away(tmp_path: Path) -> Path:
    """The share."""
    folder = tmp_path / "away"
    folder.mkdir()
    return folder


@pytest.fixture
def answered() -> Iterator[threading.Event]:
    """A driver hangs until this is set; the end of the test sets it."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}/away" if request.param == "file" else f"memory://{tmp_path.name}/away"


def test_a_new_machine_goes_on_from_the_copies(url: str, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    checkpoint(old / "checkpoints", 10)
    checkpoint(old / "checkpoints", 20)
    checkpoint(old / "stages" / "3", 7)
    assert copied(url, old) == []
    said: Says = []
    mirror(url, new, said, peer="12D3KooWbbbbbbbb").restore(crew=True)
    assert said == [f"going on from what a-aaaaaaaa left at {url}: checkpoints/round-00000020, stages/3/round-00000007"]
    for folder, round in (("checkpoints", 20), ("stages/3", 7)):
        found = read_checkpoint(new / folder / f"round-{round:08}", lambda state: None)
        assert found.tensors["policy"]["w"].tolist() == [round] * 3
    assert not list(new.rglob(".*"))


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


def test_own_copies_come_first_then_the_names(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/away"
    for name, peer, round in (("a", "1" * 8, 5), ("a", "2" * 8, 6), ("a-b", "3" * 8, 8), ("b", "4" * 8, 9)):
        run = tmp_path / f"{name}-{peer}"
        checkpoint(run / "checkpoints", round)
        assert copied(url, run, name, peer) == []

    def restored(name: str, peer: str, crew: bool = False) -> list[str]:
        run = tmp_path / f"new-{name}-{peer}-{crew}"
        mirror(url, run, [], name, peer).restore(crew=crew)
        return [path.name for path in run.glob("checkpoints/*")]

    assert restored("a", "1" * 8) == ["round-00000005"]
    assert restored("a", "9" * 8) == ["round-00000006"]
    assert restored("c", "9" * 8) == ["round-00000009"]
    assert restored("c", "9" * 8, crew=True) == []


def test_a_run_with_checkpoints_reads_no_copies(tmp_path: Path) -> None:
    run = tmp_path / "run"
    checkpoint(run / "checkpoints", 1)
    mirror("file:///proc/1/mem", run, []).restore()
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["round-00000001"]
    with pytest.raises(UserError, match="cannot read"):
        mirror("file:///proc/1/mem", tmp_path / "other", []).restore()


def test_torn_unfinished_and_foreign_copies_are_left_alone(tmp_path: Path) -> None:
    run, new, said = tmp_path / "run", tmp_path / "new", Says()
    away = tmp_path / "away"
    checkpoint(run / "checkpoints", 1)
    checkpoint(run / "checkpoints", 2)
    shutil.copytree(run, away / SWARM[:16] / "a-aaaaaaaa")
    there = away / SWARM[:16] / "a-aaaaaaaa" / "checkpoints"
    with (there / "round-00000002" / "policy.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    shutil.copytree(there / "round-00000001", there / "round-00000003")
    (there / "round-00000003" / "SHA256SUMS").unlink()
    shutil.copytree(there / "round-00000001", there / "round-00000004")
    (there / "round-00000004" / "state.json").write_text(json.dumps({"state": {"model": "other"}}))
    (there / "round-00000001" / "..evil").write_text("not ours")
    mirror(f"file://{away}", new, said).restore(lambda state: None if state["model"] == "m" else "another model")
    assert sorted(path.name for path in (new / "checkpoints").iterdir()) == ["round-00000001"]
    assert sorted(path.name for path in (new / "checkpoints/round-00000001").iterdir()) == [
        "SHA256SUMS",
        "policy.safetensors",
        "state.json",
    ]
    assert len(said) == 3
    assert "round-00000004 is left alone: another model" in said[0]
    assert "round-00000002 is left alone: policy.safetensors does not have the digest" in said[1]


@pytest.mark.parametrize("line", ["x", "0  ../../../etc/passwd", "0  /etc/passwd"])
def test_sums_naming_other_files_read_none(line: str, tmp_path: Path) -> None:
    run, said = tmp_path / "run", Says()
    checkpoint(run / "checkpoints", 1)
    there = tmp_path / "away" / SWARM[:16] / "a-aaaaaaaa"
    shutil.copytree(run, there)
    sums = there / "checkpoints/round-00000001/SHA256SUMS"
    sums.write_text(f"{sums.read_text()}{line}\n")
    mirror(f"file://{tmp_path}/away", tmp_path / "new", said).restore()
    assert len(said) == 1 and "is left alone" in said[0] and "root:" not in said[0]


def test_an_empty_place_is_a_new_beginning(url: str, tmp_path: Path) -> None:
    said: Says = []
    mirror(url, tmp_path / "run", said).restore()
    assert said == [] and not (tmp_path / "run").exists()


def test_an_unreadable_place_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = mirror("memory://x", tmp_path / "run", [])

    def find(*args: Any) -> list[str]:
        raise RuntimeError("no credentials")

    monkeypatch.setattr(one.fs, "find", find)
    with pytest.raises(UserError, match="no credentials.*leave out --checkpoint-to to begin anew"):
        one.restore()


@pytest.mark.parametrize(
    ("url", "message"),
    [("s3://bucket/x", r"pip install 'swarm-node\[s3\]'"), ("nosuch://x", "use file://")],
)
def test_an_unknown_protocol_is_a_user_error(url: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        mirror(url, tmp_path, [])


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


def test_a_silent_place_is_a_user_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answered: threading.Event
) -> None:
    one = mirror("memory://x", tmp_path / "run", [])

    def find(*args: Any) -> list[str]:
        answered.wait(HANGS_S)
        return []

    monkeypatch.setattr(one.fs, "find", find)
    monkeypatch.setattr("swarm_node.storage.mirror.ANSWER_S", 0.1)
    with pytest.raises(UserError, match="no answer within 0 s.*leave out --checkpoint-to to begin anew"):
        one.restore()


def test_without_the_right_to_remove_it_writes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, away, said = tmp_path / "run", tmp_path / "away", Says()
    one = mirror(f"file://{away}", run, said)

    def rm(*args: Any, **options: Any) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(one.fs, "rm", rm)
    one.start()
    there = away / SWARM[:16] / "a-aaaaaaaa" / "checkpoints"
    for round in (1, 2, 3, 4):
        checkpoint(run / "checkpoints", round)
        until(lambda round=round: (there / f"round-{round:08}" / "SHA256SUMS").exists(), HANGS_S)
    one.finish(HANGS_S)
    assert len(said) == 1 and "old copies stay at" in said[0] and "not yours" in said[0]
    assert len(list(there.iterdir())) == 4


def sent(one: Mirror, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files that `one` sends from now on."""
    files, put = list[str](), one.fs.put_file

    def put_file(source: str, target: str) -> None:
        files.append("/".join(target.rsplit("/", 2)[1:]))
        put(source, target)

    monkeypatch.setattr(one.fs, "put_file", put_file)
    return files


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

        patch.setattr(one.fs, "put_file", put_file)
        one.start()
        one.finish(HANGS_S)
    assert "taken back" in said[0]
    assert whole(one, "a-aaaaaaaa") == ["round-00000001"]


def test_a_lone_run_goes_on_by_its_name(url: str, tmp_path: Path) -> None:
    checkpoint(tmp_path / "a" / "checkpoints", 500)
    copied(url, tmp_path / "a", "a", "")
    said: Says = []
    for name in ("b", "a"):
        mirror(url, tmp_path / f"new-{name}", said, name, "").restore()
    assert said == [f"going on from what a left at {url}: checkpoints/round-00000500"]
    assert not (tmp_path / "new-b").exists()


@pytest.mark.parametrize("error", [FileNotFoundError("NoSuchKey"), OSError(errno.ESTALE, "Stale file handle")])
def test_a_copy_removed_meanwhile_gives_way(error: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, there = f"file://{tmp_path}/away", tmp_path / "away" / SWARM[:16] / "a-aaaaaaaa" / "checkpoints"
    checkpoint(tmp_path / "old" / "checkpoints", 2)
    checkpoint(tmp_path / "later" / "checkpoints", 4)
    copied(url, tmp_path / "old")
    said: Says = []
    one = mirror(url, tmp_path / "new", said)
    get = one.fs.get_file

    def get_file(source: str, target: str) -> None:
        if "round-00000002" in source and source.endswith("policy.safetensors"):
            shutil.rmtree(there)
            shutil.copytree(tmp_path / "later" / "checkpoints", there)
            raise error
        get(source, target)

    monkeypatch.setattr(one.fs, "get_file", get_file)
    one.restore()
    assert said == [f"going on from what a-aaaaaaaa left at {url}: checkpoints/round-00000004"]
    assert [path.name for path in (tmp_path / "new" / "checkpoints").iterdir()] == ["round-00000004"]


def test_a_copy_that_keeps_vanishing_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, said = f"file://{tmp_path}/away", Says()
    checkpoint(tmp_path / "old" / "checkpoints", 1)
    checkpoint(tmp_path / "old" / "checkpoints", 2)
    checkpoint(tmp_path / "old" / "stages" / "3", 7)
    shutil.copytree(tmp_path / "old", tmp_path / "away" / SWARM[:16] / "a-aaaaaaaa")
    one = mirror(url, tmp_path / "new", said)
    get = one.fs.get_file

    def get_file(source: str, target: str) -> None:
        if "round-00000002" in source:
            raise FileNotFoundError(source)
        get(source, target)

    monkeypatch.setattr(one.fs, "get_file", get_file)
    one.restore(crew=True)
    assert "a-aaaaaaaa/checkpoints/round-00000002 is left alone: it was removed meanwhile" in said[0]
    assert said[1].endswith("checkpoints/round-00000001, stages/3/round-00000007") and len(said) == 2


def test_a_list_read_again_starts_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, said = f"file://{tmp_path}/away", Says()
    checkpoint(tmp_path / "old" / "checkpoints", 2)
    checkpoint(tmp_path / "old" / "stages" / "3", 7)
    copied(url, tmp_path / "old")
    one, gone = mirror(url, tmp_path / "new", said), list[str]()
    get = one.fs.get_file

    def get_file(source: str, target: str) -> None:
        if "/stages/" in source and not gone:
            gone.append(source)
            raise FileNotFoundError(source)
        get(source, target)

    monkeypatch.setattr(one.fs, "get_file", get_file)
    one.restore(crew=True)
    assert gone and len(said) == 1
    assert said[0].endswith("checkpoints/round-00000002, stages/3/round-00000007")


def test_an_unreadable_folder_leaves_others_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_node.storage.mirror.LOOK_S", 0.01)
    monkeypatch.setattr("swarm_node.storage.mirror.AGAIN_S", 0.0)
    run, away, said = tmp_path / "run", tmp_path / "away", Says()
    (run / "stages").mkdir(parents=True)
    (run / "stages" / "3").write_text("a file, not a folder")
    one = mirror(f"file://{away}", run, said)
    looks, rounds = list[Path](), one._rounds

    def look(folder: Path) -> list[Path]:
        looks.append(folder)
        return rounds(folder)

    monkeypatch.setattr(one, "_rounds", look)
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
    monkeypatch.setattr("swarm_node.storage.mirror.LOOK_S", 0.01)
    run, said = tmp_path / "run", Says()
    checkpoint(run / "checkpoints", 1)
    one, looks = mirror(f"file://{tmp_path}/away", run, said), list[int]()
    folders = one._folders
    one.start()

    def fail() -> list[Path]:
        looks.append(1)
        if len(looks) < 3:
            raise OSError(errno.EIO, "Input/output error")
        return folders()

    monkeypatch.setattr(one, "_folders", fail)
    until(lambda: len(looks) > 3, HANGS_S)
    checkpoint(run / "checkpoints", 2)
    one.finish(HANGS_S)
    assert len(said) == 1 and "Input/output error" in said[0]
    assert list(tmp_path.glob("away/*/a-aaaaaaaa/checkpoints/round-00000002/SHA256SUMS"))


def test_a_hanging_copy_is_mentioned_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answered: threading.Event
) -> None:
    monkeypatch.setattr("swarm_node.storage.mirror.SLOW_S", 0.05)
    run, said = tmp_path / "run", Says()
    checkpoint(run / "checkpoints", 1)
    one = mirror(f"file://{tmp_path}/away", run, said)
    put = one.fs.put_file

    def put_file(source: str, target: str) -> None:
        assert answered.wait(HANGS_S)
        put(source, target)

    monkeypatch.setattr(one.fs, "put_file", put_file)
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


def test_all_copies_of_crew_stages_come_back(url: str, tmp_path: Path) -> None:
    run, new, said = tmp_path / "run", tmp_path / "new", Says()
    for round in (39, 40):
        for folder in ("checkpoints", "stages/0"):
            checkpoint(run / folder, round)
            assert copied(url, run) == []
    one = mirror(url, new, said)
    one.restore(crew=True)
    assert said == [
        f"going on from what a-aaaaaaaa left at {url}: "
        "checkpoints/round-00000040, stages/0/round-00000040, stages/0/round-00000039"
    ]
    assert {path.name for path in (new / "stages" / "0").iterdir()} == {"round-00000039", "round-00000040"}
    assert one._done["stages/0"] == ["round-00000039", "round-00000040"]


@pytest.mark.parametrize("there", ["a file", "a loop", "a file in it"])
def test_an_unreadable_folder_is_not_taken_for_empty(there: str, tmp_path: Path) -> None:
    away = tmp_path / "away"
    if there != "a file in it":
        away.rmdir()
    if there == "a file":
        away.write_text("not a folder")
    elif there == "a loop":
        away.symlink_to(away)
    else:
        (away / SWARM[:16]).write_text("not a folder")
    with pytest.raises(UserError, match="cannot read file:.*leave out --checkpoint-to to begin anew"):
        mirror(f"file://{away}", tmp_path / "run", []).restore()


@pytest.mark.parametrize("place", ["share/runs", "file/runs"])
def test_a_missing_folder_is_refused_at_the_start(place: str, tmp_path: Path) -> None:
    (tmp_path / "share").mkdir()  # where nothing is mounted
    (tmp_path / "file").write_text("")
    said = f"there is no such folder; mount the share that it is on, or make it there: mkdir {tmp_path}/{place}"
    with pytest.raises(UserError, match=said):
        mirror(f"file://{tmp_path}/{place}", tmp_path / "run", [])


def test_nothing_is_copied_beneath_an_unmounted_share(
    away: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_node.storage.mirror.LOOK_S", 0.01)
    monkeypatch.setattr("swarm_node.storage.mirror.AGAIN_S", 0.0)
    run, said = tmp_path / "run", Says()
    one = mirror(f"file://{away}", run, said)
    away.rmdir()
    one.start()
    checkpoint(run / "checkpoints", 1)
    until(lambda: said, HANGS_S)
    assert not away.exists() and "FileNotFoundError" in said[0]
    away.mkdir()
    one.finish(HANGS_S)
    assert len(said) == 1 and list(away.glob("*/a-aaaaaaaa/checkpoints/round-00000001/SHA256SUMS"))


def tear(round: Path) -> None:
    with (round / "policy.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")


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
    assert said[1:] == [f"going on from what a-aaaaaaaa left at {url}: checkpoints/round-00000002"]
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


def test_a_run_with_torn_checkpoints_takes_copies(url: str, tmp_path: Path) -> None:
    run, said = tmp_path / "run", Says()
    checkpoint(run / "checkpoints", 1)
    assert copied(url, run) == []
    checkpoint(run / "checkpoints", 2)
    for round in (1, 2):
        tear(run / "checkpoints" / f"round-{round:08}")
    mirror(url, run, said).restore()
    assert said == [
        f"no checkpoint in {run} is whole (checkpoints/round-00000002: policy.safetensors does not have the digest in "
        f"SHA256SUMS): looking for one at {url}",
        f"going on from what a-aaaaaaaa left at {url}: checkpoints/round-00000001",
    ]
    read_checkpoint(run / "checkpoints" / "round-00000001", lambda state: None)


def test_a_file_that_stalls_is_a_user_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answered: threading.Event
) -> None:
    url, said = f"file://{tmp_path}/away", Says()
    checkpoint(tmp_path / "old" / "checkpoints", 7)
    assert copied(url, tmp_path / "old") == []
    one = mirror(url, tmp_path / "new", said)
    get = one.fs.get_file

    def get_file(source: str, target: str) -> None:
        if source.endswith("policy.safetensors"):
            answered.wait(HANGS_S)
        get(source, target)

    monkeypatch.setattr(one.fs, "get_file", get_file)
    monkeypatch.setattr("swarm_node.storage.mirror.ANSWER_S", 3.0)
    monkeypatch.setattr("swarm_node.storage.mirror.SAY_S", 0.05)
    with pytest.raises(UserError, match=r"nothing more of \S+/round-00000007/policy.safetensors within 3 s.*leave out"):
        one.restore()
    assert f"fetching a-aaaaaaaa/checkpoints/round-00000007 from {url}: 0.0 MB" in said
    assert not list((tmp_path / "new").rglob("round-*"))


def test_what_comes_slowly_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_node.storage.mirror.ANSWER_S", 0.2)
    monkeypatch.setattr("swarm_node.storage.mirror.TICK_S", 0.05)
    sizes, whole = iter(range(1, 1000)), threading.Event()

    def grown() -> int:
        size = next(sizes)
        if size == 20:
            whole.set()
        return size

    assert in_time(lambda: whole.wait(HANGS_S), grown)


def test_leftovers_of_a_killed_process_are_swept(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for leftover in (".arriving-round-00000005", ".leaving-round-00000004"):
        for folder in ("checkpoints", "stages/3"):
            (run / folder / leftover).mkdir(parents=True)
    mirror(f"file://{tmp_path}/away", run, []).restore()
    assert not list(run.rglob(".*"))


def test_a_wait_at_the_end_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_node.storage.mirror.SAY_S", 0.05)
    run, said = tmp_path / "run", Says()
    checkpoint(run / "checkpoints", 1)
    one = mirror(f"file://{tmp_path}/away", run, said)
    put = one.fs.put_file

    def put_file(source: str, target: str) -> None:
        until(lambda: said, HANGS_S)
        put(source, target)

    monkeypatch.setattr(one.fs, "put_file", put_file)
    one.start()
    one.finish(HANGS_S)
    assert said == [
        f"waiting until the last checkpoint is at file://{tmp_path}/away, {HANGS_S:.0f} s at most; "
        "a signal cuts that to seconds"
    ]


def test_three_copies_of_a_stage_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_node.storage.mirror.LOOK_S", 0.01)
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


def test_another_runs_copies_under_this_name_are_kept(url: str, tmp_path: Path) -> None:
    for round in (10, 20):
        checkpoint(tmp_path / "old" / "checkpoints", round)
        assert copied(url, tmp_path / "old", peer="") == []
    said: Says = []
    one = mirror(url, tmp_path / "new", said, peer="")

    def accept(state: dict[str, Any]) -> str | None:
        return None if state["model"] == "other" else "its base model is not other"

    message = rf"another run \(a/checkpoints/round-00000020: its base model is not other\).*remove {SWARM[:16]}/a there"
    with pytest.raises(UserError, match=message):
        one.restore(accept)
    assert len(said) == 2 and whole(one, "a") == ["round-00000010", "round-00000020"]
    checkpoint(tmp_path / "third" / "checkpoints", 5, model="other")
    copied(url, tmp_path / "third", peer="")
    one.restore(accept)
    assert said[-1] == f"going on from what a left at {url}: checkpoints/round-00000005"


def test_another_runs_copies_are_left_alone(tmp_path: Path) -> None:
    url, said = f"file://{tmp_path}/away", Says()
    for peer in ("12D3KooWaaaaaaaa", "12D3KooWcccccccc"):
        checkpoint(tmp_path / peer / "checkpoints", 10)
        copied(url, tmp_path / peer, peer=peer)
    mirror(url, tmp_path / "new", said, peer="12D3KooWbbbbbbbb").restore(lambda state: "another model")
    assert len(said) == 2 and all("is left alone: another model" in line for line in said)


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE, errno.ESTALE])
def test_a_read_error_does_not_make_checkpoints_torn(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_node.storage.mirror.LOOK_S", 0.01)
    monkeypatch.setattr("swarm_node.storage.mirror.AGAIN_S", 0.0)
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
    assert len(said) == 1 and os.strerror(code) in said[0]
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
    monkeypatch.setattr("swarm_node.storage.mirror.LOOK_S", 600.0)
    one.finish(HANGS_S)
    assert said == [f"the last checkpoint is not at file://{tmp_path}/away; there: checkpoints/round-00000001"]


def test_missing_and_torn_crew_stages_come_back(url: str, tmp_path: Path) -> None:
    run, said = tmp_path / "run", Says()
    for stage in (0, 1, 2):
        checkpoint(run / "stages" / str(stage), 40)
    checkpoint(run / "checkpoints", 20)
    assert copied(url, run) == []
    shutil.rmtree(run / "stages" / "1")
    tear(run / "stages" / "2" / "round-00000040")
    checkpoint(run / "stages" / "0", 60)
    mirror(url, run, said).restore(crew=True)
    torn = (
        f"{run}/stages/2 is whole (stages/2/round-00000040: policy.safetensors does not have the digest in SHA256SUMS)"
    )
    assert said == [
        f"no checkpoint in {torn}: looking for one at {url}",
        f"going on from what a-aaaaaaaa left at {url}: stages/1/round-00000040, stages/2/round-00000040",
    ]
    for stage in (1, 2):
        read_checkpoint(run / "stages" / str(stage) / "round-00000040", lambda state: None)
    assert len(list((run / "stages" / "0").iterdir())) == 2


def test_a_leads_rounds_are_not_its_stages(url: str, tmp_path: Path) -> None:
    run, said = tmp_path / "run", Says()
    checkpoint(run / "checkpoints", 20)
    checkpoint(run / "stages" / "0", 40)
    assert copied(url, run) == []
    shutil.rmtree(run / "stages")
    mirror(url, run, said, peer="12D3KooWbbbbbbbb").restore(crew=True)
    assert said == [f"going on from what a-aaaaaaaa left at {url}: stages/0/round-00000040"]


def test_a_crew_member_takes_no_namesakes_stages(tmp_path: Path) -> None:
    url, said = f"file://{tmp_path}/away", Says()
    checkpoint(tmp_path / "a" / "stages" / "0", 40)
    copied(url, tmp_path / "a")
    run = tmp_path / "b"
    checkpoint(run / "stages" / "1", 40)
    mirror(url, run, said, peer="12D3KooWbbbbbbbb").restore(crew=True)
    assert said == [] and [path.name for path in (run / "stages").iterdir()] == ["1"]


@pytest.mark.parametrize("torn", [False, True])
def test_an_unreadable_place_stops_incomplete_crew_members_only(
    torn: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, said = tmp_path / "run", Says()
    for stage in (0, 1):
        checkpoint(run / "stages" / str(stage), 40)
    one = mirror("memory://x", run, said)

    def find(*args: Any) -> list[str]:
        raise RuntimeError("no credentials")

    monkeypatch.setattr(one.fs, "find", find)
    if torn:
        tear(run / "stages" / "1" / "round-00000040")
        with pytest.raises(UserError, match="no credentials"):
            one.restore(crew=True)
    else:
        one.restore(crew=True)
        [line] = said
        assert line == "cannot read memory://x (RuntimeError: no credentials): going on with the stages that are here"
