"""A node keeps to its resource limits, and pauses when it should, losing nothing."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from swarm_node.cli.app import app
from swarm_node.config import NodeConfig, RolloutsConfig, dump_toml, load_config
from swarm_node.config.machine import ResourcesConfig
from swarm_node.errors import TEMPORARY, USER_ERROR, StopRequested, TemporaryError, UserError
from swarm_node.observability.usage import ProcessTree, cpus
from swarm_node.policy.engines.native import NativeEngine
from swarm_node.runtime.limits import (
    BURST_S,
    CPU_CHECK_S,
    NAP_S,
    NETWORK_BYTES,
    Allowance,
    ResourceLimits,
    cpu_limit,
    gentle_by_default,
    has_owner,
    say_preset,
)
from swarm_node.runtime.pause import (
    Machine,
    hottest,
    on_battery,
    pause_run,
    quiet,
    seconds_of,
    unpause_run,
)
from swarm_node.runtime.shutdown import EmbeddedStopper
from swarm_node.say import level_of
from swarm_node.storage.pausing import pause_asked
from swarm_node.storage.rundir import RunDir, goes_with_container
from tests.support.run_files import metrics, read_jsonl, write
from tests.support.starting import train_locally
from tests.support.virtual_time import VirtualTime
from tests.support.waiting import until


def made(path: Path, **sections: Any) -> RunDir:
    """A run directory in which a run was started."""
    path.mkdir()
    run = RunDir(path)
    run.write("config.toml", dump_toml(NodeConfig.model_validate(sections)))
    return run


def settings(run: Path, rounds: int = 2, **resources: Any) -> NodeConfig:
    return NodeConfig.model_validate(
        {
            "run_dir": str(run),
            "rounds": rounds,
            "rollouts": {"groups": 2, "group_size": 2, "max_new_tokens": 4},
            "eval": {"questions": 0},
            "resources": resources,
        }
    )


# --------------------------------------------------------------------- when


@pytest.mark.parametrize(
    ("hours", "now", "expected"),
    [
        ("22:00-07:00", "23:10", True),
        ("22:00-07:00", "06:59", True),
        ("22:00-07:00", "07:00", False),
        ("22:00-07:00", "12:00", False),
        ("09:00-17:30", "09:00", True),
        ("09:00-17:30", "17:30", False),
        ("", "12:00", False),
    ],
)
def test_quiet_hours_may_pass_midnight(hours: str, now: str, expected: bool) -> None:
    assert quiet(hours, datetime.fromisoformat(f"2026-03-01T{now}")) is expected


@pytest.mark.parametrize("text", ["24:00-07:00", "7:00-8:00", "22:00", "22:60-07:00"])
def test_hours_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="resources.quiet_hours"):
        load_config(flags={"quiet_hours": text})


@pytest.mark.parametrize("text", ["22:00-22:00", "00:00-00:00"])
def test_hours_that_never_end_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"resources\.quiet_hours.*must end at another time than they begin"):
        load_config(flags={"quiet_hours": text})


def test_limits_reach_their_keys_and_have_minima() -> None:
    with pytest.raises(UserError, match="below that, peers give up waiting"):
        load_config(flags={"max_upload": 0.5})
    config = load_config(flags={"max_upload": 2.0, "max_cpu": 50.0, "max_memory": 4.0, "pause_on": ["hot", "battery"]})
    assert (config.network.max_upload_mbit, config.resources.max_cpu, config.resources.max_memory_gb) == (
        2.0,
        50.0,
        4.0,
    )
    assert config.resources.pause_on == ["hot", "battery"]


class Signs:
    """A machine that tells what the test says."""

    def __init__(self, *pause_on: str) -> None:
        self.battery: bool | None = False
        self.degrees: float | None = 40.0
        self.active: bool | None = False
        self.asked = 0
        self.now = 0.0
        self.said: list[str] = []
        config = ResourcesConfig.model_validate({"pause_on": pause_on})
        self.machine = Machine(
            config, self.said.append, lambda: self.battery, lambda: self.degrees, self._owner, lambda: self.now
        )

    def _owner(self) -> bool | None:
        self.asked += 1
        return self.active


def test_it_pauses_only_for_chosen_reasons() -> None:
    signs = Signs()
    signs.battery, signs.degrees, signs.active = True, 120.0, True
    assert signs.machine.busy() == "" and signs.asked == 0
    assert ResourcesConfig().pause_on == []
    signs = Signs("battery")
    signs.battery = True
    assert signs.machine.busy() == "on battery"


def test_heat_pauses_until_clearly_cooler() -> None:
    signs = Signs("hot")
    seen = []
    for signs.degrees in (84.0, 85.0, 81.0, 79.9, 84.0):
        seen.append(signs.machine.busy())
    assert seen == ["", "hot, 85 °C", "hot, 81 °C", "", ""]


def test_the_owner_is_asked_for_every_ten_seconds() -> None:
    signs = Signs("owner")
    signs.active = True
    assert signs.machine.busy() == "its owner is active"
    signs.active = False
    assert signs.machine.busy() == "its owner is active" and signs.asked == 1
    signs.now = 11.0
    assert signs.machine.busy() == "" and signs.asked == 2


def test_leaving_waits_for_no_answer_of_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_node.runtime.limits.MACHINE_CHECK_S", 0.01)
    asked, answers, said = threading.Event(), threading.Event(), list[str]()

    def slow() -> bool:  # as `loginctl` while the system goes down
        if threading.current_thread() is threading.main_thread():
            return False
        asked.set()
        assert answers.wait(60)
        return True

    config = ResourcesConfig(pause_on=["owner"])
    machine = Machine(config, said.append, owner_active=slow, clock=count(0, 60).__next__)
    limits = ResourceLimits(config, made(tmp_path / "run"), said.append, machine=machine)
    with limits.watching(Stop(0)):  # type: ignore[arg-type]
        assert asked.wait(60)
    [thread] = [each for each in threading.enumerate() if each.name == "limits"]
    answers.set()
    thread.join(60)
    assert not thread.is_alive() and said == [] and limits.reason == ""


def test_missing_sensors_are_said_once() -> None:
    signs = Signs("battery", "hot", "owner")
    signs.battery = signs.degrees = signs.active = None
    assert [signs.machine.busy() for _ in range(3)] == ["", "", ""]
    assert len(signs.said) == 3 and all("has no effect now" in text for text in signs.said)


@pytest.mark.parametrize(("sensor", "ask"), [("sensors_battery", on_battery), ("sensors_temperatures", hottest)])
def test_an_unreadable_sensor_tells_nothing(
    sensor: str, ask: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container without /sys/class/power_supply, of which psutil makes a list."""

    def fails() -> None:
        os.listdir("/sys/class/no_such_class")

    monkeypatch.setattr(f"psutil.{sensor}", fails, raising=False)
    assert ask() is None


