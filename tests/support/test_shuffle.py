"""The random order of tests, and the script that runs them in it beside busy loops."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil

from tests.support.shuffle import pytest_collection_modifyitems
from tests.support.waiting import until

HANG_S = 60.0
MAKE = """#!/bin/sh
echo "1 passed in 0.1s"
case "$*" in
*"test SEED=8") exit 2 ;;
*"test SEED=9") touch third; sleep 600 ;;
esac
"""


def shuffled(seed: str | None) -> list[tuple[str, int]]:
    """(file, number) of each test."""
    items = [SimpleNamespace(path=name, number=number) for name in "abcdef" for number in range(6)]
    config = SimpleNamespace(getoption=lambda name: seed)
    pytest_collection_modifyitems(cast("Any", config), cast("Any", items))
    return [(item.path, item.number) for item in items]


def test_seed_decides_the_order_within_files() -> None:
    plain, first, second = shuffled(None), shuffled("1"), shuffled("2")
    assert plain == sorted(plain) == sorted(first) == sorted(second)
    assert first == shuffled("1") and len({tuple(plain), tuple(first), tuple(second)}) == 3
    assert len([name for name, _ in groupby(first, key=lambda test: test[0])]) == 6


def test_busy_loops_end_with_a_killed_script(tmp_path: Path, root: Path) -> None:
    for name in "bin", "scripts":
        (tmp_path / name).mkdir()
    make, script = tmp_path / "bin" / "make", tmp_path / "scripts" / "test_under_load"
    make.write_text(MAKE)
    make.chmod(0o755)
    script.write_text((root / "scripts" / "test_under_load").read_text())  # it runs `make` in the folder above
    output = tmp_path / "output"
    with output.open("w") as file:
        run = subprocess.Popen(
            [sys.executable, str(script), "--seed", "7", "--logs", str(tmp_path / "logs")],
            stdout=file,
            env=os.environ | {"PATH": f"{make.parent}:{os.environ['PATH']}"},
        )
    try:
        until(lambda: (tmp_path / "third").exists(), HANG_S)
        *loops, make_process = psutil.Process(run.pid).children()
        assert len(loops) == 4 and all(loop.is_running() for loop in loops)
    finally:
        run.kill()
        run.wait()
    psutil.wait_procs(loops, timeout=HANG_S)
    assert not any(loop.is_running() for loop in loops)
    for process in (*make_process.children(), make_process):
        process.kill()
    lines = output.read_text().splitlines()
    assert [line.split()[:3] for line in lines[2:]] == [["test", "7", "passed"], ["test", "8", "FAILED"]]
