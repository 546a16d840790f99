"""A good guest on somebody's machine: takes no more than it may, and stops when the machine is wanted for other things.

    watch thread (2 s)    RUN/paused, quiet hours, battery, heat, owner -> `reason`    memory above its limit -> leave
    main thread           between the parts of a round: sleeps while there is a `reason`
    SIGPROF               every 50 ms of CPU time: sleeps until the node's processes are below `max_cpu` again

Whoever is paused stays a member: the network's threads and processes go on, so its card is renewed and what others
publish is passed on; it samples, learns and averages nothing. What it had sampled waits.

Loads no torch. Only one `Guest` in a process can limit CPU time, and only from its main thread.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from swarm_node.config import GuestConfig, NodeConfig, load_config, read_own
from swarm_node.errors import UserError
from swarm_node.observability.cgroups import cpu_quotas
from swarm_node.shutdown import Stopper
from swarm_node.storage.rundir import RunDir, os_errors_explained

LOOK_S = 2.0
"""Between two looks at the machine."""
ASK_OWNER_S = 10.0
"""Likewise for what takes a process to find out."""
STEP_S = 0.5
"""A paused node looks so often whether it may go on."""
COOLER_C = 5.0
"""One that was paused for heat goes on so many degrees below."""
TICK_S = 0.05
"""CPU time of this process between two looks at that of all."""
BURST_S = 1.0
"""CPU time not taken for so long may be made up for."""
NAP_S, MOST_S = 0.25, 5.0
"""A sleep in one go, and in one look: even where other threads use all that is allowed, training goes on a little."""
KIN_S = 5.0
"""Between two looks for new child processes."""
JOIN_S = 0.1
"""Whoever leaves does not wait for what the system is being asked."""
LEAVE_S = 12.0
"""To save and leave in, for a node that takes too much memory."""
LOWER = (
    "lower grpo.microbatch_tokens, rollouts.groups, rollouts.group_size or rollouts.max_new_tokens, choose a smaller "
    "--model"
)
NETWORK_BYTES = 2**28
"""What p2pd and the gossip process take, beside the estimate of a round."""
BOOTSTRAP = "bootstrap"
"""Role of a run in swarm.json."""
_PARTS = re.compile(r"(?=.)(?:(\d{1,4})d)?(?:(\d{1,4})h)?(?:(\d{1,5})m)?(?:(\d{1,6})s)?")


def be_nice(config: GuestConfig) -> None:
    """Lower this process's priority to `config.nice`. To be called before threads and processes begin: they inherit
    it. Never raises a priority."""
    if config.nice > os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, config.nice)


def cores() -> int:
    """That this process may run on."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def cpus(root: Path = Path("/")) -> float:
    """CPU seconds a second that this process may take: one for each of its cores, or less by its container's quota."""
    return min([float(cores()), *cpu_quotas(root)])


def refuse_in_a_crew(config: NodeConfig, run: RunDir) -> None:
    """Raises UserError for what would have a crew wait for one of its machines."""
    asked = _asked(config.guest, "max_cpu", "max_memory_gb", "quiet_hours", "pause_on")
    if asked:
        raise UserError(
            f"guest.{asked[0]} is not for --stages: a stage that is paused or slowed down holds its crew up. Stop the "
            "node instead (Ctrl-C): it hands its stage over; --nice, --max-upload and --max-download work"
        )
    if run.paused.exists():
        raise UserError(
            f"{run.path} is paused, which a stage of a crew cannot be: `swarm-node resume {run.path}` first"
        )


def refuse_on_a_bootstrap(config: NodeConfig, run: RunDir) -> None:
    """Raises UserError for what would have newcomers find nobody. It does not train, so what it takes is little."""
    asked = _asked(config.guest, "max_cpu", "quiet_hours", "pause_on")
    if asked:
        raise UserError(
            f"guest.{asked[0]} is not for a bootstrap, which others join by at any time; --nice, --max-memory, "
            "--max-upload and --max-download work"
        )
    if run.paused.exists():
        raise UserError(
            f"{run.path} is paused, which a bootstrap cannot be: `swarm-node resume {run.path}` first, or stop it "
            "instead"
        )


def _asked(guest: GuestConfig, *keys: str) -> list[str]:
    """Those of `keys` that are not as usual."""
    usual = GuestConfig()
    return [key for key in keys if getattr(guest, key) != getattr(usual, key)]


# --------------------------------------------------------------------- pause and resume, by the owner


