"""Scenarios in a process of their own, because hivemind and libp2p cannot be imported into one: coroutine functions of
a program, asked for by name, one after the other, because importing either takes seconds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.repository import PYTHONPATH

Play = Callable[[str], str]
"""The name of a scenario -> what went wrong in it, if anything did."""


def names(program: Path) -> list[str]:
    return re.findall(r"^async def ([a-z]\w+)\(\) -> None:", program.read_text(), re.MULTILINE)


@contextmanager
def player(program: Path, folder: Path) -> Iterator[Play]:
    """One process for all scenarios, and another one if it dies of one of them. Its stderr lies in `folder`."""

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"},
        )

    def play(name: str) -> str:
        nonlocal process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(name + "\n")
        process.stdin.flush()
        try:
            answer = process.stdout.readline()
        except BaseException:  # the time of the test is up: an answer that comes late is not to be read
            process.kill()
            process.communicate()
            process = start()
            raise
        if answer:
            return str(json.loads(answer))
        with process:
            failure = f"the process ended with code {process.wait()}: {(folder / 'stderr').read_text()[-3000:]}"
        process = start()
        return failure

    with (folder / "stderr").open("w") as errors:
        process = start()
        yield play
        with process:
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait() == 0


def stage(program: Path) -> Any:
    """A fixture of a test module: its `player` of `program`."""

    @pytest.fixture(scope="module")
    def play(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
        with player(program, tmp_path_factory.mktemp(program.stem)) as play:
            yield play

    return play


def serve(scenarios: dict[str, Any], run: Callable[[Any], None]) -> None:
    """In the program: play what is asked for on stdin, and answer each with a line of JSON."""
    for line in sys.stdin:
        failure = ""
        try:
            run(scenarios[line.strip()])
        except BaseException:
            failure = traceback.format_exc()
        print(json.dumps(failure), flush=True)
