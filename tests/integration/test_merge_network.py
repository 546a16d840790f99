"""`swarm-node merge SWARM` while real nodes train: what it writes, what the nodes notice, and that one may die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarm_protocol.manifest import parse_link
from tests.support.processes import LOCAL, QUICK, Start, make_manifest
from tests.support.waiting import PATIENCE_S

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
PROGRAM = Path(__file__).with_name("merge_keeping.py")
AVERAGING = (
    *QUICK,
    "averaging.method=noloco",
    "averaging.every=5",
    "averaging.fragments=2",
    "averaging.late_join=false",
    "grpo.learning_rate=3e-4",
    "sharing.own=4",
    "sharing.foreign=0",
    "pace_s=0.3",
)


def merge(folder: Path, *arguments: str) -> tuple[dict[str, Any], str, dict[str, dict[str, torch.Tensor]]]:
    """Its JSON document, what it said, and what it fetched by name."""
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), "merge", *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr, {path.stem: load_file(path) for path in folder.glob("*.safetensors")}


def test_members_are_merged_while_they_train(start: Start, tmp_path: Path) -> None:
    manifest = make_manifest(tmp_path, "--averaging-period-s", "3")
    link = start("bootstrap", str(manifest), *LOCAL, run_dir=tmp_path / "hub", sets=()).link()
    three = [start("join", link, "--name", name, run_dir=tmp_path / name, sets=AVERAGING) for name in ("a", "b", "c")]
    for node in three:
        node.until(lambda node=node: node.last("averaging/exchanges") >= 1)

    before = [node.rounds for node in three]
    config = str(tmp_path / "a" / "config.toml")
    result, said, fetched = merge(
        tmp_path / "one", link, "--out", str(tmp_path / "merged"), "--config", config, "--questions", "8"
    )
    assert sorted(fetched) == ["a", "b", "c"]
    names = {name.split()[0]: name for name in result["versions"]}
    assert sorted(names) == ["a", "b", "c"] and min(result["versions"].values()) >= 5
    assert sorted(result["runs"]) == sorted(names.values()) and result["questions"] == 8
    assert "3 members, noloco" in said and "left out" not in said
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template
    assert not torch.equal(fetched["a"]["model.norm.weight"], fetched["b"]["model.norm.weight"])
    for name in fetched["a"]:
        mean = torch.stack([state[name].double() for state in fetched.values()]).mean(0).float()
        assert torch.equal(model.get_parameter(name), mean)
    for node, rounds in zip(three, before, strict=True):
        node.until(lambda node=node, rounds=rounds: node.rounds > rounds + 5)
        assert "Traceback" not in node.output and "it took too long" not in node.output
    assert [path.name for path in tmp_path.glob(".*")] == []

    victim = three.pop()
    victim.stop(signal.SIGKILL)
    addresses = json.dumps(parse_link(link).peers)
    arguments = str(manifest), "--out", str(tmp_path / "again"), "--questions", "0"
    result, said, fetched = merge(tmp_path / "two", *arguments, "--set", f"network.bootstrap={addresses}")
    assert sorted(fetched) == ["a", "b"]
    assert f"left out: {names['c']} (" in said or "2 members, noloco" in said  # a card outlives its peer for a minute
    assert set(result["versions"]) == {names["a"], names["b"]} and result["runs"] == {}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert all(
        torch.equal(model.get_parameter(name), ((tensor.double() + fetched["b"][name].double()) / 2).float())
        for name, tensor in fetched["a"].items()
    )
    assert [node.stop() for node in three] == [0, 0]
