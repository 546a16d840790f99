"""What `swarm-node doctor` finds on a machine whose clock is an hour off, in a swarm of a real bootstrap peer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import QUICK, make_manifest, nodes
from tests.support.waiting import PATIENCE_S

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

WITH_A_CLOCK_OFF = (
    "import sys, time; right = time.time; off = float(sys.argv.pop(1)); time.time = lambda: right() + off; "
    "from swarm_node.cli.app import app; app()"
)


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("clock")
    with nodes() as start:
        hub = start("bootstrap", str(make_manifest(folder)), run_dir=folder / "hub")
        yield hub.link()


@pytest.mark.parametrize(("off", "side"), [(3600, "ahead of"), (-3600, "behind")])
def test_a_clock_that_is_an_hour_off(link: str, off: int, side: str, tmp_path: Path) -> None:
    sets = [word for pair in QUICK for word in ("--set", pair)]
    done = subprocess.run(
        [sys.executable, "-c", WITH_A_CLOCK_OFF, str(off), "doctor", link, "--json", *sets],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    told = checks["clock"]["detail"]
    assert (done.returncode, checks["clock"]["verdict"]) == (1, "fail"), done.stdout
    assert side in told and abs(int(told.split()[0]) - 3600) < 60
    assert "cards of 1" in checks["members"]["detail"]


@pytest.mark.parametrize(("off", "side"), [(60, "ahead of"), (-900, "behind")])
def test_join_says_that_the_clock_is_off(link: str, off: int, side: str, tmp_path: Path) -> None:
    with nodes() as start:
        program = ("clock_off", str(off))
        (tmp_path / "clock_off.py").write_text(WITH_A_CLOCK_OFF)
        node = start("join", link, run_dir=tmp_path / "late", program=program)
        told = node.until_says(rf"this machine's clock is (\d+) s {side} the other members'.*nobody can hear this node")
    assert abs(int(told[1]) - abs(off)) < 30
