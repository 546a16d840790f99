"""Which of a node's own answers it may share: two groups of each slot in one epoch."""

from __future__ import annotations

import pytest

from swarm_node.config import NodeConfig
from swarm_node.swarm.member import Member
from swarm_protocol.limits import EPOCH_SECONDS
from swarm_protocol.transports.memory import MemoryNetwork, VirtualClock
from tests.support.gossip_room import NOW, PEER, World


def test_a_fast_node_shares_a_slot_twice(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_node.swarm.member.SLOTS", 3)
    clock = VirtualClock(NOW)
    transport = MemoryNetwork(clock).join(PEER, world.manifest.swarm_id)
    config = NodeConfig.model_validate({"tasks": ["small"]})
    member = Member(config, world.manifest, PEER, transport, world.policy, world.tasks, world.said.append, clock.now)
    epoch = int(NOW // EPOCH_SECONDS)
    tasks = member.draw(8)
    assert [task.slot for task in tasks] == [(epoch, slot) for slot in (0, 1, 2, 0, 1, 2, 0, 1)]
    assert tasks[6].name == tasks[0].name
    member.publish([world.group(task=task) for task in tasks])
    assert member.publisher.metrics()["swarm/unsent/slot"] == 2
    clock.run_until(NOW + EPOCH_SECONDS)
    assert member.draw(1)[0].slot == (epoch + 1, 0)
    member.close()
