"""The DHT and stream half of the network, over real p2pd processes on loopback (scenarios in plane_scenarios.py,
dht_scenarios.py and card_scenarios.py)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.marked import VARIABLE

ROOT = Path(__file__).parents[2]
Play = Callable[[str], str]
"""The name of a scenario -> what went wrong in it, if anything did."""


def scenarios(program: str) -> list[str]:
    text = Path(__file__).with_name(program).read_text()
    return re.findall(r"^async def ([a-z]\w+)\(\) -> None:", text, re.MULTILINE)


@contextmanager
def player(program: str, folder: Path) -> Iterator[Play]:
    """One process for all scenarios of a program, because importing hivemind takes seconds; another one if it dies of a
    scenario."""

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name(program))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            | {name: os.environ[name] for name in (VARIABLE, "TMPDIR")},
        )

    def play(name: str) -> str:
        nonlocal process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(name + "\n")
        process.stdin.flush()
        if answer := process.stdout.readline():
            return str(json.loads(answer)["failure"])
        with process:
            failure = f"the process ended with code {process.wait(20)}"
        process = start()
        return failure

    with (folder / "stderr").open("w") as errors:
        process = start()
        yield play
        with process:
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(20) == 0


@pytest.fixture(scope="module")
def play_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
    with player("plane_scenarios.py", tmp_path_factory.mktemp("plane")) as play:
        yield play


@pytest.fixture(scope="module")
def play_dht(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
    with player("dht_scenarios.py", tmp_path_factory.mktemp("dht")) as play:
        yield play


@pytest.fixture(scope="module")
def play_card(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
    with player("card_scenarios.py", tmp_path_factory.mktemp("card")) as play:
        yield play


@pytest.mark.parametrize("name", scenarios("plane_scenarios.py"))
def test_plane(play_plane: Play, name: str) -> None:
    assert not (failure := play_plane(name)), failure


@pytest.mark.parametrize("name", scenarios("dht_scenarios.py"))
def test_dht(play_dht: Play, name: str) -> None:
    assert not (failure := play_dht(name)), failure


@pytest.mark.parametrize("name", scenarios("card_scenarios.py"))
def test_card(play_card: Play, name: str) -> None:
    assert not (failure := play_card(name)), failure
