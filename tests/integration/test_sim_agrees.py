"""The simulator against four real processes: a node admits as many groups in a round, within a fifth."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from swarm_node.config import load_config
from swarm_node.runtime.simulation import START, Peer, Simulation, Speed
from swarm_protocol.manifest import Manifest, parse_manifest
from swarm_protocol.transports.memory import LinkModel
from tests.support.processes import QUICK, NodeProcess, make_manifest, nodes

PACES = (1.2, 1.35, 1.8, 4.5)
"""Seconds a round: one node is three times slower than the others. No two march in step, nor with the seconds in which
messages are sent. Admission gets a tenth of a round, so rounds are long enough for it on a machine that is busy."""
LIGHT = ("rollouts.group_size=16", "rollouts.groups=8", "sharing.own=4", "sharing.foreign=4", "averaging.method=none")
"""Nearly every group of 16 has different rewards and is shared: what is admitted hardly depends on the tasks. Four
nodes with few groups a round leave the machine time to spare, so that real nodes admit all they may."""
ROUNDS = 100
"""Of all nodes together."""


def admitted_a_round(metrics: list[list[dict[str, Any]]], begin: float, end: float) -> float:
    """Groups of others, of all nodes from `begin` to `end`. How fast the machine is plays no part."""
    windows = [[line for line in lines if begin <= line["time"] < end] for lines in metrics]
    admitted = [lines[-1]["swarm/groups_admitted"] - lines[0]["swarm/groups_admitted"] for lines in windows]
    return float(sum(admitted) / sum(len(lines) - 1 for lines in windows))


@pytest.mark.timeout(900)
@pytest.mark.long
def test_real_and_simulated_nodes_admit_alike(tmp_path: Path) -> None:
    manifest = make_manifest(tmp_path)
    with nodes() as start:
        started: list[NodeProcess] = []
        for i, pace in enumerate(PACES):
            link = started[0].link() if started else str(manifest)
            sets = (*QUICK, *LIGHT, f"pace_s={pace}", f"seed={i}", "grpo.learning_rate=1e-6")
            started.append(start("join", link, "--name", f"n{i}", run_dir=tmp_path / f"n{i}", sets=sets))
        for node in started:
            node.until(lambda node=node: node.last("swarm/peers") == 3)
            node.until(lambda node=node: node.last("swarm/groups_used") > 0)
        before = sum(node.rounds for node in started)
        begin = time.time()
        started[-1].until(lambda: sum(node.rounds for node in started) > before + ROUNDS)
        real = admitted_a_round([node.metrics for node in started], begin, time.time())

    swarm = parse_manifest(manifest.read_bytes())
    simulated = fmean(simulated_admissions(swarm, seed) for seed in range(3))
    assert real == pytest.approx(
        simulated, rel=0.2
    )  # what is under way at either end of a window counts on one side alone


def simulated_admissions(swarm: Manifest, seed: int) -> float:
    peers = [
        Peer(
            load_config(
                flags={"tasks": ["small"], "seed": i, "swarm": "x"},
                sets=[*QUICK, *LIGHT, f"pace_s={pace}", "grpo.learning_rate=1e-6"],
            ),
            speed=Speed(overhead_s=0.05),
            link=LinkModel(latency_s=0.005),
            starts_at=(0.3 + 0.1 * seed) * i,
        )
        for i, pace in enumerate(PACES)
    ]
    simulation = Simulation(swarm, peers, seed)
    simulation.run(seconds=150.0)
    return admitted_a_round([peer.metrics for peer in peers], START + 40.0, START + 150.0)
