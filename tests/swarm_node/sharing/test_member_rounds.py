"""A member's round: how many groups it samples itself, what it admits instead, and what its settings reach."""

from __future__ import annotations

import random
from typing import Any

import pytest

from swarm_node.config import NodeConfig
from swarm_node.node import Node
from swarm_node.policy.loading import load_policy
from swarm_node.rollouts import Collected
from swarm_node.swarm.member import Member
from swarm_protocol.codec import sign_batch
from swarm_protocol.transports.memory import MemoryNetwork, VirtualClock
from tests.support.foreign_groups import group
from tests.support.gossip_room import ME, NOW, PEER, World


def member(world: World, **sections: Any) -> Member:
    usual = {"tasks": ["small"], "rollouts": {"max_new_tokens": 16}, "averaging": {"method": "none"}}
    config = NodeConfig.model_validate(usual | sections)
    clock = VirtualClock(NOW)
    transport = MemoryNetwork(clock).join(ME, world.manifest.swarm_id)
    parts = world.policy, world.tasks, world.said.append
    return Member(config, world.manifest, ME, transport, *parts, clock.now, spent=lambda: 0.0)


def hear(world: World, listener: Member, n: int) -> None:
    for _ in range(n):
        listener.receiver.take(sign_batch(world.batch(world.group()), PEER))


@pytest.mark.parametrize(
    ("fill", "alone", "heard", "wanted"),
    [(True, 99, 0, 6), (True, 5, 0, 5), (True, 5, 2, 4), (True, 5, 4, 2), (True, 1, 0, 2), (False, 5, 0, 2)],
)
def test_own_groups_replace_missing_ones_within_limits(
    world: World, fill: bool, alone: int, heard: int, wanted: int
) -> None:
    """Two own groups a round and four foreign ones, by a node that samples so many `alone`."""
    rollouts = {"max_new_tokens": 16, "groups": alone}
    learner = member(world, sharing={"own": 2, "foreign": 4, "fill": fill}, rollouts=rollouts)
    hear(world, learner, heard)
    assert learner.wanted() == wanted


def test_a_member_admits_only_what_it_lacks(world: World) -> None:
    learner = member(world, sharing={"own": 2, "foreign": 4})
    hear(world, learner, 10)
    for _ in range(2):  # those that wait are enough for the next round
        learner.wanted()
        assert learner.receiver.metrics()["swarm/groups_admitted"] == learner.replay_buffer.available() == 4
    learner.replay_buffer.choose(3, random.Random(0))
    learner.wanted()
    assert learner.receiver.metrics()["swarm/groups_admitted"] == 7 and learner.replay_buffer.available() == 4


@pytest.mark.parametrize(("advantage", "expected"), [("pass_k", 0.4096 / 0.4918), ("group_std", 2.0)])
def test_foreign_advantages_are_of_the_own_kind(world: World, advantage: str, expected: float) -> None:
    """Own success is 0.2, so four own answers are all wrong with 0.8 to the fourth, 0.4096, which has the spread
    0.4918. By itself a right answer has the advantage 0.8 / 0.4."""
    learner = member(world, grpo={"advantage": advantage, "k": 4})
    learner.replay_buffer.observe([group([1.0, 0.0, 0.0, 0.0, 0.0], peer=None)] * 16)
    learner.replay_buffer.add(group([1.0, 0.0], created=NOW))
    (chosen,) = learner.replay_buffer.choose(1, random.Random(0))
    assert chosen.advantages == pytest.approx([expected], abs=1e-3)


def test_a_member_counts_restarts_of_its_network(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = member(world)
    totals = {**learner.transport.stats(), "restarts/gossip": 2.0, "restarts/dht": 1.0}
    monkeypatch.setattr(learner.transport, "stats", lambda: totals)
    monkeypatch.setattr(learner.transport, "restarted", lambda: {"gossip": "grown to 555 MiB"})
    figures = learner.metrics(0.0)
    assert (figures["swarm/restarts/gossip"], figures["swarm/restarts/dht"]) == (2.0, 1.0)
    assert learner.status()["restarted"] == {"gossip": "grown to 555 MiB"}


def test_the_gate_knows_the_members_form(world: World) -> None:
    learner = member(world, rewards={"answer": "tags"})
    learner.guard(lambda groups: None)
    assert learner.replay_buffer.gate is not None and learner.replay_buffer.gate.form == "tags"


@pytest.mark.parametrize("private", [False, True])
def test_a_round_measures_the_peers_it_trains_on(world: World, private: bool) -> None:
    options = {"sharing": {"own": 1, "foreign": 2, "gate": False}, "averaging": {"method": "none"}}
    learner = member(world, **options)
    config = NodeConfig.model_validate({"tasks": ["small"], "rollouts": {"max_new_tokens": 16}} | options)
    policy = load_policy(config.policy, config.rollouts, world.said.append)  # a copy of its own, which is trained
    node = Node(config, policy, world.tasks, world.said.append, learner, world.now, private=private)
    hear(world, learner, 2)
    learner.receiver.admit()
    foreign = node.choose(Collected()) or learner.replay_buffer.choose(2, random.Random(0))
    assert [each.peer for each in foreign] == [PEER.peer_id] * 2
    node.learn(foreign)
    figures = learner.receiver.by_peer()[PEER.peer_id]["off_policy"]
    assert figures == {} if private else figures["logp"] < 0
