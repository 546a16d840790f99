"""Processes that carry a mark in their environment; run as a program: end them once a pytest process is gone.

Children inherit the mark, and keep it when their parent dies and they are re-parented.
"""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress

import psutil

VARIABLE = "SWARM_TEST_SESSION"
TERMINATE_S = 3.0
"""A process that was asked to end may tidy up for so long before it is killed."""


def is_marked(process: psutil.Process, mark: str) -> bool:
    """Of this session, or of a session that one of its tests started."""
    try:
        found = process.environ().get(VARIABLE, "")
    except psutil.Error:  # it is gone, is a zombie, or belongs to another user
        return False
    return found == mark or found.startswith(f"{mark}.")


def marked(mark: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if is_marked(process, mark)]


def end(processes: Iterable[psutil.Process]) -> None:
    """Terminate them, and kill those that do not end."""
    processes = list(processes)
    for process in processes:
        _signal(process, signal.SIGTERM)
    _, alive = psutil.wait_procs(processes, timeout=TERMINATE_S)
    for process in alive:
        _signal(process, signal.SIGKILL)
    psutil.wait_procs(alive, timeout=TERMINATE_S)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def main(pid: int, mark: str, folder: str) -> None:
    """Wait until the pytest process is gone; then end what its tests started, and remove their temporary folder."""
    with suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait()
    while left := marked(mark):  # what ends may have started another before
        end(left)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
