"""Restoring checkpoints from a URL: which copies are taken, and which are refused."""

from __future__ import annotations

import errno
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from swarm_node.errors import UserError
from swarm_node.storage import checkpoints as checkpoints
from swarm_node.storage.checkpoints import read_checkpoint
from tests.support.mirrors import HANGS_S, SWARM, Says, checkpoint, copied, mirror, tear, whole

pytestmark = pytest.mark.usefixtures("away", "nothing_is_slow")


def test_a_new_machine_goes_on_from_the_copies(url: str, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    checkpoint(old / "checkpoints", 10)
    checkpoint(old / "checkpoints", 20)
    checkpoint(old / "stages" / "3", 7)
    assert copied(url, old) == []
    said: Says = []
    mirror(url, new, said, peer="12D3KooWbbbbbbbb").restore(crew=True)
    assert said == [
        f"continues from the checkpoints of a-aaaaaaaa at {url}: checkpoints/round-00000020, stages/3/round-00000007"
    ]
    for folder, round in (("checkpoints", 20), ("stages/3", 7)):
        found = read_checkpoint(new / folder / f"round-{round:08}", lambda state: None)
        assert found.tensors["policy"]["w"].tolist() == [round] * 3
    assert not list(new.rglob(".*"))


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

    monkeypatch.setattr(one.bucket.fs, "find", find)
    with pytest.raises(UserError, match="no credentials.*leave out --checkpoint-to to begin anew"):
        one.restore()


def test_a_silent_place_is_a_user_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answered: threading.Event
) -> None:
    one = mirror("memory://x", tmp_path / "run", [])

    def find(*args: Any) -> list[str]:
        answered.wait(HANGS_S)
        return []

    monkeypatch.setattr(one.bucket.fs, "find", find)
    monkeypatch.setattr("swarm_node.storage.bucket.ANSWER_S", 0.1)
    with pytest.raises(UserError, match="no answer within 0 s.*leave out --checkpoint-to to begin anew"):
        one.restore()


def test_a_lone_run_goes_on_by_its_name(url: str, tmp_path: Path) -> None:
    checkpoint(tmp_path / "a" / "checkpoints", 500)
    copied(url, tmp_path / "a", "a", "")
    said: Says = []
    for name in ("b", "a"):
        mirror(url, tmp_path / f"new-{name}", said, name, "").restore()
    assert said == [f"continues from the checkpoints of a at {url}: checkpoints/round-00000500"]
    assert not (tmp_path / "new-b").exists()


