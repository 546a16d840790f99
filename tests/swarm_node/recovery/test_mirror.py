"""Copies of snapshots at a URL: which are there, which are gone on from, what is survived."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm_node.errors import UserError
from swarm_node.recovery.mirror import Mirror
from swarm_node.recovery.snapshots import SnapshotStore, read_snapshot

SWARM = "5" * 64
Says = list[str]


def snapshot(folder: Path, round: int, model: str = "m") -> None:
    store = SnapshotStore(folder, 2, print)
    store.save(round, {"policy": {"w": torch.full((3,), float(round))}}, {"model": model})
    store.close()


def mirror(url: str, run: Path, said: Says, name: str = "a", peer: str = "12D3KooWaaaaaaaa") -> Mirror:
    return Mirror(url, SWARM, name, peer, run, said.append)


def copied(url: str, run: Path, name: str = "a", peer: str = "12D3KooWaaaaaaaa") -> Says:
    """All that `run` has, copied to the end."""
    said: Says = []
    one = mirror(url, run, said, name, peer)
    one.start()
    one.finish(30)
    return said


def until(what: Callable[[], Any]) -> None:
    end = time.monotonic() + 20
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}/away" if request.param == "file" else f"memory://{tmp_path.name}/away"


def test_a_new_machine_goes_on_from_what_the_old_one_left(url: str, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    snapshot(old / "snapshots", 10)
    snapshot(old / "snapshots", 20)
    snapshot(old / "stages" / "3", 7)
    assert copied(url, old) == []
    said: Says = []
    mirror(url, new, said, peer="12D3KooWbbbbbbbb").restore(crew=True)
    assert said == [f"going on from what a-aaaaaaaa left at {url}: snapshots/round-00000020, stages/3/round-00000007"]
    for folder, round in (("snapshots", 20), ("stages/3", 7)):
        found = read_snapshot(new / folder / f"round-{round:08}", lambda state: None)
        assert found.tensors["policy"]["w"].tolist() == [round] * 3
    assert not list(new.rglob(".*"))


def test_two_are_kept_there_and_each_is_copied_as_it_comes(tmp_path: Path) -> None:
    run, away, said = tmp_path / "run", tmp_path / "away", Says()
    one = mirror(f"file://{away}", run, said)
    one.start()
    there = away / SWARM[:16] / "a-aaaaaaaa" / "snapshots"
    for round in (1, 2, 3):
        snapshot(run / "snapshots", round)
        until(lambda round=round: (there / f"round-{round:08}" / "SHA256SUMS").exists())
    until(lambda: len(list(there.iterdir())) == 2)
    one.finish(30)
    assert sorted(path.name for path in there.iterdir()) == ["round-00000002", "round-00000003"]
    assert said == []


def test_own_copies_come_first_then_those_of_the_name_then_the_newest(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/away"
    for name, peer, round in (("a", "1" * 8, 5), ("a", "2" * 8, 6), ("a-b", "3" * 8, 8), ("b", "4" * 8, 9)):
        run = tmp_path / f"{name}-{peer}"
        snapshot(run / "snapshots", round)
        assert copied(url, run, name, peer) == []

    def restored(name: str, peer: str, crew: bool = False) -> list[str]:
        run = tmp_path / f"new-{name}-{peer}-{crew}"
        mirror(url, run, [], name, peer).restore(crew=crew)
        return [path.name for path in run.glob("snapshots/*")]

    assert restored("a", "1" * 8) == ["round-00000005"]
    assert restored("a", "9" * 8) == ["round-00000006"]
    assert restored("c", "9" * 8) == ["round-00000009"]
    assert restored("c", "9" * 8, crew=True) == []


def test_who_has_snapshots_of_its_own_reads_nothing_there(tmp_path: Path) -> None:
    run = tmp_path / "run"
    snapshot(run / "snapshots", 1)
    mirror("file:///proc/1/mem", run, []).restore()
    assert [path.name for path in (run / "snapshots").iterdir()] == ["round-00000001"]


def test_what_is_torn_unfinished_or_of_another_model_is_left_alone(tmp_path: Path) -> None:
    run, new, said = tmp_path / "run", tmp_path / "new", Says()
    away = tmp_path / "away"
    snapshot(run / "snapshots", 1)
    snapshot(run / "snapshots", 2)
    shutil.copytree(run, away / SWARM[:16] / "a-aaaaaaaa")
    there = away / SWARM[:16] / "a-aaaaaaaa" / "snapshots"
    with (there / "round-00000002" / "policy.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    shutil.copytree(there / "round-00000001", there / "round-00000003")
    (there / "round-00000003" / "SHA256SUMS").unlink()
    shutil.copytree(there / "round-00000001", there / "round-00000004")
    (there / "round-00000004" / "state.json").write_text(json.dumps({"state": {"model": "other"}}))
    (there / "round-00000001" / "..evil").write_text("not ours")
    mirror(f"file://{away}", new, said).restore(lambda state: None if state["model"] == "m" else "another model")
    assert sorted(path.name for path in (new / "snapshots").iterdir()) == ["round-00000001"]
    assert sorted(path.name for path in (new / "snapshots/round-00000001").iterdir()) == [
        "SHA256SUMS",
        "policy.safetensors",
        "state.json",
    ]
    assert len(said) == 3
    assert "round-00000004 is left alone: another model" in said[0]
    assert "round-00000002 is left alone: policy.safetensors does not have the digest" in said[1]


@pytest.mark.parametrize("line", ["x", "0  ../../../etc/passwd", "0  /etc/passwd"])
def test_sums_that_name_other_files_read_none_of_them(line: str, tmp_path: Path) -> None:
    run, said = tmp_path / "run", Says()
    snapshot(run / "snapshots", 1)
    there = tmp_path / "away" / SWARM[:16] / "a-aaaaaaaa"
    shutil.copytree(run, there)
    sums = there / "snapshots/round-00000001/SHA256SUMS"
    sums.write_text(f"{sums.read_text()}{line}\n")
    mirror(f"file://{tmp_path}/away", tmp_path / "new", said).restore()
    assert len(said) == 1 and "is left alone" in said[0] and "root:" not in said[0]


def test_an_empty_place_is_a_new_beginning(url: str, tmp_path: Path) -> None:
    said: Says = []
    mirror(url, tmp_path / "run", said).restore()
    assert said == [] and not (tmp_path / "run").exists()


def test_what_cannot_be_read_is_the_users_to_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = mirror("memory://x", tmp_path / "run", [])

    def find(*args: Any) -> list[str]:
        raise RuntimeError("no credentials")

    monkeypatch.setattr(one._fs, "find", find)
    with pytest.raises(UserError, match="no credentials.*leave out --snapshot-to to begin anew"):
        one.restore()


@pytest.mark.parametrize(
    ("url", "message"),
    [("s3://bucket/x", r"pip install 'swarm-node\[s3\]'"), ("nosuch://x", "use file://")],
)
def test_a_protocol_that_nothing_speaks_is_the_users_to_mend(url: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        mirror(url, tmp_path, [])


def test_a_place_that_cannot_be_written_is_said_once_and_costs_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (tmp_path / "away").write_text("a file, not a folder")
    snapshot(run / "snapshots", 1)
    said = copied(f"file://{tmp_path}/away", run)
    assert len(said) == 2
    assert said[0].startswith(f"snapshots do not get to file://{tmp_path}/away (")
    assert said[1] == f"the last snapshot is not at file://{tmp_path}/away; there: none of this start"
    assert [path.name for path in (run / "snapshots").iterdir()] == ["round-00000001"]
