"""Resource limits: a node takes no more of its machine than it may, and pauses when that is wanted for other things.

    watch thread (2 s)    RUN/paused, quiet hours, battery, heat, owner -> `reason`    memory above its limit -> leave
    main thread           between the parts of a round: sleeps while there is a `reason`
    SIGPROF               every 50 ms of CPU time: sleeps until the node's processes are below `max_cpu` again

A paused node stays a member of its swarm: its network goes on, renews its card and passes on what others publish. It
samples, learns and averages nothing; answers that were already sampled wait.

Loads no torch. Only one `ResourceLimits` in a process can limit CPU time, and only from its main thread.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import FrameType

from swarm_node.config import NodeConfig
from swarm_node.config.machine import ResourcesConfig
from swarm_node.errors import TEMPORARY, USER_ERROR, TemporaryError, UserError
from swarm_node.observability.jsonl import last_record
from swarm_node.observability.usage import ProcessTree, cpus
from swarm_node.runtime.pause import Machine, on_battery, quiet
from swarm_node.runtime.shutdown import Stopper
from swarm_node.say import Failed, Once, Say, Warned
from swarm_node.storage.pausing import pause_asked
from swarm_node.storage.rundir import RunDir

MACHINE_CHECK_S = 2.0  # time between two looks at the machine
PAUSE_CHECK_S = 0.5  # time between two looks whether a paused node may go on, and between two looks at its memory
CPU_CHECK_S = 0.05  # CPU time of this process between two looks at the CPU time of all its processes
BURST_S = 1.0  # CPU time of so many seconds that was not taken may be taken later
NAP_S, MAX_NAPS_S = 0.25, 5.0
"""Longest single sleep, and longest sleep in one look: training goes on a little, whatever other threads take."""
WATCH_END_S = 0.1  # longest that a node which leaves waits for its watch thread, which may be asking the system
MEMORY_LEAVE_S = 12.0  # time that a node which takes too much memory has to save and leave
LOWER = (
    "lower grpo.microbatch_tokens, rollouts.groups, rollouts.group_size or rollouts.max_new_tokens, choose a smaller "
    "--model"
)
NO_ROUND, SAVED = "this start has done no round, and the next would do none", "what it had learned is saved"
KEPT_FREE = 0.95  # part of --max-memory that estimates may reach; they miss some per cent
NETWORK_BYTES = 2**28  # memory of p2pd and the gossip process, which no estimate of a round counts


def be_nice(config: ResourcesConfig) -> None:
    """Lower this process's priority to `config.nice`; never raise it. Call it before threads and processes start, which
    inherit it."""
    nice = config.in_force().nice
    if nice > os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, nice)


def has_owner(root: Path = Path("/")) -> str:
    """What shows that somebody uses this machine for other things: a battery or a graphical session; empty = nothing
    does. A session that runs elsewhere (ssh -X) does not count."""
    if on_battery() is not None:
        return "a battery"
    graphical = sys.platform == "darwin" or any(os.environ.get(name) for name in ("WAYLAND_DISPLAY", "DISPLAY"))
    in_container = any((root / mark).exists() for mark in (".dockerenv", "run/.containerenv"))
    remote = in_container or bool(os.environ.get("SSH_CONNECTION"))
    return "a graphical session" if graphical and not remote else ""


def say_preset(config: ResourcesConfig, say: Say) -> None:
    """Say which limits the chosen preset puts in force, if it has any."""
    if config.preset is None or config.preset == "all":
        return
    limits = config.in_force()
    points = [f"{'lowest' if limits.nice == 19 else 'lower'} priority (nice {limits.nice})"] if limits.nice else []
    if limits.max_cpu < 100:
        points.append(f"at most {limits.max_cpu / 100 * cpus():.3g} of {cpus():.3g} core{'s' * (cpus() != 1)}")
    points += [f"pause on {' or '.join(limits.pause_on)}"] if limits.pause_on else []
    say(f"--{config.preset}: {', '.join(points) or 'no limit'} (docs/resources.md)")


def gentle_by_default(config: NodeConfig, say: Say) -> NodeConfig:
    """`config` of a member with the gentle preset if this machine has an owner and no limit was chosen. Says so. Stages
    of a crew are not limited."""
    if config.resources.model_fields_set or config.pipeline.stages or not (owner := has_owner()):
        return config
    say(f"this machine has {owner}: lowest priority, half of the cores, pause on battery (--gentle; --all takes all)")
    resources = config.resources.model_copy(update={"preset": "gentle"})
    return config.model_copy(update={"resources": resources})


class MemoryLimit:
    """The most memory that a node may take."""

    def __init__(self, gib: float, what_to_lower: str) -> None:
        """`gib` = 0 is no limit; `what_to_lower` advises the user."""
        self._most, self._processes = gib * 2**30, ProcessTree()
        self.too_much = f"more than --max-memory {gib:g}: {what_to_lower}, or allow more"

    def __bool__(self) -> bool:
        return self._most > 0

    def exceeded_by(self, bytes: int) -> str:
        """A sentence if `bytes` are more than the limit, else empty."""
        return f"{bytes / 2**30:.2f} GiB, {self.too_much}" if self and bytes > self._most else ""

    def exceeded(self) -> str:
        """A sentence if the node takes more than the limit now, else empty. Raises OSError."""
        return self.exceeded_by(self._processes.rss()) if self else ""

    def within(self, most: int) -> bool:
        """Whether this process alone takes less than `most` bytes now. Raises OSError."""
        return self._processes.rss(alone=True) < most


class Allowance:
    """A budget of CPU time: `rate` seconds per second."""

    def __init__(self, rate: float, used: float, now: float) -> None:
        self._rate, self._used, self._at = rate, used, now
        self._level = rate * BURST_S

    def wait_s(self, used: float, now: float) -> float:
        """How many seconds to sleep, if `used` CPU seconds were taken in total by `now`."""
        earned = self._rate * max(0.0, now - self._at)
        self._level = min(self._rate * BURST_S, self._level + earned - (used - self._used))
        self._used, self._at = used, now
        return max(0.0, -self._level / self._rate)


@contextmanager
def cpu_limit(percent: float, stop: Stopper) -> Iterator[None]:
    """Make the main thread sleep so that this process and its children take at most `percent` of the `cpus`.

    It no longer sleeps once `stop` was requested. UserError in any thread but the main one.
    """
    if percent >= 100:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        raise UserError("resources.max_cpu works in the main thread only: call `train` there, or leave it out")
    processes, napping = ProcessTree(), False
    allowance = Allowance(percent / 100 * cpus(), processes.cpu_s(), time.monotonic())

    def tick(number: int, frame: FrameType | None) -> None:
        nonlocal napping
        if napping or stop.requested:
            return
        napping, ends = True, time.monotonic() + MAX_NAPS_S
        try:
            while (wait := allowance.wait_s(processes.cpu_s(), time.monotonic())) > 0 and time.monotonic() < ends:
                time.sleep(min(wait, NAP_S))  # a signal to stop may end it, by an exception
                if stop.requested:
                    return
        finally:
            napping = False

    before = signal.signal(signal.SIGPROF, tick)
    signal.siginterrupt(signal.SIGPROF, False)
    signal.setitimer(signal.ITIMER_PROF, CPU_CHECK_S, CPU_CHECK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _rounds(run: RunDir) -> int:
    """The newest round in the run's metrics; 0 = none."""
    record = last_record(run.metrics) if run.metrics.is_file() else None
    return int((record or {}).get("round", 0))


