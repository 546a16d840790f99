"""What a node takes from its machine: processor, memory, disk and GPU memory, of all its processes together.

    Usage: cores used (mean over the last seconds), memory, bytes of the run directory, GPU memory

A look costs less than a millisecond and is taken at most every SAMPLE_S, when somebody asks; the run directory is
measured every DISK_S, and after each checkpoint. Loads no torch, but asks one that is loaded.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

from swarm_node.storage.cgroups import cpu_quotas

SAMPLE_S = 3.0
DISK_S = 60.0
CHILDREN_CHECK_S = 5.0  # time between two looks for new child processes


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def cpus(root: Path = Path("/")) -> float:
    """CPU seconds per second that this process may take: its cores, or less by its container's quota."""
    return min([float(cores()), *cpu_quotas(root)])


class Usage(msgspec.Struct, frozen=True):
    """What a node takes from its machine."""

    cpu: float  # cores in use, mean since the last look
    cores: float  # cores that it may use
    memory: int  # bytes; a page that processes share counts once for each
    disk: int  # bytes of the run directory
    gpu: int = 0  # bytes of GPU memory that torch holds

    def words(self) -> str:
        """`1.0 of 2 cores, 0.54 GiB`, and GPU memory if there is any."""
        gpu = f", {self.gpu / 2**30:.2f} GiB of the GPU" if self.gpu else ""
        cores = "1 core" if self.cores == 1 else f"{self.cores:g} cores"
        return f"{self.cpu:.1f} of {cores}, {self.memory / 2**30:.2f} GiB{gpu}"

    def metrics(self) -> dict[str, float]:
        """The numbers for metrics.jsonl."""
        return {
            "machine/cpu_cores": round(self.cpu, 3),
            "machine/cores": self.cores,
            "machine/memory_bytes": float(self.memory),
            "machine/disk_bytes": float(self.disk),
        } | ({"machine/gpu_bytes": float(self.gpu)} if self.gpu else {})


def usage_of(metrics: Mapping[str, object]) -> Usage | None:
    """The usage in a line of metrics.jsonl; None if it has none, as lines of older versions."""
    names = ("cpu_cores", "cores", "memory_bytes", "disk_bytes")
    found = [metrics.get(f"machine/{name}") for name in names]
    if not all(isinstance(value, int | float) for value in found):
        return None
    cpu, most, memory, disk = (float(value) for value in found if isinstance(value, int | float))
    gpu = metrics.get("machine/gpu_bytes")
    return Usage(cpu, most, int(memory), int(disk), int(gpu) if isinstance(gpu, int | float) else 0)


class ProcessTree:
    """This process and all its descendants, p2pd and the gossip process among them."""

    def __init__(self) -> None:
        self._me = psutil.Process()
        self._cpu_s: dict[psutil.Process, float] = {}
        self._children: list[psutil.Process] = []
        self._look_at = float("-inf")

    def cpu_s(self) -> float:
        """CPU seconds so far, those of children that were seen and have ended included. Raises nothing, since a signal
        handler calls it."""
        with suppress(OSError):  # too many open files: the children seen last count
            for child in self._look():
                with suppress(psutil.Error):
                    self._cpu_s[child] = sum(child.cpu_times()[:2])
        return time.process_time() + sum(self._cpu_s.values())

    def rss(self, alone: bool = False) -> int:
        """Bytes of memory, of this process `alone` or of all; a shared page counts once per process. Raises OSError if
        the system does not tell."""
        total = 0
        for process in [self._me] if alone else (self._me, *self._look()):
            with suppress(psutil.Error):
                total += process.memory_info().rss
        return total

    def _look(self) -> list[psutil.Process]:
        if time.monotonic() >= self._look_at:
            with suppress(psutil.Error):
                self._children = self._me.children(recursive=True)
            self._look_at = time.monotonic() + CHILDREN_CHECK_S
        return self._children


class UsageSampler:
    """Looks at this node's processes and its run directory. From any thread."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.saved_s: Callable[[], float] = lambda: math.inf  # seconds since a checkpoint was complete
        self._directory = directory
        self._clock = clock
        self._processes = ProcessTree()
        self._looking = threading.Lock()
        self._at, self._cpu_s = clock(), self._processes.cpu_s()
        self._disk_at, self._disk = float("-inf"), 0
        self._last: Usage | None = None

    def now(self) -> Usage | None:
        """The usage of the last seconds; None before the first look, or if the system does not tell."""
        with self._looking:
            passed = self._clock() - self._at
            if passed >= SAMPLE_S:
                with suppress(OSError, psutil.Error):
                    self._last = self._look(passed)
            return self._last

    def words(self) -> str:
        """The usage as a status text; empty before the first look."""
        usage = self.now()
        return "" if usage is None else f"uses {usage.words()}"

    def metrics(self) -> dict[str, float]:
        """The numbers for metrics.jsonl; empty before the first look."""
        usage = self.now()
        return {} if usage is None else usage.metrics()

    def _look(self, passed: float) -> Usage:
        if self._clock() - self._disk_at >= min(DISK_S, self.saved_s()):
            self._disk_at, self._disk = self._clock(), bytes_below(self._directory)
        before, self._cpu_s = self._cpu_s, self._processes.cpu_s()
        self._at = self._clock()
        cpu = max(0.0, self._cpu_s - before) / passed
        return Usage(cpu, cpus(), self._processes.rss(), self._disk, _gpu_bytes())


def bytes_below(directory: Path) -> int:
    """Bytes of all files below a directory; files that vanish meanwhile do not count."""
    total = 0
    for folder, _, files in os.walk(directory):
        for name in files:
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def _gpu_bytes() -> int:
    """Bytes of GPU memory that torch holds in this process; 0 without a GPU in use."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.memory_reserved())
