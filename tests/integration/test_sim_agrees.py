"""The simulator against four real processes: as many rounds and admissions, and groups as old, within a tenth."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from protocol.manifest import Manifest, parse_manifest
from protocol.transports.memory import LinkModel
from swarm_node.config import load_config
from swarm_node.sim import START, Peer, Simulation, Speed
from tests.support.processes import QUICK, make_manifest, nodes

PACES = (0.8, 0.9, 1.15, 3.1)
"""Seconds a round, well above what it costs even on a busy machine: one node is three times slower than the others. No
two march in step, nor with the seconds in which messages are sent, or ages would hang on who happened to begin when."""
GROUP_SIZE = "rollouts.group_size=16"
"""Nearly every group then has different rewards and is shared: what is admitted hardly depends on the tasks."""
WINDOW_S = 60.0
WARM_UP_S = 10.0


def figures(metrics: list[list[dict[str, Any]]], begin: float) -> dict[str, float]:
    """Sums, and the mean age in seconds of what was used, of all nodes from `begin` on for `WINDOW_S`."""
    windows = [[line for line in lines if begin <= line["time"] < begin + WINDOW_S] for lines in metrics]
    ages = [line["swarm/staleness_mean"] for lines in windows for line in lines if "swarm/staleness_mean" in line]
    return {
        "rounds": sum(len(lines) for lines in windows),
        "admitted": sum(lines[-1]["swarm/groups_admitted"] - lines[0]["swarm/groups_admitted"] for lines in windows),
        "staleness": fmean(ages),
    }


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.long
def test_four_real_processes_and_four_simulated_ones_agree(tmp_path: Path) -> None:
    manifest = make_manifest(tmp_path)
    with nodes() as start:
        started = []
        for i, pace in enumerate(PACES):
            link = started[0].link() if started else str(manifest)
            sets = (*QUICK, GROUP_SIZE, f"pace_s={pace}", f"seed={i}", "grpo.learning_rate=1e-6")
            started.append(start("join", link, "--name", f"n{i}", run_dir=tmp_path / f"n{i}", sets=sets))
        for node in started:
            node.until(lambda node=node: node.last("swarm/peers") == 3 or None, 60)  # type: ignore[misc]
            node.until(lambda node=node: node.last("swarm/groups_used") > 0 or None, 40)  # type: ignore[misc]
        begin = time.time() + WARM_UP_S
        time.sleep(WARM_UP_S + WINDOW_S + max(PACES))
        real = figures([node.metrics for node in started], begin)

    swarm = parse_manifest(manifest.read_bytes())
    runs = [simulated_figures(swarm, seed) for seed in range(3)]
    simulated = {name: fmean(run[name] for run in runs) for name in real}
    print(real, simulated, runs)
    for name, figure in simulated.items():
        assert real[name] == pytest.approx(figure, rel=0.1), f"{name}: {real} against {simulated}"


def simulated_figures(swarm: Manifest, seed: int) -> dict[str, float]:
    peers = [
        Peer(
            load_config(
                flags={"tasks": ["small"], "seed": i, "swarm": "x"},
                sets=[*QUICK, GROUP_SIZE, f"pace_s={pace}", "grpo.learning_rate=1e-6"],
            ),
            speed=Speed(overhead_s=0.05),
            link=LinkModel(latency_s=0.005),
            starts_at=(0.3 + 0.1 * seed) * i,
        )
        for i, pace in enumerate(PACES)
    ]
    simulation = Simulation(swarm, peers, seed)
    simulation.run(seconds=30.0 + WINDOW_S)
    return figures([peer.metrics for peer in peers], START + 30.0)