def test_failing_system_calls_end_no_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_node.runtime.limits.PAUSE_CHECK_S", 0.01)
    failing, again, said = threading.Event(), threading.Event(), list[str]()

    def children(me: psutil.Process, recursive: bool) -> list[psutil.Process]:
        failing.set()
        if again.is_set():
            return []
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(psutil.Process, "children", children)
    assert ProcessTree().cpu_s() > 0, "a signal's handler asks it"
    run = made(tmp_path / "run")
    limits = ResourceLimits(ResourcesConfig(max_memory_gb=1000.0), run, said.append)
    failing.clear()
    with limits.watching(Stop(0)):  # type: ignore[arg-type]
        for _ in range(3):
            assert failing.wait(60)
            failing.clear()
        again.set()
        pause_run(run, None, time.time())
        until(lambda: limits.reason, 60.0)
    assert [text for text in said if "Too many open files" in text] == said[:1]


# --------------------------------------------------------------------- pause and resume


@pytest.mark.parametrize(("text", "seconds"), [("2h", 7200), ("90m", 5400), ("1d12h", 129600), ("45s", 45)])
def test_how_long_to_pause(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "2", "0m", "h", "2h 3m", "-1h", "1.5h"])
def test_lengths_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="for example 2h"):
        seconds_of(text)


