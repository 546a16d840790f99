"""A pytest plugin: a test that leaves a process, thread, listening socket or temporary file behind fails.

Each pytest process that runs tests (with xdist, each worker) has a mark, which all processes that its tests start
inherit, a temporary folder (`TMPDIR`), and a reaper: a process that ends what is left when pytest is killed. What a
fixture of a module or session starts has to be gone when that fixture is torn down, everything else after each test.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Generator, Hashable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import marked

GRACE_S = 10.0
"""What is about to end, such as the orphan of a killed node, gets so long on a busy machine."""
KEPT = re.compile(r"swarm-node-|torchinductor_|pymp-|.*wandb-(artifacts|media)$")
"""Temporary files that may stay until the session ends: the next node sweeps a killed node's folder away, and libraries
remove their own at exit."""
FORKSERVER = "multiprocessing.forkserver"
HELPERS = "multiprocessing.resource_tracker", FORKSERVER, "multiprocessing.semaphore_tracker"
"""Processes that Python keeps until it exits."""
THREADS = "fsspecIO", "asyncio_", "tqdm_monitor"
"""Names of threads that libraries keep until Python exits. "asyncio_" are those of an event loop's default executor, of
which fsspec never closes its own."""


class Things:
    """What this process, its tests' processes included, has open now. A thing is any hashable value that `describe`
    understands: a process, a thread, the inode of a listening socket, the name of a temporary file."""

    def __init__(self, mark: str, folder: Path) -> None:
        self.mark = mark
        self.folder = folder
        self._seen = set(psutil.pids())
        self._ours: set[psutil.Process] = set()

    def now(self) -> set[Hashable]:
        found: set[Hashable] = {*self._processes(), *_listening()}
        found.update(name for name in os.listdir(self.folder) if not KEPT.match(name))
        found.update(
            thread
            for thread in threading.enumerate()
            if not isinstance(thread, threading._DummyThread) and not thread.name.startswith(THREADS)
        )
        return found

    def _processes(self) -> set[psutil.Process]:
        pids = set(psutil.pids())
        self._ours |= {process for pid in pids - self._seen if (process := self._our(pid))}
        self._ours = {process for process in self._ours if _runs(process)}
        self._seen = pids
        return self._ours

    def _our(self, pid: int) -> psutil.Process | None:
        """A new process, if a test started it. One that was forked only has no mark yet, but still its parent."""
        try:
            process = psutil.Process(pid)
            if process.ppid() != os.getpid() and not marked.is_marked(process, self.mark):
                return None
            is_helper = any(helper in " ".join(process.cmdline()) for helper in HELPERS)
            return None if is_helper and not _is_forked(process) else process
        except psutil.Error:
            return None


def _is_forked(process: psutil.Process) -> bool:
    """By a forkserver, whose command it has."""
    return FORKSERVER in " ".join(psutil.Process(process.ppid()).cmdline())


def _runs(process: psutil.Process) -> bool:
    """A zombie does not: whose child it is now reaps it when it likes."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _listening() -> set[int]:
    return {os.fstat(listener.fileno()).st_ino for listener in _listeners()}


def _listeners() -> Generator[socket.socket]:
    """The listening sockets of this process, each while the caller looks at it."""
    for name in os.listdir("/dev/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            copy = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # another thread closed it, or it was the folder's own
            continue
        with copy:
            if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield copy


def _describe(thing: Hashable) -> str:
    match thing:
        case psutil.Process():
            try:
                return f"process {thing.pid}: {' '.join(thing.cmdline()) or thing.name()}"
            except psutil.Error:
                return f"process {thing.pid}"
        case threading.Thread():
            return f"thread {thing.name!r}: {getattr(thing, '_target', None) or type(thing).__name__}"
        case int():
            names = [listener.getsockname() for listener in _listeners() if os.fstat(listener.fileno()).st_ino == thing]
            return f"listening socket {', '.join(map(str, names))}"
    return f"temporary file or folder {thing}"


class Leaks:
    def __init__(self, mark: str, folder: Path, reaper: subprocess.Popen[bytes]) -> None:
        self.reaper = reaper  # never waited for: it outlives this process
        self.things = Things(mark, folder)
        self.known = self.things.now()
        self.owned: dict[Any, set[Hashable]] = {}
        """Fixture of a wide scope -> what was started while it was set up."""
        self.last = ""
        """The test that ran last."""

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        if fixturedef.scope == "function":
            return (yield)
        before = self.things.now()
        try:
            return (yield)
        finally:
            self.owned[fixturedef] = self.things.now() - before
            self.known |= self.owned[fixturedef]

    def pytest_collection_finish(self) -> None:
        self.known |= self.things.now()  # what imports started

    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        self.known -= self.owned.pop(fixturedef, set())

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.last = item.nodeid

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        try:
            done = yield
        except Exception as error:
            if text := self.check(GRACE_S):
                error.add_note(text)
            raise
        if text := self.check(GRACE_S):
            pytest.fail(text, pytrace=False)
        return done

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self) -> Generator[None, Any, Any]:
        """An interrupted test is torn down here."""
        try:
            return (yield)
        finally:
            if text := self.check(grace_s=0.0):
                print(f"\n{text}", file=sys.stderr)

    def check(self, grace_s: float) -> str:
        """What the last test left, if anything. It is ended, and not told again."""
        until = time.monotonic() + grace_s
        while (left := self.things.now() - self.known) and time.monotonic() < until:
            time.sleep(0.02)
        self.known |= left
        if not left:
            return ""
        text = "\n  ".join((f"{self.last} left behind", *sorted(map(_describe, left))))
        self._end(left)
        return text

    def _end(self, left: set[Hashable]) -> None:
        marked.end(thing for thing in left if isinstance(thing, psutil.Process))
        for listener in _listeners():
            if os.fstat(listener.fileno()).st_ino in left:
                listener.shutdown(socket.SHUT_RDWR)  # frees the port; its descriptor stays its owner's to close


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", "no") != "no" or config.getoption("collectonly"):
        return  # the workers run the tests; or nobody does
    config.pluginmanager.register(start(), "leaks of tests")


def start() -> Leaks:
    """Give this process its mark, its temporary folder and its reaper."""
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # pytest keeps tmp_path of the last runs
    folder = Path(tempfile.mkdtemp(prefix="st-"))  # short, for the paths of Unix sockets
    mark = ".".join(filter(None, (os.environ.get(marked.VARIABLE), uuid.uuid4().hex[:12])))
    command = [sys.executable, str(Path(marked.__file__)), str(os.getpid()), mark, str(folder)]
    none = subprocess.DEVNULL  # a worker's own stdout is its line to xdist
    reaper = subprocess.Popen(command, stdin=none, stdout=none, stderr=none, start_new_session=True)
    os.environ |= {marked.VARIABLE: mark, "TMPDIR": str(folder)}
    tempfile.tempdir = None
    return Leaks(mark, folder, reaper)