@pytest.mark.parametrize("error", [FileNotFoundError("NoSuchKey"), OSError(errno.ESTALE, "Stale file handle")])
def test_a_copy_removed_meanwhile_gives_way(error: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, there = f"file://{tmp_path}/away", tmp_path / "away" / SWARM[:16] / "a-aaaaaaaa" / "checkpoints"
    checkpoint(tmp_path / "old" / "checkpoints", 2)
    checkpoint(tmp_path / "later" / "checkpoints", 4)
    copied(url, tmp_path / "old")
    said: Says = []
    one = mirror(url, tmp_path / "new", said)
    get = one.bucket.fs.get_file

    def get_file(source: str, target: str) -> None:
        if "round-00000002" in source and source.endswith("policy.safetensors"):
            shutil.rmtree(there)
            shutil.copytree(tmp_path / "later" / "checkpoints", there)
            raise error
        get(source, target)

    monkeypatch.setattr(one.bucket.fs, "get_file", get_file)
    one.restore()
    assert said == [f"continues from the checkpoints of a-aaaaaaaa at {url}: checkpoints/round-00000004"]
    assert [path.name for path in (tmp_path / "new" / "checkpoints").iterdir()] == ["round-00000004"]


def test_a_copy_that_keeps_vanishing_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, said = f"file://{tmp_path}/away", Says()
    checkpoint(tmp_path / "old" / "checkpoints", 1)
    checkpoint(tmp_path / "old" / "checkpoints", 2)
    checkpoint(tmp_path / "old" / "stages" / "3", 7)
    shutil.copytree(tmp_path / "old", tmp_path / "away" / SWARM[:16] / "a-aaaaaaaa")
    one = mirror(url, tmp_path / "new", said)
    get = one.bucket.fs.get_file

    def get_file(source: str, target: str) -> None:
        if "round-00000002" in source:
            raise FileNotFoundError(source)
        get(source, target)

    monkeypatch.setattr(one.bucket.fs, "get_file", get_file)
    one.restore(crew=True)
    assert "a-aaaaaaaa/checkpoints/round-00000002 is left alone: it was removed meanwhile" in said[0]
    assert said[1].endswith("checkpoints/round-00000001, stages/3/round-00000007") and len(said) == 2


def test_a_list_read_again_starts_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, said = f"file://{tmp_path}/away", Says()
    checkpoint(tmp_path / "old" / "checkpoints", 2)
    checkpoint(tmp_path / "old" / "stages" / "3", 7)
    copied(url, tmp_path / "old")
    one, gone = mirror(url, tmp_path / "new", said), list[str]()
    get = one.bucket.fs.get_file

    def get_file(source: str, target: str) -> None:
        if "/stages/" in source and not gone:
            gone.append(source)
            raise FileNotFoundError(source)
        get(source, target)

    monkeypatch.setattr(one.bucket.fs, "get_file", get_file)
    one.restore(crew=True)
    assert gone and len(said) == 1
    assert said[0].endswith("checkpoints/round-00000002, stages/3/round-00000007")


def test_all_copies_of_crew_stages_come_back(url: str, tmp_path: Path) -> None:
    run, new, said = tmp_path / "run", tmp_path / "new", Says()
    for round in (39, 40):
        for folder in ("checkpoints", "stages/0"):
            checkpoint(run / folder, round)
            assert copied(url, run) == []
    one = mirror(url, new, said)
    one.restore(crew=True)
    assert said == [
        f"continues from the checkpoints of a-aaaaaaaa at {url}: "
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
        f"continues from the checkpoints of a-aaaaaaaa at {url}: checkpoints/round-00000001",
    ]
    read_checkpoint(run / "checkpoints" / "round-00000001", lambda state: None)


def test_a_file_that_stalls_is_a_user_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answered: threading.Event
) -> None:
    url, said = f"file://{tmp_path}/away", Says()
    checkpoint(tmp_path / "old" / "checkpoints", 7)
    assert copied(url, tmp_path / "old") == []
    one = mirror(url, tmp_path / "new", said)
    get = one.bucket.fs.get_file

    def get_file(source: str, target: str) -> None:
        if source.endswith("policy.safetensors"):
            answered.wait(HANGS_S)
        get(source, target)

    monkeypatch.setattr(one.bucket.fs, "get_file", get_file)
    monkeypatch.setattr("swarm_node.storage.bucket.ANSWER_S", 3.0)
    monkeypatch.setattr("swarm_node.storage.mirror.MENTION_S", 0.05)
    with pytest.raises(UserError, match=r"nothing more of \S+/round-00000007/policy.safetensors within 3 s.*leave out"):
        one.restore()
    assert f"fetching a-aaaaaaaa/checkpoints/round-00000007 from {url}: 0.0 MB" in said
    assert not list((tmp_path / "new").rglob("round-*"))


def test_leftovers_of_a_killed_process_are_swept(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for leftover in (".arriving-round-00000005", ".leaving-round-00000004"):
        for folder in ("checkpoints", "stages/3"):
            (run / folder / leftover).mkdir(parents=True)
    mirror(f"file://{tmp_path}/away", run, []).restore()
    assert not list(run.rglob(".*"))


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
    assert said[-1] == f"continues from the checkpoints of a at {url}: checkpoints/round-00000005"


def test_another_runs_copies_are_left_alone(tmp_path: Path) -> None:
    url, said = f"file://{tmp_path}/away", Says()
    for peer in ("12D3KooWaaaaaaaa", "12D3KooWcccccccc"):
        checkpoint(tmp_path / peer / "checkpoints", 10)
        copied(url, tmp_path / peer, peer=peer)
    mirror(url, tmp_path / "new", said, peer="12D3KooWbbbbbbbb").restore(lambda state: "another model")
    assert len(said) == 2 and all("is left alone: another model" in line for line in said)


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
        f"continues from the checkpoints of a-aaaaaaaa at {url}: stages/1/round-00000040, stages/2/round-00000040",
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
    assert said == [f"continues from the checkpoints of a-aaaaaaaa at {url}: stages/0/round-00000040"]


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

    monkeypatch.setattr(one.bucket.fs, "find", find)
    if torn:
        tear(run / "stages" / "1" / "round-00000040")
        with pytest.raises(UserError, match="no credentials"):
            one.restore(crew=True)
    else:
        one.restore(crew=True)
        [line] = said
        assert line == "cannot read memory://x (RuntimeError: no credentials): going on with the stages that are here"
