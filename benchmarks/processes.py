"""Processes that benchmarks start, and what they cost: CPU, memory, and bytes over TCP as the kernel counts them."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import machine

SAMPLE_S = 0.5
"""How often connections are read. A connection counts by its last reading: what it carries between that and its end is
missed, and so is all of one that lives shorter."""


class Child:
    """A Python module in a process of its own that says what it has to say in lines of JSON and is told likewise."""

    def __init__(self, module: str, *arguments: str, checkout: Path | None = None) -> None:
        """`checkout` is a directory with another version of this project; by default the module is this version's."""
        here = {} if checkout is None else {"PYTHONPATH": str(checkout)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=checkout,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | here,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def hear(self, timeout: float = 400.0) -> dict[str, Any]:
        """What it says next."""
        line = self._lines.get(timeout=timeout)
        if not line:
            raise RuntimeError(f"a node ended with {self.process.wait(10)}")
        return dict(json.loads(line))

    def tell(self, what: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")


def mind_signals() -> None:
    """Have Ctrl-C and SIGTERM end this process by an exception, so that those it started end with it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that puts us in the background ignores it
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def end(processes: Iterable[subprocess.Popen[str]], patience: float) -> None:
    """Wait for these processes to go by themselves, then kill those that have not, and what they leave behind."""
    processes = list(processes)
    kin = [relative for process in processes for relative in tree(process.pid)]
    _, alive = psutil.wait_procs(kin, timeout=patience)
    for process in alive:
        process.kill()
    for process in processes:
        process.wait(10)


def tree(pid: int) -> list[psutil.Process]:
    """A process and all below it; none if it is gone."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kind(process: psutil.Process) -> str:
    """`p2pd`, `gossip`, or `node` for anything else."""
    command = " ".join(process.cmdline())
    return "p2pd" if "/p2pd " in command else "gossip" if "gossip.sidecar" in command else "node"


def rss_mib(processes: Iterable[psutil.Process]) -> float:
    """Resident memory, pages that they share counted for each."""
    return sum(process.memory_info().rss for process in processes) / 2**20


class Meter:
    """What process trees cost while this context is open. `cost` names their main processes' pids."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self.trees = {name: tree(pid) for name, pid in pids.items()}
        self.seconds = 0.0
        self.cpu_s: dict[str, dict[str, float]] = {}
        """Name -> kind of process -> CPU seconds, user and system."""
        self.bytes: dict[str, tuple[int, int]] = {}
        """Name -> (out, in), as carried by TCP, encryption and framing included, headers of TCP and IP not."""
        self.loopback_bytes = 0
        """All that this machine told itself meanwhile, with headers: those processes must not have said more."""
        self._owner = {process.pid: name for name, processes in self.trees.items() for process in processes}
        self._first: dict[tuple[str, str, str], tuple[int, int]] = {}
        self._last: dict[tuple[str, str, str], tuple[int, int]] = {}
        self._done = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Meter:
        self._look()
        self._first = dict(self._last)
        self._cpu = self._cpu_now()
        self._loopback = _loopback_bytes()
        self._began = time.monotonic()
        self._sampler.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._sampler.join()
        if exception[0] is not None:
            return
        self._look()
        self.seconds = time.monotonic() - self._began
        self.loopback_bytes = _loopback_bytes() - self._loopback
        after = self._cpu_now()
        self.cpu_s = {
            name: {k: after[name][k] - before for k, before in kinds.items()} for name, kinds in self._cpu.items()
        }
        totals = {name: [0, 0] for name in self.trees}
        for key, last in self._last.items():
            first = self._first.get(key, (0, 0))
            for i in range(2):
                totals[key[0]][i] += last[i] - first[i]
        self.bytes = {name: (out, in_) for name, (out, in_) in totals.items()}

    def _cpu_now(self) -> dict[str, dict[str, float]]:
        """Raises psutil.NoSuchProcess if one of them died: then this is no measurement."""
        totals: dict[str, dict[str, float]] = {}
        for name, processes in self.trees.items():
            kinds = totals.setdefault(name, {})
            for process in processes:
                kinds[kind(process)] = kinds.get(kind(process), 0.0) + sum(process.cpu_times()[:2])
        return totals

    def _sample(self) -> None:
        while not self._done.wait(SAMPLE_S):
            self._look()

    def _look(self) -> None:
        lines = subprocess.run(["ss", "-tinpHO"], capture_output=True, text=True, check=True).stdout.splitlines()
        for line in lines:
            owners = [self._owner[int(pid)] for pid in re.findall(r"\bpid=(\d+)", line) if int(pid) in self._owner]
            for name in owners[:1]:
                _, _, _, local, remote, *_ = line.split()
                self._last[name, local, remote] = _field(line, "bytes_sent"), _field(line, "bytes_received")


def _loopback_bytes() -> int:
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


def _field(line: str, name: str) -> int:
    found = re.search(rf"\b{name}:(\d+)", line)
    return int(found[1]) if found else 0


def other_load() -> str:
    """What else this machine is busy with before a measurement starts, for the record."""
    busy = psutil.cpu_percent(2.0) / 100 * (os.cpu_count() or 1)
    load = os.getloadavg()[0]
    return f"before the start, other processes took {busy:.1f} of {os.cpu_count()} cores, load average {load:.1f}"


def merged(path: Path, part: str, figures: object) -> dict[str, Any]:
    """What a results file holds, with one part of it replaced, and on which machine and when each part was measured."""
    kept = json.loads(path.read_text()) if path.exists() else {"machine": {}}
    return {**kept, "machine": {**kept["machine"], part: machine()}, part: figures}