def test_a_pause_ends_by_itself_or_by_unpause(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    assert "it will be when it starts" in pause_run(run, 60.0, now=1000.0)
    assert pause_asked(run.paused, 1059.0).startswith("by `swarm-node pause` until ")
    assert pause_asked(run.paused, 1060.0) == ""
    pause_run(run, None, now=1000.0)
    assert pause_asked(run.paused, 1e12) == "by `swarm-node pause`"
    assert f"is paused no more; no node runs there now: `swarm-node resume {run.path}`" in unpause_run(run)
    assert not run.paused.exists()
    assert "is not paused; no node runs there now" in unpause_run(run)
    with RunDir.open(run.path):
        assert unpause_run(run).endswith("was not paused by `swarm-node pause`")
        pause_run(run, None, now=1000.0)
        assert unpause_run(run) == f"{run.path} goes on"


@pytest.mark.parametrize(("method", "told"), [("noloco", True), ("none", False)])
def test_a_pause_tells_whose_weights_come_after(method: str, told: bool, tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    run.config.write_text(f'[averaging]\nmethod = "{method}"\n')
    with RunDir.open(run.path):
        assert "newer weights of a partner" not in pause_run(run, None, now=1000.0), "it is in no swarm"
        run.swarm.touch()
        assert ("newer weights of a partner" in pause_run(run, None, now=1000.0)) == told
        run.metrics.touch()
        assert "newer weights of a partner" not in pause_run(run, None, now=1000.0), "a round has ended"


def test_a_run_that_has_just_started_can_be_paused(tmp_path: Path) -> None:
    with RunDir.open(tmp_path / "new") as run:
        assert "it keeps what it has learned;" in pause_run(run, None, now=1000.0)
        assert pause_asked(run.paused, 1001.0) == "by `swarm-node pause`"
    with pytest.raises(UserError, match="no run in"):
        pause_run(RunDir(tmp_path / "new"), None, now=1000.0)


@pytest.mark.parametrize("content", [b"garbage", b"\xff\xfe", b"nan", b"1e999", b"9" * 10_000])
def test_an_unreadable_pause_has_no_end(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "paused").write_bytes(content)
    assert pause_asked(tmp_path / "paused", time.time()).startswith("by `swarm-node pause`")


def cli(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments, prog_name="swarm-node")
    return result.exit_code, result.output


def test_the_commands(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    assert cli("pause", str(run.path), "--for", "2h")[0] == 0 and run.paused.exists()
    assert cli("unpause", str(run.path))[0] == 0 and not run.paused.exists()
    run.config.write_text(run.config.read_text() + "\n[of_another_version]\n")
    assert cli("pause", str(run.path))[0] == 0 and run.paused.exists()
    code, said = cli("pause", str(tmp_path / "nowhere"))
    assert code == 2 and said.count("\n") == 1 and "no run in" in said and not (tmp_path / "nowhere").exists()


def test_stages_are_not_paused_nor_limited(tmp_path: Path) -> None:
    run = made(tmp_path / "run", pipeline={"stages": 2})
    code, said = cli("pause", str(run.path))
    assert code == 2 and "hands its stage over" in said and not run.paused.exists()
    limited = settings(tmp_path / "other", max_cpu=50).model_copy(update={"pipeline": load_config(run.config).pipeline})
    with pytest.raises(UserError, match="resources.max_cpu is not for --stages"):
        train_locally(limited)


class Stop:
    """A stopper that nobody asks for, or after so many waits."""

    requested = False

    def __init__(self, waits: int, at_wait: Callable[[], None] = lambda: None) -> None:
        self.waits, self.at_wait = waits, at_wait
        self.allowed = 0

    def allow(self) -> None:
        self.allowed += 1

    def wait(self, seconds: float) -> None:
        self.waits -= 1
        if self.waits < 0:
            raise StopRequested
        self.at_wait()


def test_a_paused_node_can_be_stopped(tmp_path: Path) -> None:
    run, said = made(tmp_path / "run"), []
    pause_run(run, None, time.time())
    limits = ResourceLimits(ResourcesConfig(), run, said.append, member=True)
    limits.look()
    limits.look()
    assert limits.waiting() == "paused: by `swarm-node pause`"
    goes_on = f"`swarm-node unpause {run.quoted}` goes on"
    assert said == [f"paused: by `swarm-node pause`; {goes_on}; the node stays a member"]
    with pytest.raises(StopRequested):
        limits.wait(Stop(3))  # type: ignore[arg-type]
    stop = Stop(10, lambda: (unpause_run(run), limits.look())[0])  # type: ignore[func-returns-value, arg-type, return-value]
    limits.wait(stop)  # type: ignore[arg-type]
    assert stop.allowed == 1 and limits.waiting() == "" and said[1:] == ["no longer paused"]


def test_a_pause_s_length_is_known_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, now = made(tmp_path / "run"), [100.0]
    monkeypatch.setattr("swarm_node.runtime.limits.time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: 0.0))
    limits, known = ResourceLimits(ResourcesConfig(), run, print), list[float]()
    pause_run(run, None, 0.0)
    limits.look()

    def wait() -> None:
        now[0] += 60.0
        known.append(limits.paused_s)
        if len(known) == 2:
            unpause_run(run)
            limits.look()

    limits.wait(Stop(10, wait))  # type: ignore[arg-type]
    assert known == [60.0, 120.0]
    now[0] += 60.0
    assert limits.paused_s == 120.0


def test_a_paused_run_loses_nothing(tmp_path: Path) -> None:
    """Paused at its start and resumed: as many rounds, with the same figures, as one that never was."""
    paused, plain = tmp_path / "paused", tmp_path / "plain"
    train_locally(settings(plain, rounds=3), json_output=True)
    train_locally(settings(paused, rounds=1), json_output=True)
    pause_run(RunDir(paused), None, time.time())
    events = RunDir(paused).events

    def let_go() -> int:
        try:
            until(lambda: "paused: by `swarm-node pause`" in events.read_text(), 60.0)
            return len(read_jsonl(RunDir(paused).metrics))
        finally:
            unpause_run(RunDir(paused))

    with ThreadPoolExecutor(1) as owner:
        trained = owner.submit(let_go)
        train_locally(settings(paused, rounds=3), json_output=True)
    assert trained.result() == 1, "nothing was trained while it was paused"
    ours, theirs = (read_jsonl(RunDir(path).metrics) for path in (paused, plain))
    assert [(m["round"], m["reward"]) for m in ours] == [(m["round"], m["reward"]) for m in theirs]


# --------------------------------------------------------------------- how much


def test_an_allowance_is_spent_and_earned_again() -> None:
    allowance = Allowance(rate=0.5, used=10.0, now=0.0)
    assert allowance.wait_s(used=10.5, now=0.0) == 0.0, "what was not used lately may be made up for"
    assert allowance.wait_s(used=11.5, now=1.0) == pytest.approx(1.0), "half a second over, at half a second a second"
    assert allowance.wait_s(used=11.5, now=1.5) == pytest.approx(0.5)
    assert allowance.wait_s(used=11.5, now=2.0) == 0.0
    assert allowance.wait_s(used=12.0, now=1000.0) == 0.0
    assert allowance.wait_s(used=12.6, now=1000.0) == pytest.approx(0.2), "long idleness earns no more than a second"


def test_a_busy_process_naps_above_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stop = VirtualTime(), Stop(0)
    monkeypatch.setattr("swarm_node.runtime.limits.time", clock)
    monkeypatch.setattr("swarm_node.runtime.limits.cpus", lambda: 1.0)
    monkeypatch.setattr(ProcessTree, "cpu_s", lambda processes: clock.process_time())
    with cpu_limit(20.0, stop):  # type: ignore[arg-type]
        for _ in range(200):
            clock.work(CPU_CHECK_S)
            signal.raise_signal(signal.SIGPROF)
            assert clock.used <= 0.2 * (clock.now + BURST_S) + CPU_CHECK_S
        assert clock.used == pytest.approx(0.2 * (clock.now + BURST_S), rel=0.01) and max(clock.naps) <= NAP_S
        clock.work(CPU_CHECK_S)
        naps = len(clock.naps)
        while len(clock.naps) == naps:  # until the system has counted a tick of this process
            sum(range(10_000))
        stop.requested = True
        clock.work(9.0)
        naps = len(clock.naps)
        signal.raise_signal(signal.SIGPROF)
        assert len(clock.naps) == naps, "whoever is to stop does not nap"


@pytest.mark.parametrize(
    ("files", "allowed"),
    [
        ({}, 64.0),
        ({"proc/self/cgroup": "0::/\n"}, 64.0),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 64.0),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2.0),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "9900000 100000\n"}, 64.0),
        (
            {
                "proc/self/cgroup": "0::/job/step\n",
                "sys/fs/cgroup/job/cpu.max": "50000 100000\n",  # of all steps
                "sys/fs/cgroup/job/step/cpu.max": "max 100000\n",
            },
            0.5,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/docker/ab\n3:memory:/docker/ab\n0::/\n",  # seen from inside
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            1.5,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            64.0,
        ),
    ],
)
def test_a_container_has_less_cpu_than_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], allowed: float
) -> None:
    monkeypatch.setattr("swarm_node.observability.usage.cores", lambda: 64)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpus(tmp_path) == allowed