class ResourceLimits:
    """Decides whether a run may go on, and limits its CPU time and memory."""

    def __init__(
        self, config: ResourcesConfig, run: RunDir, say: Say, member: bool = False, machine: Machine | None = None
    ) -> None:
        self.reason = ""  # why the node is paused; empty = it is not
        self.over: UserError | None = None  # why the node had to leave, if it took too much memory
        self._paused_s = 0.0
        self._waits_since: float | None = None
        self._config = config = config.in_force()
        self._run = run
        self._say = say
        self._member = member
        self._machine = machine or Machine(config, say)
        self._memory = MemoryLimit(config.max_memory_gb, LOWER)
        self._began_at = _rounds(run)

    def waiting(self) -> str:
        """Why the node is paused, as a status text; empty = it is not."""
        return f"paused: {self.reason}" if self.reason else ""

    def with_network(self, bytes: int) -> int:
        """The memory that a round takes in all if it is estimated at `bytes` without a member's network."""
        return bytes + NETWORK_BYTES * self._member

    @property
    def own_memory(self) -> int:
        """Bytes that the estimates of this process may reach, without a member's network; 0 = no limit."""
        most = int(KEPT_FREE * self._config.max_memory_gb * 2**30)
        return most and max(1, most - NETWORK_BYTES * self._member)

    def check_estimate(self, bytes: int) -> None:
        """Raise UserError if a round that takes `bytes` in all would take more memory than the limit."""
        if too_much := self._memory.exceeded_by(bytes):
            raise UserError(f"a round takes about {too_much}")

    def check_kept(self) -> None:
        """Raise the UserError for which the node had to leave, if it took too much memory."""
        if self.over is not None and not isinstance(self.over, TemporaryError) and _rounds(self._run) > self._began_at:
            raise TemporaryError(str(self.over).replace(NO_ROUND, SAVED))  # a round has ended since
        if self.over is not None:
            raise self.over

    @property
    def threads(self) -> int:
        """The most threads that torch can use within the CPU limit."""
        return max(1, math.ceil(self._config.max_cpu / 100 * cpus()))

    @property
    def paused_s(self) -> float:
        """Seconds paused so far, the present pause included. From any thread."""
        since = self._waits_since
        return self._paused_s + (0.0 if since is None else time.monotonic() - since)

    @contextmanager
    def watching(self, stop: Stopper) -> Iterator[None]:
        """Keep to the limits within the context. Call it from the main thread."""
        self.look()
        ended = threading.Event()
        watch = threading.Thread(target=self._watch, args=(stop, ended), name="limits", daemon=True)
        watch.start()
        try:
            with cpu_limit(self._config.max_cpu, stop):
                yield
        finally:
            ended.set()
            watch.join(WATCH_END_S)

    def look(self, ended: threading.Event | None = None) -> None:
        """Find out whether to pause, and say so if that has changed, unless the run has `ended` meanwhile."""
        before, hours = self.reason, self._config.quiet_hours
        still = f"quiet hours, {hours}" if quiet(hours, datetime.now()) else ""
        asked = pause_asked(self._run.paused, time.time())
        reason = asked or still or self._machine.busy()
        if ended is not None and ended.is_set():
            return
        self.reason = reason
        if reason != before:
            self._run.write_waits(reason)
        if reason and not before:
            goes_on = f"; `swarm-node unpause {self._run.quoted}` goes on" if asked else ""
            self._say(f"paused: {reason}{goes_on}" + ("; the node stays a member" if self._member else ""))
        elif before and not reason:
            self._say("no longer paused")

    def wait(self, stop: Stopper) -> None:
        """Sleep while paused. Raises StopRequested, so call it only while the weights are those of a finished round."""
        self._waits_since = began = time.monotonic()
        try:
            while self.reason:
                stop.allow()
                stop.wait(PAUSE_CHECK_S)
        finally:
            self._waits_since = None
            self._paused_s += time.monotonic() - began

    def _may_get_on(self) -> bool:
        """Whether the next start may do a round: this one has got further, or what grew is a member's network. Raises
        OSError."""
        return _rounds(self._run) > self._began_at or (self._member and self._memory.within(self.own_memory))

    def _watch(self, stop: Stopper, ended: threading.Event) -> None:
        once = Once(self._say)
        while not ended.wait(PAUSE_CHECK_S if self._memory else MACHINE_CHECK_S):
            try:
                self.look(ended)
                exceeded = self._memory.exceeded() if self.over is None else ""
                gets_on = bool(exceeded) and self._may_get_on()
            except OSError as error:  # too many open files, for one
                once("look", Warned(f"limits and pauses wait until this machine can be looked at again: {error}"))
                continue
            if exceeded and not ended.is_set():
                over, code, then = (TemporaryError, TEMPORARY, SAVED) if gets_on else (UserError, USER_ERROR, NO_ROUND)
                self.over = over(f"the node took {exceeded}; {then}")
                stop.notice(MEMORY_LEAVE_S, exit_code=code)
                self._say(Failed(self.over))
