"""A new file is whole or not there, and replaces no other."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swarm_node.errors import TemporaryError, UserError
from swarm_node.storage.new_file import check_new_file, write_new_file

LINES = [b"one\n", b"two\n"]


def no_link(*arguments: Any) -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")


@pytest.fixture(params=[True, False], ids=["links", "no links"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A place for a file, on file systems with and without hard links."""
    if not request.param:
        monkeypatch.setattr(os, "link", no_link)
    found = tmp_path / "new/answers.jsonl"
    check_new_file(found)
    return found


def test_a_file_is_written_alone(path: Path) -> None:
    write_new_file(path, LINES)
    assert path.read_bytes() == b"one\ntwo\n" and [*path.parent.iterdir()] == [path]


def test_a_file_that_appeared_meanwhile_stays(path: Path) -> None:
    path.write_bytes(b"precious")
    with pytest.raises(UserError, match="answers.jsonl exists already; choose another --out"):
        write_new_file(path, LINES)
    assert path.read_bytes() == b"precious" and [*path.parent.iterdir()] == [path]


def full(*arguments: Any) -> Iterator[bytes]:
    yield b"one\n"
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_nothing(path: Path) -> None:
    with pytest.raises(TemporaryError, match=f"disk full: cannot write {path}"):
        write_new_file(path, full())
    assert [*path.parent.iterdir()] == []


def test_a_copy_without_room_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "link", no_link)
    monkeypatch.setattr(shutil, "copyfileobj", lambda source, copy: copy.writelines(full()))
    with pytest.raises(TemporaryError, match="disk full: cannot write .*/new;"):
        write_new_file(tmp_path / "new", LINES)
    assert [*tmp_path.iterdir()] == []


def test_a_dangling_link_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "new").symlink_to("nowhere")
    with pytest.raises(UserError, match="exists already"):
        check_new_file(tmp_path / "new")
