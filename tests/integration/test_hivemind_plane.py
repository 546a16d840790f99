"""The DHT and stream half of the network, over real p2pd processes on loopback (scenarios in plane_scenarios.py,
dht_scenarios.py and card_scenarios.py)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PROGRAMS = [Path(__file__).with_name(name) for name in ("plane_scenarios.py", "dht_scenarios.py", "card_scenarios.py")]
SCENARIOS = [
    (program, name)
    for program in PROGRAMS
    for name in re.findall(r"^async def ([a-z]\w+)\(\) -> None:", program.read_text(), re.MULTILINE)
]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path, str], str]]:
    """Has a program play a scenario; what went wrong. One process for all scenarios of a program, because importing
    hivemind takes seconds; another one if it dies of a scenario."""
    running: dict[Path, subprocess.Popen[str]] = {}
    errors = (tmp_path_factory.mktemp("plane") / "stderr").open("w")

    def play(program: Path, name: str) -> str:
        if program not in running:
            running[program] = subprocess.Popen(
                [sys.executable, str(program)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(program.parents[2]), "OMP_NUM_THREADS": "1"},
            )
        process = running[program]
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(name + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if answer:
            return str(json.loads(answer)["failure"])
        with running.pop(program):
            return f"the process ended with code {process.wait(20)}"

    yield play
    with errors:
        for process in running.values():
            with process:
                assert process.stdin is not None
                process.stdin.close()
                assert process.wait(20) == 0


@pytest.mark.parametrize(("program", "name"), SCENARIOS, ids=[name for _, name in SCENARIOS])
def test_plane(ask: Callable[[Path, str], str], program: Path, name: str) -> None:
    failure = ask(program, name)
    assert not failure, failure
