"""Reasons to pause a node: its owner's command, or a machine that is wanted for other things."""

from __future__ import annotations

import math
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psutil

from swarm_node.config import NodeConfig
from swarm_node.config.machine import ResourcesConfig
from swarm_node.config.own import read_own
from swarm_node.errors import UserError
from swarm_node.say import Once, Say, Warned
from swarm_node.storage.going_on import going_on
from swarm_node.storage.nearby import names_near
from swarm_node.storage.pausing import until_words
from swarm_node.storage.rundir import BOOTSTRAP, RunDir, os_errors_explained

OWNER_CHECK_S = 10.0  # time between two looks whether the owner is active; each starts a process
COOLER_C = 5.0  # a node that paused for heat goes on so many degrees below `hot_c`
_PARTS = re.compile(r"(?=.)(?:(\d{1,4})d)?(?:(\d{1,4})h)?(?:(\d{1,5})m)?(?:(\d{1,6})s)?")


HOLDING_UP = ["max_cpu", "quiet_hours", "pause_on"]
NOT_ON_A_BOOTSTRAP = (
    "a bootstrap, which others join by at any time; --nice, --max-memory, --max-upload and --max-download work"
)


def refuse_in_a_crew(config: NodeConfig, run: RunDir) -> None:
    """Raise UserError for settings that would make a crew wait for this machine."""
    why = (
        "--stages: a stage that is paused or slowed down holds its crew up. Stop the node instead (Ctrl-C): it hands "
        "its stage over; --nice, --max-upload and --max-download work"
    )
    _refuse(config, ["max_cpu", "max_memory_gb", "quiet_hours", "pause_on"], why)
    if run.paused.exists():
        raise UserError(
            f"{run.path} is paused, which a stage of a crew cannot be: `swarm-node unpause {run.quoted}` first"
        )


def refuse_on_a_bootstrap(config: NodeConfig, run: RunDir) -> None:
    """Raise UserError for settings that would keep newcomers from reaching this bootstrap."""
    _refuse(config, HOLDING_UP, NOT_ON_A_BOOTSTRAP)
    if run.paused.exists():
        raise UserError(
            f"{run.path} is paused, which a bootstrap cannot be: `swarm-node unpause {run.quoted}` first, or stop it "
            "instead"
        )


def _refuse(config: NodeConfig, keys: Sequence[str], why: str) -> None:
    """Raise UserError for the first of the keys below `resources` whose value is not the default."""
    usual, chosen = ResourcesConfig(), config.resources.in_force()
    for key in keys:
        if getattr(chosen, key) != getattr(usual, key):
            raise UserError(f"resources.{key} is not for {why}")


def seconds_of(text: str) -> float:
    """Seconds in a text such as `1d2h30m15s` or `90m`. Raises UserError."""
    found = _PARTS.fullmatch(text)
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups()) if found else (0, 0, 0, 0)
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if not total:
        raise UserError(f"--for {text}: write how long, for example 2h, 90m or 1d12h")
    return float(total)


def pause_run(run: RunDir, for_s: float | None, now: float) -> str:
    """Pause the node of `run`, now or when it starts; a sentence that says so. Raises UserError."""
    _check_run(run, "pause")
    until = None if for_s is None else now + for_s
    with os_errors_explained(run.paused):
        run.write_paused(until)
    how_long = until_words(math.inf if until is None else until)
    then = _while_paused(run) if run.in_use else "no node runs there now: it will be when it starts"
    return f"paused {run.path}{how_long}; {then}; `swarm-node unpause {run.quoted}` goes on"


def _while_paused(run: RunDir) -> str:
    """What becomes of a paused node's weights, as words."""
    kept = "it keeps what it has learned"
    if not run.exists or not run.swarm.exists() or run.wrote(run.metrics):
        return kept
    averaging = read_own(run.config).averaging
    if averaging.method == "none" or not averaging.late_join:
        return kept
    return f"{kept} (a node that has just joined may take newer weights of a partner instead)"


