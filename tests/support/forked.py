"""`python -m swarm_node` forked from a process that has loaded torch and transformers: each such process of a test then
saves the five CPU seconds that loading takes.

    test worker -> forkserver, which loads once -> a fork for each command
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

LOADED = "swarm_node.runtime.start", "swarm_node.cli.app"
READ_AT_IMPORT = ("HF_", "OMP_", "PYTHON", "TOKENIZERS_", "TORCH", "TRANSFORMERS_")
"""Starts of the names of variables that libraries read when they are imported: others than the forkserver had need a
process of their own."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(list(LOADED))
_had: dict[str, str] = {}


class Forked:
    """A command of `swarm-node`, with what tests use of `subprocess.Popen`."""

    def __init__(self, arguments: list[str], output: Path, env: dict[str, str]) -> None:
        _had.update({} if _had else read_at_import(env))
        self._process = _context.Process(target=_run, args=(arguments, str(output), env, os.getcwd()))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("swarm-node", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def read_at_import(env: dict[str, str]) -> dict[str, str]:
    """The variables that libraries read when they are imported."""
    return {name: value for name, value in env.items() if name.startswith(READ_AT_IMPORT)}


def can_fork(env: dict[str, str]) -> bool:
    """Whether the libraries that are loaded were loaded with these variables."""
    return not _had or _had == read_at_import(env)


def _run(arguments: list[str], output: str, env: dict[str, str], folder: str) -> None:
    """In the fork: what `python -m swarm_node` would do in a session of its own."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = os.open(output, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(log, number)
    os.close(log)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    sys.argv = ["swarm-node", *arguments]
    runpy.run_module("swarm_node", run_name="__main__", alter_sys=True)
