"""Processes that do a command of `swarm-node` for this one, and end when it does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from swarm_node.config.keys import VARIABLE_PREFIX


def start_child(arguments: Sequence[str], log: Path | None) -> subprocess.Popen[bytes]:
    """Start a process that does `swarm-node` with `arguments`, writes to the end of `log` (None = to standard error),
    does not read the environment variables of the configuration, and ends when its standard input does. Raises
    OSError."""
    with nullcontext(sys.stderr) if log is None else log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "swarm_node.cli.stage_process", *arguments],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={name: value for name, value in os.environ.items() if not name.startswith(VARIABLE_PREFIX)},
            start_new_session=True,  # Ctrl-C is for this process, which then closes their standard input
        )


def close_input(process: subprocess.Popen[bytes]) -> None:
    """Tell a child to end; for one that has ended, close what is left of it."""
    assert process.stdin is not None
    process.stdin.close()


def end_children(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """End the processes; kill those that take longer than `seconds`."""
    for process in processes:
        close_input(process)
    until = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
