"""Members that know each other from groups alone, which came through a hub ahead of any card. Then the hub is gone."""

from __future__ import annotations

import pytest

from swarm_node.config import NodeConfig
from swarm_node.swarm.member import Member
from swarm_protocol.identity import Identity
from swarm_protocol.transports.memory import MemoryNetwork, VirtualClock
from tests.support.gossip_room import ME, NOW, OTHER, PEER, World

HUB = "hub"
SEEN_S = 60.0  # whoever had a group of another sees it again within this time, whatever died


class Room:
    """A hub, and members that know its address alone."""

    def __init__(self, world: World) -> None:
        self.world, self.clock = world, VirtualClock(NOW)
        self.network = MemoryNetwork(self.clock)
        self.hub = self.network.join(HUB, world.manifest.swarm_id)

    def join(self, who: Identity) -> Member:
        world = self.world
        config = NodeConfig.model_validate({"tasks": ["small"], "rollouts": {"max_new_tokens": 16}})
        transport = self.network.join(who, world.manifest.swarm_id, bootstrap=[f"/memory/p2p/{HUB}"])
        parts = world.policy, world.tasks, world.said.append
        return Member(config, world.manifest, who, transport, *parts, self.clock.now, spent=lambda: 0.0)

    def run(self, seconds: float) -> None:
        self.clock.run_until(self.clock.now() + seconds)
        self.world.time = self.clock.now()

    def share(self, sender: Member, identity: Identity) -> None:
        self.world.time = self.clock.now()
        sender.publish([self.world.group(identity=identity)])


@pytest.mark.parametrize("joined_s", [2.1, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0])
def test_who_had_a_group_of_another_sees_it_again(world: World, joined_s: float) -> None:
    room = Room(world)
    mine, peer = room.join(ME), room.join(PEER)
    room.run(joined_s)
    room.share(peer, PEER)
    room.run(0.3)  # it comes through the hub
    assert mine.receiver.admit() == 1
    room.network.kill(HUB)
    for member in (mine, peer):
        member.announce()
    room.run(SEEN_S)
    assert PEER.peer_id in mine.transport.members() and ME.peer_id in peer.transport.members()
    world.admitted.clear()
    room.share(mine, ME)
    room.run(0.3)
    assert peer.receiver.admit() == 1  # and they go on sharing


def test_they_find_each_other_although_a_third_died_with_the_hub(world: World) -> None:
    room = Room(world)
    mine, peer, other = room.join(ME), room.join(PEER), room.join(OTHER)
    room.run(2.5)
    for member, identity in ((mine, ME), (peer, PEER), (other, OTHER)):
        room.share(member, identity)
    room.run(0.3)
    assert [member.receiver.admit() for member in (mine, peer, other)] == [2, 2, 2]
    for gone in (HUB, OTHER.peer_id):
        room.network.kill(gone)
    for member in (mine, peer):
        member.announce()
    room.run(SEEN_S)
    assert mine.transport.members().keys() == {PEER.peer_id} and peer.transport.members().keys() == {ME.peer_id}


def test_a_hub_that_comes_back_heals_the_rest_within_a_minute(world: World) -> None:
    """It was gone before they had heard anything of each other."""
    room = Room(world)
    mine, peer = room.join(ME), room.join(PEER)
    for member in (mine, peer):
        member.announce()
    room.run(0.5)
    room.network.kill(HUB)
    room.run(1000.0)
    assert not mine.transport.members() and not peer.transport.members()
    room.network.join(HUB, world.manifest.swarm_id)
    room.run(SEEN_S)
    assert PEER.peer_id in mine.transport.members() and ME.peer_id in peer.transport.members()
