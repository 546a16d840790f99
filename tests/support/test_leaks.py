"""The plugin that finds what tests leave behind, on throwaway tests in a pytest of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.waiting import until

HANG_S = 110.0
LEAVING = """
import multiprocessing, socket, subprocess, tempfile, threading, time
from pathlib import Path

import pytest

kept = []


@pytest.fixture(scope="module")
def tidy():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.fixture(scope="module")
def untidy():
    kept.append(socket.create_server(("127.0.0.1", 0)))


def test_nothing(tidy, tmp_path):
    subprocess.run(["true"], check=True)
    (tmp_path / "file").touch()
    threading.Thread(target=tidy.getsockname).start()
    tempfile.TemporaryFile().close()


def test_orphan():
    subprocess.run(["sh", "-c", "sleep 600 & echo $! > pid"], check=True)


def test_forked():
    kept.append(multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(600,), daemon=True))
    kept[-1].start()


def test_thread():
    threading.Thread(target=threading.Event().wait, name="waits", daemon=True).start()


def test_socket():
    kept.append(socket.create_server(("127.0.0.1", 0)))


def test_folder():
    tempfile.mkdtemp(prefix="forgotten-")


def test_failing():
    tempfile.mkdtemp(prefix="another-")
    assert False


def test_last(untidy):
    pass
"""
HANGING = """
import os, subprocess, sys, tempfile


def test_hangs():
    tempfile.mkdtemp()
    child = subprocess.Popen(["sleep", "600"])
    with open("pid", "w") as file:
        print(child.pid, os.getpid(), tempfile.gettempdir(), file=file, flush=True)
    os.rename("pid", "started")
    child.wait()
"""


def start(folder: Path, test: str, *options: str) -> subprocess.Popen[str]:
    """A pytest of its own, in `folder`."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "conftest.py").write_text("from tests.support import leaks\nleaks.GRACE_S = 0.2\n")
    (folder / "test_it.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.leaks", "-p", "no:cacheprovider", *options]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_names_each_test_and_what_it_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start(tmp_path, LEAVING)
    output, _ = run.communicate(timeout=HANG_S)
    assert run.returncode == 1 and "1 failed, 7 passed, 7 errors" in output
    said = dict(zip(lines := [line.strip() for line in output.splitlines()], lines[1:], strict=False))
    for test, what in {
        "orphan": "process ",
        "forked": "process ",
        "thread": "thread 'waits': ",
        "socket": "listening socket ('127.0.0.1', ",
        "folder": "temporary file or folder forgotten-",
        "failing": "temporary file or folder another-",
        "last": "listening socket ('127.0.0.1', ",
    }.items():
        assert said[f"test_it.py::test_{test} left behind"].startswith(what)
    assert "test_nothing left" not in output
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(
    "options",
    [("--timeout=5", "--timeout-method=signal"), ("--timeout=5", "--timeout-method=thread"), ("--timeout=5", "-n1")],
    ids=" ".join,
)
def test_nothing_is_left_after_timeout(tmp_path: Path, options: tuple[str, ...]) -> None:
    run = start(tmp_path, HANGING, *options)
    output, _ = run.communicate(timeout=HANG_S)
    assert run.returncode == 1 and "test_hangs" in output
    assert_all_gone(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_after_interrupt(tmp_path: Path, number: int) -> None:
    run = start(tmp_path, HANGING)
    until(lambda: (tmp_path / "started").exists(), HANG_S)
    run.send_signal(number)
    output, _ = run.communicate(timeout=HANG_S)
    assert ("test_hangs left behind" in output) == (number == signal.SIGINT)
    assert_all_gone(tmp_path)


def assert_all_gone(folder: Path) -> None:
    """The child, then its pytest, and last, at the hand of the reaper, what it wrote."""
    child, parent, temporary = (folder / "started").read_text().split()
    for pid in child, parent:
        until(lambda pid=pid: not psutil.pid_exists(int(pid)), HANG_S)
    until(lambda: not Path(temporary).exists(), HANG_S)
