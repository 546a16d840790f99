"""torch has as many threads as there are idle cores, and they wait without taking one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
import torch

from swarm_node.observability.usage import ProcessTree, cores
from swarm_node.runtime.threads import AGREE, LOOK_S, Threads, busy_s, suggested
from swarm_node.runtime.waiting import PASSIVE, wait_passively
from swarm_node.say import Detail

CORES = 4


class Machine:
    """Four cores, of which others keep some busy from now on, and a node that takes one."""

    def __init__(self) -> None:
        self.now = self.all_s = self.own_s = self.others = 0.0
        self.said: list[str] = []
        self.readable = True

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.own_s += seconds
        self.all_s += seconds * (1 + self.others)

    def busy_s(self, nice: bool) -> float:
        if not self.readable:
            raise psutil.AccessDenied()
        return self.all_s

    def threads(self) -> Threads:
        return Threads(self.said.append, lambda: self.own_s, self.busy_s, lambda: self.now, lambda: CORES)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.delenv("OMP_NUM_THREADS")
    torch.set_num_threads(CORES)
    yield Machine()
    torch.set_num_threads(1)


def begun(machine: Machine, asked: bool = False, device: str = "cpu", most: int = CORES) -> Threads:
    threads = machine.threads()
    machine.pass_time(3.0)
    threads.begin(most, asked, device)
    return threads


@pytest.mark.parametrize(
    ("others", "most", "nice", "expected"),
    [
        (0.0, 4, False, 4),
        (0.4, 4, True, 4),
        (1.0, 4, False, 3),
        (1.0, 2, False, 2),
        (1.0, 4, True, 1),
        (3.9, 4, False, 1),
        (9.0, 4, False, 1),
    ],
)
def test_there_are_as_many_threads_as_idle_cores(others, most, nice, expected):
    assert suggested(others, most, CORES, nice) == expected


def test_the_first_number_is_said_once(machine):
    machine.others = 2.0
    begun(machine)
    assert torch.get_num_threads() == 2
    [line] = machine.said
    assert line == "computes with 2 threads: others keep 2.0 of 4 cores busy; --threads N fixes the number"
    assert not isinstance(line, Detail)


def test_load_lowers_the_number_at_once(machine):
    threads = begun(machine)
    machine.others = 3.0
    machine.pass_time(LOOK_S - 1)
    threads.look()
    assert torch.get_num_threads() == CORES  # too early to know
    machine.pass_time(LOOK_S)
    threads.look()
    assert torch.get_num_threads() == 1
    assert isinstance(machine.said[-1], Detail) and "3.0 of 4 cores" in machine.said[-1]


def test_two_looks_must_agree_to_raise_it(machine):
    machine.others = 3.0
    threads = begun(machine)
    for others, expected in ((0.0, 1), (3.0, 1), *[(0.0, 1)] * (AGREE - 1), (0.0, CORES)):
        machine.others = others
        machine.pass_time(LOOK_S)
        threads.look()
        assert torch.get_num_threads() == expected


def test_the_number_stays_on_an_idle_machine(machine):
    threads = begun(machine)
    for others in (0.0, 0.3, 0.1, 0.4, 0.2):
        machine.others = others
        machine.pass_time(LOOK_S)
        threads.look()
        assert torch.get_num_threads() == CORES
    assert len(machine.said) == 1


@pytest.mark.parametrize(
    ("choice", "kept"),
    [({"asked": True}, 4), ({"device": "cuda"}, 4), ({"most": 3, "asked": True}, 3), ({"most": 1}, 1)],
)
def test_a_choice_of_the_user_stands(machine, choice, kept):
    machine.others = 3.0
    threads = begun(machine, **choice)
    machine.pass_time(LOOK_S)
    threads.look()
    assert torch.get_num_threads() == kept and machine.said == []


def test_the_environment_fixes_the_number(machine, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    machine.others = 3.0
    begun(machine).look()
    assert torch.get_num_threads() == CORES and machine.said == []


def test_an_unreadable_machine_changes_nothing(machine):
    machine.readable = False
    threads = begun(machine)
    machine.pass_time(LOOK_S)
    threads.look()
    assert torch.get_num_threads() == CORES
    assert "is not known" in machine.said[0]


def test_own_work_is_part_of_what_the_cores_do():
    tree, before = ProcessTree(), busy_s(nice=True)
    own = tree.cpu_s()
    while tree.cpu_s() - own < 0.2:
        sum(range(10_000))
    spent = busy_s(nice=True) - before
    assert spent >= 0.1  # the system counts in hundredths, core by core
    assert cores() >= 1


def test_threads_are_told_to_sleep_soon_while_they_wait():
    environment: dict[str, str] = {}
    assert wait_passively(environment, loaded=())
    assert environment == PASSIVE


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_a_way_of_waiting_in_the_environment_stands(name):
    environment = {name: "1"}
    assert not wait_passively(environment, loaded=())
    assert environment == {name: "1"}


def test_nothing_is_promised_once_torch_is_loaded():
    environment: dict[str, str] = {}
    assert not wait_passively(environment, loaded=("torch",))
    assert environment == {}


@pytest.mark.parametrize(
    "start",
    [
        "from swarm_node.cli.app import main; sys.argv = ['swarm-node', '--version']; main()",
        "import swarm_node; swarm_node.train({'no such key': 1})",
    ],
)
def test_a_start_sets_it_before_torch_is_loaded(start):
    script = f"""
import os, sys
try:
    {start}
except BaseException as end:
    print(type(end).__name__)
print(os.environ["OMP_WAIT_POLICY"], os.environ["GOMP_SPINCOUNT"], "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines()[-2:] in (["SystemExit", "PASSIVE 1000 False"], ["UserError", "PASSIVE 1000 False"])