def seconds_of(text: str) -> float:
    """`1d2h30m15s`, or some of it. Raises UserError."""
    found = _PARTS.fullmatch(text)
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups()) if found else (0, 0, 0, 0)
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if not total:
        raise UserError(f"--for {text}: write how long, for example 2h, 90m or 1d12h")
    return float(total)


def pause(run: RunDir, for_s: float | None, now: float) -> str:
    """Have the node of `run` pause, now or when it is started; what was done, in a sentence. Raises UserError."""
    _check_run(run, "pause")
    until = None if for_s is None else now + for_s
    with os_errors_explained(run.paused):
        run.write_paused(until)
    how_long = "" if until is None else f" until {_moment(until)}"
    then = "it loses nothing" if run.in_use else "no node runs there now: it will be when it starts"
    return f"paused {run.path}{how_long}; {then}; `swarm-node resume {run.path}` goes on"


def resume(run: RunDir) -> str:
    """Undo `pause`. Raises UserError."""
    _check_run(run, "resume")
    was = run.paused.exists()
    with os_errors_explained(run.paused):
        run.paused.unlink(missing_ok=True)
    if run.in_use:
        return f"{run.path} goes on" if was else f"{run.path} was not paused by `swarm-node pause`"
    verb = "join" if read_own(run.config).swarm else "local"
    then = f"no node runs there now: `swarm-node {verb} --run-dir {shlex.quote(str(run.path))}` goes on with it"
    return f"{run.path} is paused no more; {then}" if was else f"{run.path} is not paused; {then}"


def _check_run(run: RunDir, verb: str) -> None:
    if not run.exists:
        raise UserError(f"no run in {run.path}: `swarm-node {verb} RUN` wants a run directory, such as runs/node")
    if verb == "pause" and load_config(run.config).pipeline.stages:
        raise UserError(
            f"{run.path} holds a stage of a crew, which would wait for it: stop the node instead (Ctrl-C or SIGTERM); "
            "it hands its stage over to another"
        )
    if verb == "pause" and _is_bootstrap(run):
        raise UserError(f"{run.path} is a bootstrap, which others join by at any time: stop it instead (Ctrl-C)")


def _is_bootstrap(run: RunDir) -> bool:
    try:
        status = json.loads(run.status.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(status, dict) and status.get("role") == BOOTSTRAP


def pause_asked(path: Path, now: float) -> str:
    """Why `path` (RUN/paused) has the node pause; empty = it does not. What cannot be read counts as no end."""
    try:
        text = path.read_bytes()[:64].decode(errors="replace").strip()
    except FileNotFoundError:
        return ""
    except OSError:
        text = ""
    try:
        until = float(text)
    except ValueError:
        until = math.inf
    if now >= until:
        return ""
    moment = f" until {_moment(until)}" if until < math.inf else ""
    return f"by `swarm-node pause`{moment}"


def _moment(time_s: float) -> str:
    try:
        return datetime.fromtimestamp(time_s).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, OSError, ValueError):
        return "further notice"


# --------------------------------------------------------------------- what the machine says


def quiet(hours: str, now: datetime) -> bool:
    """Whether local time `now` is in `hours`, "22:00-07:00", the end not included."""
    if not hours:
        return False
    begin, end = hours.split("-")
    present = now.strftime("%H:%M")
    return begin <= present < end if begin < end else present >= begin or present < end


def on_battery() -> bool | None:
    """None = the system does not tell, or has no battery."""
    try:
        battery = getattr(psutil, "sensors_battery", lambda: None)()
    except OSError:  # no /sys/class/power_supply, in some containers
        return None
    return None if battery is None or battery.power_plugged is None else not battery.power_plugged


def hottest() -> float | None:
    """Degrees Celsius of the hottest sensor; None = the system tells of none."""
    try:
        sensors: Mapping[str, Sequence[Any]] = getattr(psutil, "sensors_temperatures", dict)()
    except OSError:
        return None
    return max((each.current for found in sensors.values() for each in found if each.current), default=None)


