"""The gossip host against peers that say too much (scenarios in host_scenarios.py)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("host_scenarios.py")
SCENARIOS = re.findall(r"^async def ([a-z]\w+)\(\) -> None:", PROGRAM.read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", SCENARIOS)
def test_host(name: str) -> None:
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(PROGRAM.parents[2])}
    ran = subprocess.run([sys.executable, PROGRAM, name], env=env, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