def test_the_limit_is_a_container_s_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_node.runtime.limits.cpus", lambda: 8.0)
    rates: list[float] = []

    class Noted(Allowance):
        def __init__(self, rate: float, used: float, now: float) -> None:
            rates.append(rate)
            super().__init__(rate, used, now)

    monkeypatch.setattr("swarm_node.runtime.limits.Allowance", Noted)
    limits = ResourceLimits(ResourcesConfig(max_cpu=25.0), made(tmp_path / "run"), print)
    with limits.watching(Stop(0)):  # type: ignore[arg-type]
        assert rates == [2.0] and limits.threads == 2


NICE = """
import os, sys
from swarm_node.config.machine import ResourcesConfig
from swarm_node.runtime.limits import be_nice
os.nice(3)
for wanted in (0, 7, 5):
    be_nice(ResourcesConfig(nice=wanted))
    print(os.getpriority(os.PRIO_PROCESS, 0))
assert "torch" not in sys.modules
"""


def test_priority_is_lowered_and_never_raised() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    done = subprocess.run([sys.executable, "-c", NICE], capture_output=True, text=True, timeout=60, check=True)
    start = min(before + 3, 19)
    assert [int(line) for line in done.stdout.split()] == [start, max(start, 7), max(start, 7)]


def test_children_count() -> None:
    processes = ProcessTree()
    alone = processes.rss()
    child = subprocess.Popen([sys.executable, "-c", "x = bytearray(2**26); print(1, flush=True); input()"], **PIPES)
    try:
        assert child.stdout is not None and child.stdout.readline()
        assert ProcessTree().rss() - alone > 2**26
    finally:
        child.communicate(b"\n", timeout=60)