def owner_active() -> bool | None:
    """Whether a session on this machine is in use, as systemd-logind sees it; None = there is none to ask."""
    asked = ["loginctl", "show-session", "--property=IdleHint"]  # of no session in particular: of all together
    try:
        done = subprocess.run(asked, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return {"IdleHint=no": True, "IdleHint=yes": False}.get(done.stdout.strip()) if done.returncode == 0 else None


class Machine:
    """What `guest.pause_on` names, one asked after the other; says once what the system does not tell."""

    def __init__(
        self,
        config: GuestConfig,
        say: Callable[[str], None],
        on_battery: Callable[[], bool | None] = on_battery,
        hottest: Callable[[], float | None] = hottest,
        owner_active: Callable[[], bool | None] = owner_active,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._say = say
        self._on_battery, self._hottest, self._owner_active = on_battery, hottest, owner_active
        self._clock = clock
        self._untold: set[str] = set()
        self._hot = False
        self._active: bool | None = None
        self._ask_owner_at = -math.inf

    def busy(self) -> str:
        """Why a guest should pause, in words; empty = no reason."""
        wanted = self._config.pause_on
        if "battery" in wanted and self._told("battery", self._on_battery(), "whether it is on battery"):
            return "on battery"
        if "hot" in wanted:
            degrees = self._told("hot", self._hottest(), "how hot it is")
            limit = self._config.hot_c - COOLER_C * self._hot
            self._hot = degrees is not None and degrees >= limit
            if self._hot:
                return f"hot, {degrees:.0f} °C"
        if "owner" in wanted:
            if self._clock() >= self._ask_owner_at:
                self._active = self._told("owner", self._owner_active(), "whether its owner is active")
                self._ask_owner_at = self._clock() + ASK_OWNER_S
            if self._active:
                return "its owner is active"
        return ""

    def _told(self, name: str, value: Any, what: str) -> Any:
        if value is None and name not in self._untold:
            self._untold.add(name)
            self._say(f"this machine does not tell {what}: guest.pause_on {name} has no effect now")
        return value


# --------------------------------------------------------------------- what the node takes


class Kin:
    """This process and all below it, p2pd and the gossip process among them."""

    def __init__(self) -> None:
        self._me = psutil.Process()
        self._cpu_s: dict[psutil.Process, float] = {}
        self._children: list[psutil.Process] = []
        self._look_at = -math.inf

    def cpu_s(self) -> float:
        """CPU seconds so far, also of children that ended, as far as they were seen. Raises nothing: a signal's
        handler asks."""
        with suppress(OSError):  # too many open files: what was seen last
            for child in self._look():
                with suppress(psutil.Error):
                    self._cpu_s[child] = sum(child.cpu_times()[:2])
        return time.process_time() + sum(self._cpu_s.values())

    def rss(self) -> int:
        """Bytes of memory; pages that they share count for each. Raises OSError if the system does not tell."""
        total = 0
        for process in (self._me, *self._look()):
            with suppress(psutil.Error):
                total += process.memory_info().rss
        return total

    def _look(self) -> list[psutil.Process]:
        if time.monotonic() >= self._look_at:
            with suppress(psutil.Error):
                self._children = self._me.children(recursive=True)
            self._look_at = time.monotonic() + KIN_S
        return self._children


class MemoryLimit:
    """Whether a node takes more memory than it may."""

    def __init__(self, gib: float, what_to_lower: str) -> None:
        """0 = it may take any."""
        self._most, self._kin = gib * 2**30, Kin()
        self.too_much = f"more than --max-memory {gib:g}: {what_to_lower}, or allow more"

    def __bool__(self) -> bool:
        return self._most > 0

    def exceeded_by(self, bytes: int) -> str:
        """If it takes so much: how much, in words; else empty."""
        return f"{bytes / 2**30:.2f} GiB, {self.too_much}" if self and bytes > self._most else ""

    def exceeded(self) -> str:
        """Likewise by what it takes now."""
        return self.exceeded_by(self._kin.rss()) if self else ""


class Allowance:
    """CPU seconds that may be taken: `rate` a second."""

    def __init__(self, rate: float, used: float, now: float) -> None:
        self._rate = rate
        self._level = rate * BURST_S
        self._used, self._at = used, now

    def wait_s(self, used: float, now: float) -> float:
        """How long to take nothing, with `used` seconds taken in total by `now`."""
        earned = self._rate * max(0.0, now - self._at)
        self._level = min(self._rate * BURST_S, self._level + earned - (used - self._used))
        self._used, self._at = used, now
        return max(0.0, -self._level / self._rate)


@contextmanager
def cpu_limit(percent: float, stop: Stopper) -> Iterator[None]:
    """Have the main thread sleep as often as needed for this process and its children to take no more than `percent` of
    the `cpus`. Not when `stop` has been asked for. From the main thread."""
    if percent >= 100:
        yield
        return
    kin, napping = Kin(), False
    allowance = Allowance(percent / 100 * cpus(), kin.cpu_s(), time.monotonic())

    def tick(number: int, frame: FrameType | None) -> None:
        nonlocal napping
        if napping or stop.requested:
            return
        napping, ends = True, time.monotonic() + MOST_S
        try:
            while (wait := allowance.wait_s(kin.cpu_s(), time.monotonic())) > 0 and time.monotonic() < ends:
                time.sleep(min(wait, NAP_S))  # a signal to stop may end it, by an exception
                if stop.requested:
                    return
        finally:
            napping = False

    before = signal.signal(signal.SIGPROF, tick)
    signal.siginterrupt(signal.SIGPROF, False)
    signal.setitimer(signal.ITIMER_PROF, TICK_S, TICK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class Guest:
    """What a run asks whether it may go on."""

    def __init__(
        self,
        config: GuestConfig,
        run: RunDir,
        say: Callable[[str], None],
        member: bool = False,
        machine: Machine | None = None,
    ) -> None:
        self.reason = ""
        """Why the node is paused, in words; empty = it is not."""
        self.over = ""
        """Why it had to leave: it took too much memory."""
        self._paused_s = 0.0
        self._waits_since: float | None = None
        self._config = config
        self._run = run
        self._say = say
        self._member = member
        self._machine = machine or Machine(config, say)
        self._memory = MemoryLimit(config.max_memory_gb, LOWER)

    def waiting(self) -> str:
        """For people, and empty if the node goes on."""
        return f"paused: {self.reason}" if self.reason else ""

    def check_estimate(self, bytes: int) -> None:
        """Raises UserError if a round is going to take more memory than it may."""
        if too_much := self._memory.exceeded_by(bytes + NETWORK_BYTES * self._member):
            raise UserError(f"a round takes about {too_much}")

    @property
    def threads(self) -> int:
        """Most that are of use to torch."""
        return max(1, math.ceil(self._config.max_cpu / 100 * cpus()))

    @property
    def paused_s(self) -> float:
        """Spent paused so far, the present pause included. From any thread."""
        since = self._waits_since
        return self._paused_s + (0.0 if since is None else time.monotonic() - since)

    @contextmanager
    def watching(self, stop: Stopper) -> Iterator[None]:
        """Keep to the limits, and know when to pause. From the main thread."""
        self.look()
        ended = threading.Event()
        watch = threading.Thread(target=self._watch, args=(stop, ended), name="guest", daemon=True)
        watch.start()
        try:
            with cpu_limit(self._config.max_cpu, stop):
                yield
        finally:
            ended.set()
            watch.join(JOIN_S)

    def look(self, ended: threading.Event | None = None) -> None:
        """Find out whether to pause, and say it if that has changed; not if the run has `ended` meanwhile."""
        before = self.reason
        asked = pause_asked(self._run.paused, time.time())
        hours = self._config.quiet_hours
        still = f"quiet hours, {hours}" if quiet(hours, datetime.now()) else ""
        reason = asked or still or self._machine.busy()
        if ended is not None and ended.is_set():
            return
        self.reason = reason
        if reason != before:
            self._run.write_waits(reason)
        if self.reason and not before:
            stays = "; the node stays a member" if self._member else ""
            self._say(f"paused: {self.reason}{stays}")
        elif before and not self.reason:
            self._say("no longer paused")

    def wait(self, stop: Stopper) -> None:
        """Sleep while paused. For where weights are whole: raises StopRequested if that comes."""
        self._waits_since = began = time.monotonic()
        try:
            while self.reason:
                stop.allow()
                stop.wait(STEP_S)
        finally:
            self._waits_since = None
            self._paused_s += time.monotonic() - began

    def _watch(self, stop: Stopper, ended: threading.Event) -> None:
        told = False
        while not ended.wait(STEP_S if self._memory else LOOK_S):
            try:
                self._check(stop, ended)
            except OSError as error:  # too many open files, for one
                if not told:
                    told = True
                    self._say(f"limits and pauses wait until this machine can be looked at again: {error}")

    def _check(self, stop: Stopper, ended: threading.Event) -> None:
        self.look(ended)
        if not self.over and (exceeded := self._memory.exceeded()) and not ended.is_set():
            self.over = f"the node took {exceeded}; what it had learned is saved"
            stop.notice(LEAVE_S)
            self._say(self.over)