def unpause_run(run: RunDir) -> str:
    """Undo `pause`; a sentence that says so. Raises UserError."""
    _check_run(run, "unpause")
    was = run.paused.exists()
    with os_errors_explained(run.paused):
        run.paused.unlink(missing_ok=True)
    if run.in_use:
        return f"{run.path} goes on" if was else f"{run.path} was not paused by `swarm-node pause`"
    way = going_on(run)
    goes_on = f"`swarm-node {way.command}` goes on with it" if way.command else f"to go on with it, {way.instead}"
    then = f"no node runs there now: {goes_on}"
    return f"{run.path} is paused no more; {then}" if was else f"{run.path} is not paused; {then}"


def _check_run(run: RunDir, verb: str) -> None:
    if not (run.exists or run.in_use):  # a run in its first seconds has no config.toml yet
        wants = f"`swarm-node {verb} RUN` wants a run directory, such as runs/node"
        raise UserError(f"no run in {run.path}: {wants}{names_near(run.path)}")
    if verb == "pause" and run.exists and read_own(run.config).pipeline.stages:
        raise UserError(
            f"{run.path} holds a stage of a crew, which would wait for it: `swarm-node stop {run.quoted}` instead; the "
            "node hands its stage over to another"
        )
    if verb == "pause" and run.read_role() == BOOTSTRAP:
        raise UserError(
            f"{run.path} is a bootstrap, which others join by at any time: `swarm-node stop {run.quoted}` instead"
        )


def quiet(hours: str, now: datetime) -> bool:
    """Whether local time `now` is within `hours`, such as "22:00-07:00"; the end is excluded."""
    if not hours:
        return False
    begin, end = hours.split("-")
    present = now.strftime("%H:%M")
    return begin <= present < end if begin < end else present >= begin or present < end


def on_battery() -> bool | None:
    """Whether the machine runs on battery; None = it has none, or does not tell."""
    try:
        battery = getattr(psutil, "sensors_battery", lambda: None)()
    except OSError:  # no /sys/class/power_supply, in some containers
        return None
    return None if battery is None or battery.power_plugged is None else not battery.power_plugged


def hottest() -> float | None:
    """The hottest sensor in degrees Celsius; None = the system has none, or does not tell."""
    try:
        sensors: Mapping[str, Sequence[Any]] = getattr(psutil, "sensors_temperatures", dict)()
    except OSError:
        return None
    return max((each.current for found in sensors.values() for each in found if each.current), default=None)


def owner_active() -> bool | None:
    """Whether any session on this machine is in use, by systemd-logind; None = it cannot be asked."""
    asked = ["loginctl", "show-session", "--property=IdleHint"]  # of no session in particular: of all together
    try:
        done = subprocess.run(asked, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return {"IdleHint=no": True, "IdleHint=yes": False}.get(done.stdout.strip()) if done.returncode == 0 else None


@dataclass
class Machine:
    """The reasons to pause that `resources.pause_on` names."""

    config: ResourcesConfig
    say: Say
    on_battery: Callable[[], bool | None] = on_battery
    hottest: Callable[[], float | None] = hottest
    owner_active: Callable[[], bool | None] = owner_active
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._once = Once(self.say)
        self._hot = False
        self._active: bool | None = None
        self._ask_owner_at = -math.inf

    def busy(self) -> str:
        """The first reason to pause, in words; empty = there is none. Says once what the system does not tell."""
        wanted = self.config.pause_on
        if "battery" in wanted and self._told("battery", self.on_battery(), "whether it is on battery"):
            return "on battery"
        if "hot" in wanted:
            degrees = self._told("hot", self.hottest(), "how hot it is")
            limit = self.config.hot_c - COOLER_C * self._hot
            self._hot = degrees is not None and degrees >= limit
            if self._hot:
                return f"hot, {degrees:.0f} °C"
        if "owner" in wanted:
            if self.clock() >= self._ask_owner_at:
                self._active = self._told("owner", self.owner_active(), "whether its owner is active")
                self._ask_owner_at = self.clock() + OWNER_CHECK_S
            if self._active:
                return "its owner is active"
        return ""

    def _told(self, name: str, value: Any, what: str) -> Any:
        if value is None:
            self._once(name, Warned(f"this machine does not tell {what}: resources.pause_on {name} has no effect now"))
        return value
