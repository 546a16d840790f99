"""How many threads torch computes with on a CPU: as many as there are idle cores, looked at again between rounds.

A round is as slow as its slowest thread. On a machine where others compute, one thread more than there are idle cores
waits for its core hundreds of times a token, and all others wait for it.

The number may change the last bits of sums. So it changes only where the load forces it: it is lowered at once, raised
after two looks that agree. On an idle machine it stays that of the start.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import psutil
import torch

from swarm_node.observability.usage import ProcessTree, cores
from swarm_node.say import Detail, Say

OTHERS = 0.5  # cores that others keep busy; fewer do not count
LOOK_S = 5.0  # shortest time between two looks
FIRST_LOOK_S = 0.2  # shortest time that the first look must cover
AGREE = 2  # looks in a row that must allow more threads


def suggested(others: float, most: int, cores: int, nice: bool) -> int:
    """The number of threads, at most `most`, while other processes keep `others` of the `cores` busy.

    A `nice` process gets little of a core for which it competes: it takes one thread as soon as others compute.
    """
    if others < OTHERS:
        return most
    return 1 if nice else max(1, min(most, math.floor(cores - others + 0.5)))


def busy_s(nice: bool) -> float:
    """CPU seconds so far that were spent on the cores of this process, by all processes. Those of processes that are
    nicer than this one are left out unless this one is `nice`: they give way. Raises OSError or psutil.Error."""
    times = psutil.cpu_times(percpu=True)
    if sys.platform == "linux":
        mine = os.sched_getaffinity(0)
        times = [each for i, each in enumerate(times) if i in mine] or times
    kinds = ["user", "system", "irq", "softirq", "steal", "interrupt", "dpc", *(["nice"] if nice else [])]
    return float(sum(getattr(each, kind, 0.0) for each in times for kind in kinds))


class Threads:
    """Chooses the number of torch's threads. Make it before the policy is loaded: the first look covers the time since.
    Call it from one thread."""

    def __init__(
        self,
        say: Say,
        own_s: Callable[[], float] | None = None,
        busy_s: Callable[[bool], float] = busy_s,
        clock: Callable[[], float] = time.monotonic,
        cores: Callable[[], int] = cores,
    ) -> None:
        """`own_s` and `busy_s` give the CPU seconds so far of this node's processes and of all."""
        self._say, self._clock, self._cores = say, clock, cores
        self._own_s, self._busy_s = own_s or ProcessTree().cpu_s, busy_s
        self._most = 1
        self._allowed = 0  # looks in a row that allowed more threads
        self._nice = sys.platform != "win32" and os.getpriority(os.PRIO_PROCESS, 0) > 0
        self._before: tuple[float, float] | None = None  # time, and CPU seconds of others
        self._others()

    def begin(self, most: int, asked: bool, device: str) -> None:
        """Choose the first number, at most `most` and what torch has now, and say it. The number stays for good if it
        was `asked` for, if OMP_NUM_THREADS gives it, or if the policy is not on a CPU."""
        most = min(torch.get_num_threads(), most)
        torch.set_num_threads(most)
        if asked or "OMP_NUM_THREADS" in os.environ or device != "cpu" or most == 1:
            return
        self._most = most
        others = self._others()
        chosen = most if others is None else suggested(others, most, self._cores(), self._nice)
        torch.set_num_threads(chosen)
        self._say(f"computes with {_threads(chosen)}: {self._why(others)}; --threads N fixes the number")

    def look(self) -> None:
        """Look at the machine again, between two rounds."""
        if self._most == 1 or (self._before is not None and self._clock() < self._before[0] + LOOK_S):
            return
        if (others := self._others()) is None:
            return
        now, wanted = torch.get_num_threads(), suggested(others, self._most, self._cores(), self._nice)
        self._allowed = self._allowed + 1 if wanted > now else 0
        if wanted < now or self._allowed >= AGREE:
            self._allowed = 0
            torch.set_num_threads(wanted)
            self._say(Detail(f"computes with {_threads(wanted)} from now on: {self._why(others)}"))

    def _others(self) -> float | None:
        """Cores that others kept busy since the last look; None if that is not known."""
        before, self._before = self._before, None
        with suppress(OSError, psutil.Error):
            self._before = self._clock(), self._busy_s(self._nice) - self._own_s()
        if before is None or self._before is None or self._before[0] - before[0] < FIRST_LOOK_S:
            return None
        return max(0.0, (self._before[1] - before[1]) / (self._before[0] - before[0]))

    def _why(self, others: float | None) -> str:
        cores = self._cores()
        if others is None:
            return f"how busy its {cores} cores are is not known"
        if others < OTHERS:
            return f"nothing else keeps a core busy, of {cores}"
        nice = " and this process gives way to them" if self._nice else ""
        return f"others keep {others:.1f} of {cores} cores busy{nice}"


def _threads(number: int) -> str:
    return "1 thread" if number == 1 else f"{number} threads"
