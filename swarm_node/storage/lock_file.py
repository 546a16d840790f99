"""The file by which one process at a time holds a run: its process id, and an id of its machine's present uptime.

The kernel drops the lock when the process dies, so a leftover file does no harm. It sees the locks of all processes of
this machine, in whatever container, and on some file systems none of other machines.
"""

from __future__ import annotations

import os
import time
from functools import lru_cache
from pathlib import Path

from filelock import lock_descriptor

from swarm_node.storage.plain_files import read_plain

MAX_BYTES = 1 << 16  # a longer file is not read
LOCK_WAIT_S = 0.2  # longest wait for the lock: longer than a reader holds it
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def lock_for_this(lock: int) -> None:
    """Lock the open file `lock` for this process alone, and write that into it. Raises OSError; BlockingIOError if
    another holds it."""
    until = time.monotonic() + LOCK_WAIT_S
    while not lock_descriptor(lock, blocking=False):
        if time.monotonic() > until:
            raise BlockingIOError
        time.sleep(LOCK_WAIT_S / 20)
    os.ftruncate(lock, 0)
    os.write(lock, f"{os.getpid()}\n{uptime_id()}\n".encode())


def holder_of(path: Path) -> str:
    """The process id of who holds the run with this file, or held it last; `unknown` if it is not written down."""
    return _read(path)[0] or "unknown"


def was_held_here(path: Path) -> bool:
    """Whether who holds the run with this file, or held it last, was a process of this machine since its last start."""
    return bool(here := uptime_id()) and _read(path)[1] == here


@lru_cache(1)
def uptime_id() -> str:
    """An id that no other machine has, and this one has until it is started again; empty if it is not known."""
    try:
        return BOOT_ID.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _read(path: Path) -> tuple[str, str]:
    try:
        pid, _, machine = read_plain(path, MAX_BYTES).decode(errors="replace").partition("\n")
    except OSError:
        return "", ""
    return pid[:32].strip(), machine.strip()
