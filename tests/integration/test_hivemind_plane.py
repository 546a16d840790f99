"""The DHT and stream half of the network, over real p2pd processes on loopback (scenarios in plane_scenarios.py)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("plane_scenarios.py")
NAMES = re.findall(r"^async def ([a-z]\w+)\(\) -> None:", PROGRAM.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """One process for all of them: importing hivemind takes seconds."""
    errors = (tmp_path_factory.mktemp("plane") / "stderr").open("w")
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(PROGRAM.parents[2]), "OMP_NUM_THREADS": "1"},
    )
    with process, errors:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(20) == 0


@pytest.mark.parametrize("name", NAMES)
def test_plane(program: subprocess.Popen[str], name: str) -> None:
    assert program.stdin is not None and program.stdout is not None
    program.stdin.write(name + "\n")
    program.stdin.flush()
    failure = json.loads(program.stdout.readline())["failure"]
    assert not failure, failure
