"""A signal while the program still loads: one sentence, no traceback, no run directory."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from swarm_node.runtime.shutdown import NOT_BEGUN
from swarm_node.storage.rundir import RunDir
from tests.support.processes import NodeProcess, Start, make_manifest

SLOW_TORCH = """
import time
print("torch is being loaded", flush=True)
try:
    time.sleep(1000)
except BaseException:  # as libraries do that are being loaded
    time.sleep(1000)
"""


@pytest.fixture
def slow_torch(tmp_path: Path) -> tuple[str, ...]:
    """What comes before Python so that it never gets further than torch."""
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow/torch.py").write_text(SLOW_TORCH)
    return "env", f"PYTHONPATH={tmp_path / 'slow'}:{os.environ['PYTHONPATH']}"


def stopped(node: NodeProcess, number: int) -> str:
    """The last line of a node that gets a signal in the middle of an import."""
    node.until_says("torch is being loaded")
    assert RunDir(node.run_dir).in_use
    assert node.stop(number) == 0
    assert "Traceback" not in node.output and not node.run_dir.exists()
    return node.output.splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_torch_loads_leaves_nothing(
    number: int, start: Start, tmp_path: Path, slow_torch: tuple[str, ...]
) -> None:
    node = start("local", run_dir=tmp_path / "a", sets=(), prefix=slow_torch)
    assert stopped(node, number).endswith(f"Z INFO    {NOT_BEGUN}")


def test_a_member_that_loads_says_so_in_json(start: Start, tmp_path: Path, slow_torch: tuple[str, ...]) -> None:
    manifest = make_manifest(tmp_path)
    options = "--log-format", "json", "--name", "alice"
    node = start("join", str(manifest), *options, run_dir=tmp_path / "a", sets=(), prefix=slow_torch)
    line = json.loads(stopped(node, signal.SIGTERM))
    assert (line["kind"], line["node"], line["message"]) == ("stop", "alice", NOT_BEGUN)


def test_a_resumed_run_survives_an_early_signal(start: Start, tmp_path: Path, slow_torch: tuple[str, ...]) -> None:
    with RunDir.open(tmp_path / "a") as run:
        run.write("config.toml", "rounds = 3\n")
    node = start("local", run_dir=run.path, sets=(), prefix=slow_torch)
    node.until_says("torch is being loaded")
    assert node.stop(signal.SIGTERM) == 0
    assert run.exists and not run.in_use
