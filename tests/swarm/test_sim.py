"""Nodes on a virtual clock: equal seeds give equal metrics, and whatever befalls a peer, it and others stay useful."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from swarm_node.node import Node
from swarm_node.rollouts import Collected
from swarm_node.rollouts.probe_answers import ENOUGH
from swarm_node.runtime.simulation import START, Peer, Simulation, Speed
from swarm_node.types import Group
from swarm_protocol.manifest import Manifest
from swarm_protocol.transports.memory import LinkModel
from tests.support.simulated_peers import SPEED, MakePeer, exchange, peer_id, total, used

SPARING = {"pace_s": 2.5}
"""Rounds of which fewer fit into the minutes that the network needs."""
ALONE = {"averaging": {"method": "none"}}


def between(peer: Peer, since: float, to: float) -> list[dict[str, Any]]:
    """Rounds of `peer` that ended in that part of the simulation, in seconds after its beginning."""
    return [line for line in peer.metrics if since < line["time"] - START <= to]


def test_equal_seeds_give_equal_metrics(peer: MakePeer, manifest: Manifest) -> None:
    link = LinkModel(latency_s=0.1, jitter_s=0.5, loss=0.2, duplicate=0.2)

    def run(seed: int) -> tuple[list[list[dict[str, Any]]], dict[str, int]]:
        simulation = Simulation(manifest, [peer(link=link, starts_at=0.3 * i) for i in range(3)], seed)
        simulation.run(8)
        return [p.metrics for p in simulation.peers], dict(simulation.network.faults)

    first, faults = run(5)
    assert faults["lost"] and faults["duplicated"]
    assert sum(line["swarm/groups_used"] for line in first[0]) > 0
    assert run(5) == (first, faults)
    assert run(6)[0] != first


SCRIPT = """
import json, sys, torch
torch.set_num_threads(1)
from swarm_node.config import NodeConfig
from swarm_node.runtime.simulation import LinkModel, Peer, Simulation, Speed, manifest_for
config = NodeConfig.model_validate(json.loads(sys.argv[1]))
link = LinkModel(jitter_s=0.5, loss=0.1)
peers = [Peer(config, Speed(64, 2000), link, starts_at=0.3 * i) for i in range(3)]
Simulation(manifest_for(config), peers, seed=2).run(6)
print(json.dumps([peer.metrics for peer in peers]))
"""


@pytest.mark.long
def test_equal_seeds_give_equal_metrics_in_every_process(peer: MakePeer) -> None:
    """Python's own hashes differ from process to process."""
    command = [sys.executable, "-c", SCRIPT, peer().config.model_dump_json()]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONHASHSEED": seed})
        for seed in ("1", "2")
    ]
    first, second = (process.communicate()[0] for process in processes)
    assert "swarm/groups_used" in first
    assert first == second


def test_a_simulation_can_go_on(peer: MakePeer, manifest: Manifest) -> None:
    def run(*stops: int) -> list[list[dict[str, Any]]]:
        simulation = Simulation(manifest, [peer(), peer()], seed=1)
        for rounds in stops:
            simulation.run(rounds)
        return [p.metrics for p in simulation.peers]

    once, twice = run(9), run(4, 9)
    assert [len(lines) for lines in twice] == [9, 9]
    assert [line["reward"] for line in twice[0]][:4] == [line["reward"] for line in once[0]][:4]


def test_all_use_shared_groups_and_counts_balance(peer: MakePeer, manifest: Manifest) -> None:
    simulation = Simulation(manifest, [peer(starts_at=0.2 * i) for i in range(4)])
    simulation.run(12)
    assert all(n > 0 for n in exchange(simulation.peers).values())
    assert total(simulation, "swarm/groups_received") <= 3 * total(simulation, "swarm/groups_sent")
    for member in simulation.peers:
        last = member.metrics[-1]
        rejected = sum(value for name, value in last.items() if name.startswith("swarm/rejected/"))
        assert last["swarm/peers"] == 3
        assert 0 < last["swarm/groups_admitted"] == last["swarm/groups_received"] - rejected
        assert 0 < sum(line["swarm/groups_used"] for line in member.metrics) <= last["swarm/groups_admitted"]
        assert all(0 < line["swarm/staleness_mean"] < 20 for line in member.metrics if line["swarm/groups_used"])
        assert last["swarm/bytes_out"] > last["swarm/bytes_sent"] > 0 < last["swarm/bytes_in"]
        assert not any("perf/trained" in name for name in last)


class Counting(Node):
    """Remembers how many groups of its own and of others each round had."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.rounds: list[tuple[int, int]] = []

    def choose(self, collected: Collected) -> list[Group]:
        groups = super().choose(collected)
        self.rounds.append((len(collected.groups), sum(group.peer is not None for group in groups)))
        return groups


@pytest.mark.parametrize("fill", [True, False])
def test_own_groups_fill_in_for_missing_foreign_ones(peer: MakePeer, manifest: Manifest, fill: bool) -> None:
    options = {"sharing": {"own": 2, "foreign": 2, "fill": fill, "gate": False}}
    simulation = Simulation(manifest, [peer(node_type=Counting, options=options) for _ in range(3)])
    simulation.run(12)
    node = simulation.peers[0].node
    assert isinstance(node, Counting)
    assert node.rounds[0] == (4 if fill else 2, 0)
    assert (2, 2) in node.rounds
    assert all(own + foreign == 4 if fill else own == 2 for own, foreign in node.rounds)


class Watching(Node):
    """Remembers its own groups, and which of them it trained on."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sampled: list[Group] = []
        self.trained: list[Group] = []

    def choose(self, collected: Collected) -> list[Group]:
        groups = super().choose(collected)
        self.sampled += collected.groups
        self.trained += [group for group in groups if group.peer is None]
        return groups


