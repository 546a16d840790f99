"""The reference of metrics says of every number what it is, and of none that there is not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

import swarm_node
from swarm_node.observability.metrics_reference import METRICS, find_metric
from swarm_node.runtime.simulation import Simulation
from swarm_protocol.manifest import Manifest
from tests.support.simulated_peers import MakePeer

ROOT = Path(swarm_node.__file__).parent
NAMES = [name for section in METRICS.values() for name in section]


def code(*patterns: str) -> str:
    files = sorted({file for pattern in patterns for file in ROOT.glob(pattern)})
    return "\n".join(file.read_text() for file in files if file.name != "metrics_reference.py")


def template(text: str) -> str:
    """`rejected/{reason}` of an f-string and `rejected/<reason>` are alike."""
    return re.sub(r"<\w+>|\{[\w.]+\}", "*", text)


def test_numbers_of_runs_are_described_and_no_others(peer: MakePeer, manifest: Manifest) -> None:
    averages: dict[str, Any] = {"averaging": {"method": "noloco", "every": 3, "late_join": False}}
    peers = [
        peer(options=averages | {"grpo": {"learning_rate": 1e-3, "beta": 0.01}}),
        # the other is alone in an outer round
        peer(options=averages | {"grpo": {"learning_rate": 1e-3, "loss": "cispo"}}, starts_at=7),
        peer(silo=True),
    ]
    Simulation(msgspec.structs.replace(manifest, averaging_period_s=5.0), peers, seed=1).run(20)
    keys = {key for one in peers for line in one.metrics for key in line}
    assert {key for key in keys if find_metric(key) is None} == set()
    seen = {find_metric(key) for key in keys}
    assert {"reward", "kl", "cispo_clip_ratio", "swarm/groups_used", "averaging/exchanges"} <= seen
    written = {template(text) for text in re.findall(r'"([^"\n]+)"', code("**/*.py"))}
    outside = {name for name in NAMES if name not in seen and not name.startswith("stages/")}
    assert {name for name in outside if template(name) not in written} == set()


def test_exactly_a_crews_counts_are_described() -> None:
    counted = re.findall(r'counts\[f?"([^"]+)"\] \+=', code("pipeline/**/*.py"))
    figures = re.findall(r'figures\["stages/(\w+)"\] =', code("pipeline/**/*.py"))
    described = {f"stages/{name}": find_metric(f"stages/{name}") for name in [*counted, *figures]}
    assert figures and {name for name, found in described.items() if found is None} == set()
    assert set(described.values()) == {name for name in NAMES if name.startswith("stages/")}


def test_a_name_stands_for_all_of_its_kind() -> None:
    assert find_metric("reward/gcd") == "reward/<task>"
    assert find_metric("stages/refused/stall") == "stages/refused/<reason>"
    assert find_metric("reward_std") == "reward_std"
    assert find_metric("stages/recovered") is None and find_metric("rewards") is None
    assert len(NAMES) == len(set(NAMES))
