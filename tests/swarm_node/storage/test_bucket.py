"""A place for copies at a URL: which URLs are taken, and how long an answer is waited for."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

from swarm_node.errors import TemporaryError, UserError
from swarm_node.install import extra_command
from swarm_node.storage import checkpoints as checkpoints
from swarm_node.storage.bucket import answered_in_time
from tests.support.mirrors import HANGS_S, mirror

pytestmark = pytest.mark.usefixtures("away", "nothing_is_slow")


@pytest.mark.parametrize(
    ("url", "message"),
    [("s3://bucket/x", re.escape(extra_command("s3"))), ("nosuch://x", "use file://")],
)
def test_an_unknown_protocol_is_a_user_error(url: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        mirror(url, tmp_path, [])


@pytest.mark.parametrize("place", ["share/runs", "file/runs"])
def test_a_missing_folder_is_refused_at_the_start(place: str, tmp_path: Path) -> None:
    (tmp_path / "share").mkdir()  # where nothing is mounted
    (tmp_path / "file").write_text("")
    said = f"there is no such folder; mount the share that it is on, or make it there: mkdir {tmp_path}/{place}"
    with pytest.raises(TemporaryError, match=said):
        mirror(f"file://{tmp_path}/{place}", tmp_path / "run", [])


def test_a_slow_download_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_node.storage.bucket.ANSWER_S", 0.2)
    monkeypatch.setattr("swarm_node.storage.bucket.GROWTH_CHECK_S", 0.05)
    sizes, whole = iter(range(1, 1000)), threading.Event()

    def grown() -> int:
        size = next(sizes)
        if size == 20:
            whole.set()
        return size

    assert answered_in_time(lambda: whole.wait(HANGS_S), grown)