def test_answers_that_tell_what_averaging_costs_are_kept_back(peer: MakePeer, manifest: Manifest) -> None:
    """Nobody is trained on them, neither this node nor another. A node that averages nothing keeps none back, and one
    that has nobody to average with no more than enough."""
    simulation = Simulation(manifest, [peer(node_type=Watching), peer(node_type=Watching, options=ALONE)])
    simulation.run(30)
    first, second = (each.node for each in simulation.peers)
    assert isinstance(first, Watching) and isinstance(second, Watching)
    rest = [group for group in first.sampled if not any(group is trained for trained in first.trained)]
    assert len(rest) == ENOUGH, "of the first rounds one each"
    assert [group.task.name for group in rest] == [best.task.name for best in first.probe_answers.unseen]
    assert simulation.peers[0].metrics[-1]["swarm/groups_sent"] <= len(first.sampled) - len(rest)
    assert len(second.trained) == len(second.sampled) and not second.probe_answers.unseen
    assert exchange(simulation.peers)[1, 0], "the rest is shared"


def test_a_silo_takes_no_part(peer: MakePeer, manifest: Manifest) -> None:
    simulation = Simulation(manifest, [peer(), peer(), peer(silo=True)])
    simulation.run(8)
    assert simulation.peers[0].metrics[-1]["swarm/peers"] == 1
    assert "swarm/peers" not in simulation.peers[2].metrics[-1]


@pytest.mark.long
def test_a_node_ten_times_slower_is_useful(peer: MakePeer, manifest: Manifest) -> None:
    slow = Speed(SPEED.generate_tok_s / 10, SPEED.train_tok_s / 10, SPEED.overhead_s * 10)
    simulation = Simulation(manifest, [peer(), peer(), peer(speed=slow)])
    simulation.run(seconds=60)
    fast, _, late = simulation.peers
    assert len(fast.metrics) > 5 * len(late.metrics) > 0
    assert all(n > 0 for n in exchange(simulation.peers).values())


def test_a_node_that_sleeps_a_minute_is_useful(peer: MakePeer, manifest: Manifest) -> None:
    simulation = Simulation(manifest, [peer(options=SPARING, sleeps=sleeps) for sleeps in ([], [], [(10, 70)])])
    awake, _, sleeper = simulation.peers
    simulation.run(seconds=69)
    assert not between(sleeper, 15, 69) and len(between(awake, 15, 69)) > 15
    before = exchange(simulation.peers)
    simulation.run(seconds=30)
    assert between(sleeper, 70, 99)
    after = exchange(simulation.peers)
    assert all(after[pair] > before[pair] for pair in [(0, 2), (1, 2), (2, 0), (2, 1)])


def test_a_part_cut_off_learns_on_and_returns(peer: MakePeer, manifest: Manifest) -> None:
    simulation = Simulation(manifest, [peer(options=SPARING) for _ in range(4)])
    cut_off = [peer_id(p) for p in simulation.peers[2:]]
    simulation.at(35, lambda: simulation.network.partition(cut_off))
    simulation.at(65, simulation.network.heal)
    counts = []
    for seconds in (40, 24, 46):  # the cut, and what was under way; the cut; healed
        simulation.run(seconds=seconds)
        counts.append(exchange(simulation.peers))
    across = [(i, j) for i, j in counts[0] if (i < 2) != (j < 2)]
    within = [pair for pair in counts[0] if pair not in across]
    assert all(counts[0][pair] > 0 for pair in counts[0])
    assert all(counts[1][pair] > counts[0][pair] for pair in within)
    assert all(counts[2][pair] > counts[1][pair] for pair in counts[0])
    waiting = sum(counts[1][pair] - counts[0][pair] for pair in across)
    assert waiting <= sum(counts[1][pair] - counts[0][pair] for pair in within)
    for member in simulation.peers:
        assert member.metrics[-1]["swarm/peers"] == 3
        assert between(member, 40, 65)


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.long)])
def test_the_rest_learn_on_when_one_is_killed(peer: MakePeer, manifest: Manifest, victim: int) -> None:
    """Peer 0 is the one that all others joined by."""
    simulation = Simulation(manifest, [peer(options=SPARING) for _ in range(4)])
    simulation.at(20, lambda: simulation.kill(victim))
    simulation.run(seconds=25)
    dead = simulation.peers[victim]
    before = exchange(simulation.peers)
    rounds = len(dead.metrics)
    simulation.run(seconds=70)
    assert dead.dead and len(dead.metrics) == rounds
    after = exchange(simulation.peers)
    living = [p for p in simulation.peers if p is not dead]
    assert all(after[pair] > before[pair] for pair in before if victim not in pair)
    assert all(p.metrics[-1]["swarm/peers"] == 2 for p in living)


def test_a_member_of_another_family_is_useful(peer: MakePeer, manifest: Manifest) -> None:
    simulation = Simulation(manifest, [peer(), peer(), peer(family="qwen2")])
    simulation.run(14)
    ours, _, stranger = simulation.peers
    assert ours.policy is not None and stranger.policy is not None
    assert ours.policy.family != stranger.policy.family
    assert ours.policy.tokenizer_hash != stranger.policy.tokenizer_hash
    assert used(ours, stranger) > 0 < used(stranger, ours)