PIPES: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}


def test_a_round_beyond_the_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a round takes about .* more than --max-memory 0.1: lower grpo"):
        train_locally(settings(tmp_path / "run", max_memory_gb=0.1), json_output=True)


def test_questions_asked_before_a_run_keep_to_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The length of answers is measured before anything else: one question at a time here, though eight are asked."""
    sizes, decode = list[int](), NativeEngine.decode

    def decoded(self: NativeEngine, prompts: list[list[int]], *more: Any) -> Any:
        sizes.append(len(prompts))
        return decode(self, prompts, *more)

    monkeypatch.setattr(NativeEngine, "decode", decoded)
    monkeypatch.setattr("swarm_node.rollouts.answer_length.SMALL", 1)
    config = settings(tmp_path / "run", max_memory_gb=0.1)
    config = config.model_copy(update={"rollouts": RolloutsConfig(groups=2, group_size=2)})
    with pytest.raises(UserError, match="a round takes about"):
        train_locally(config, json_output=True)
    assert len(sizes) >= 8 and set(sizes) == {1}


def test_a_member_s_round_includes_its_network(tmp_path: Path) -> None:
    """The figure that is said is the figure that is checked."""
    config = ResourcesConfig(max_memory_gb=1)
    alone, member = (ResourceLimits(config, RunDir(tmp_path), print, each) for each in (False, True))
    alone.check_estimate(alone.with_network(2**30))
    assert member.with_network(2**30) == 2**30 + NETWORK_BYTES
    with pytest.raises(UserError, match="a round takes about 1.25 GiB"):
        member.check_estimate(member.with_network(2**30))


def test_too_much_memory_saves_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ResourceLimits, "check_estimate", lambda *arguments: None)
    with pytest.raises(UserError, match=r"the node took .* GiB, more than --max-memory 0.1: ") as ended:
        train_locally(settings(tmp_path / "run", rounds=100_000, max_memory_gb=0.1), json_output=True)
    rounds = len(read_jsonl(RunDir(tmp_path / "run").metrics)) if RunDir(tmp_path / "run").metrics.exists() else 0
    newest = max((tmp_path / "run/checkpoints").iterdir(), key=lambda path: path.name)
    assert newest.name.startswith(f"round-{rounds:08}")
    assert isinstance(ended.value, TemporaryError) == (rounds > 0), "the next start would come no further"


@pytest.mark.parametrize("member", [False, True])
@pytest.mark.parametrize(("rounds", "code"), [(1, TEMPORARY), (0, USER_ERROR)])
def test_too_much_memory_is_an_error_whose_code_a_forced_exit_has(
    rounds: int, code: int, member: bool, tmp_path: Path
) -> None:
    """A round of an earlier start says nothing of the next one."""
    write(RunDir(tmp_path).metrics, metrics(1))
    assert _ends_over(0.01, member, tmp_path, rounds) == code


@pytest.mark.parametrize(("member", "code"), [(True, TEMPORARY), (False, USER_ERROR)])
def test_a_network_that_grew_says_nothing_of_the_next_start(member: bool, code: int, tmp_path: Path) -> None:
    """This process keeps to its share: other processes take more than the network has in the estimate."""
    most = ProcessTree().rss(alone=True) + NETWORK_BYTES + 2**27
    child = [sys.executable, "-c", "import sys; kept = b'x' * 2**29; print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(child, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        assert _ends_over(most / 2**30, member, tmp_path) == code
        other.communicate()


def _ends_over(gib: float, member: bool, path: Path, rounds: int = 0) -> int:
    """The exit code for which a run is ended that takes more memory than `gib` after so many rounds, which it says as
    an error."""
    said: SimpleQueue[str] = SimpleQueue()
    config, stop = ResourcesConfig(max_memory_gb=gib), EmbeddedStopper()
    limits = ResourceLimits(config, RunDir(path), said.put, member=member)
    if rounds:
        write(RunDir(path).metrics, *map(metrics, range(1, 2 + rounds)))
    with limits.watching(stop):
        sentence = said.get(timeout=60)
    assert level_of(sentence) == logging.ERROR and sentence == str(limits.over) and stop.requested
    assert isinstance(limits.over, TemporaryError) == (stop.exit_code == TEMPORARY)
    return stop.exit_code


# --------------------------------------------------------------------- where it lives

NAMED = "/var/lib/docker/volumes/swarm/_data"
UNNAMED = f"/var/lib/docker/volumes/{'0a' * 32}/_data"


@pytest.mark.parametrize(
    ("mark", "mounts", "lost"),
    [
        ("", {"/": "/"}, False),
        (".dockerenv", {"/": "/"}, True),
        (".dockerenv", {"/": "/", "/data": NAMED}, False),
        (".dockerenv", {"/": "/", "/data": UNNAMED}, True),
        (".dockerenv", {"/": "/", "/data": UNNAMED, "/data/run": "/home/me/run"}, False),
        ("run/.containerenv", {"/": "/", "/models": NAMED}, True),
    ],
)
def test_a_container_without_a_volume_is_noticed(tmp_path: Path, mark: str, mounts: dict[str, str], lost: bool) -> None:
    for folder in ("run", "proc/self"):
        (tmp_path / folder).mkdir(parents=True)
    if mark:
        (tmp_path / mark).touch()
    lines = [f"{n} 1 8:1 {source} {mount} rw - ext4 /dev/x rw" for n, (mount, source) in enumerate(mounts.items())]
    (tmp_path / "proc/self/mountinfo").write_text("\n".join(lines))
    assert goes_with_container(Path("/data/run"), tmp_path) is lost


def test_a_preset_leaves_chosen_limits_alone() -> None:
    gentle = ResourcesConfig(preset="gentle").in_force()
    assert (gentle.nice, gentle.max_cpu, gentle.pause_on) == (19, 50.0, ["battery"])
    mixed = ResourcesConfig(preset="gentle", max_cpu=80, pause_on=[]).in_force()
    assert (mixed.nice, mixed.max_cpu, mixed.pause_on) == (19, 80.0, [])
    assert ResourcesConfig(preset="all").in_force() == ResourcesConfig(preset="all")
    assert ResourcesConfig().in_force() == ResourcesConfig()


@pytest.mark.parametrize("name", ["gentle", "normal", "all"])
def test_a_flag_sets_its_preset(name: str, tmp_path: Path) -> None:
    code, said = cli("local", f"--{name}", "--run-dir", str(tmp_path / "r"), "--dry-run")
    assert code == 0 and f'preset = "{name}"' in said


@pytest.mark.parametrize(
    ("battery", "variables", "owner"),
    [
        (True, {}, "a battery"),
        (None, {"DISPLAY": ":0"}, "a graphical session"),
        (None, {"WAYLAND_DISPLAY": "wayland-0"}, "a graphical session"),
        (None, {"DISPLAY": "localhost:10", "SSH_CONNECTION": "192.0.2.1 1 192.0.2.2 22"}, ""),
        (None, {}, ""),
    ],
)
def test_a_machine_with_an_owner_is_treated_gently(
    battery: bool | None, variables: dict[str, str], owner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_node.runtime.limits.on_battery", lambda: battery)
    monkeypatch.setattr("sys.platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert has_owner(tmp_path) == owner


def test_gentle_is_said_and_gives_way_to_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_node.runtime.limits.has_owner", lambda: "a battery")
    said: list[str] = []
    assert gentle_by_default(NodeConfig(), said.append).resources.in_force().nice == 19
    assert len(said) == 1 and "a battery" in said[0] and "--all" in said[0]
    for chosen in ({"resources": {"preset": "all"}}, {"resources": {"nice": 5}}, {"pipeline": {"stages": 2}}):
        config = NodeConfig.model_validate(chosen)
        assert gentle_by_default(config, said.append) is config
    assert len(said) == 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"preset": "gentle"}, "--gentle: lowest priority (nice 19), at most 2 of 4 cores, pause on battery"),
        ({"preset": "gentle", "max_cpu": 25, "pause_on": []}, "--gentle: lowest priority (nice 19), at most 1 of 4"),
        ({"preset": "normal"}, "--normal: lower priority (nice 10) ("),
        ({"preset": "all"}, ""),
        ({"nice": 19}, ""),
    ],
)
def test_a_chosen_preset_says_its_limits(settings: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_node.runtime.limits.cpus", lambda: 4.0)
    sentences: list[str] = []
    say_preset(ResourcesConfig(**settings), sentences.append)
    assert [sentence.startswith(said) for sentence in sentences] == [True] * bool(said)


def test_a_preset_speaks_of_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_node.runtime.limits.cpus", lambda: 1.0)
    sentences: list[str] = []
    say_preset(ResourcesConfig(preset="gentle"), sentences.append)
    assert "at most 0.5 of 1 core, pause" in sentences[0]
