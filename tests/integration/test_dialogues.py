"""Real processes hold dialogues of two turns: honest members learn from each other, others are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import QUICK, NodeProcess, learns_from_others, make_manifest, nodes

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]
LIES = {"hint": "prompt", "more": "turns", "fewer": "turns"}
"""Way to lie -> the reason for which it is refused."""
SETS = (*QUICK, "rollouts.groups=8", "rollouts.group_size=8", "averaging.method=none")


def accounts(node: NodeProcess) -> dict[str, dict[str, Any]]:
    """Name of each peer -> what the node has counted of it."""
    path = node.run_dir / "swarm.json"
    peers = json.loads(path.read_text())["peers"] if path.exists() else {}
    return {figures.get("name", ""): figures for figures in peers.values()}


def test_members_hold_dialogues_and_liars_are_refused_by_name(tmp_path: Path) -> None:
    manifest = make_manifest(tmp_path, tasks="second_try")
    with nodes() as start:
        first = start("join", str(manifest), "--name", "first", run_dir=tmp_path / "first", sets=SETS)
        link = first.link()
        second = start("join", link, "--name", "second", run_dir=tmp_path / "second", sets=SETS)
        for node in (first, second):
            learns_from_others(node)
        for lie in LIES:
            program = ("tests.integration.lying_dialogues", lie)
            start("join", link, "--name", lie, run_dir=tmp_path / lie, sets=SETS, program=program)
        for lie, reason in LIES.items():
            first.until(lambda lie=lie, reason=reason: accounts(first).get(lie, {}).get("rejected", {}).get(reason))
        found = accounts(first)
        assert all(found[lie]["rejected"].keys() <= {reason, "zero", "balance"} for lie, reason in LIES.items()), found
        assert found["second"]["admitted"] > 0 and not {"prompt", "turns"} & found["second"]["rejected"].keys()
        samples = [json.loads(line) for line in (first.run_dir / "samples.jsonl").read_text().splitlines()]
    assert any("\n> No" in answer["text"] for sample in samples for answer in sample["answers"])
