"""A member that publishes what it should not, signed and well formed: none of it is trained on."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from swarm_node.runtime.simulation import Peer, Simulation
from swarm_node.tasks.one_turn import prompt_digest
from swarm_node.tasks.taskset import load_tasks, slot_key, slot_place
from swarm_protocol.codec import sign_batch
from swarm_protocol.gossip_kinds import ROLLOUTS
from swarm_protocol.identity import Identity
from swarm_protocol.manifest import Manifest
from swarm_protocol.messages import PROTOCOL_VERSION, RolloutBatch, SharedGroup, SharedRollout, SharedSampling
from swarm_protocol.topics import epoch_at, shard_of
from tests.support.simulated_peers import MakePeer, exchange

RIGHT, WRONG = "ab", "abc"
"""Texts that the members' reward likes, and does not."""
Twist = Callable[[SharedGroup], SharedGroup]


class Poisoner:
    """Sends one group every half second, each for a slot of its own."""

    def __init__(self, name: str, simulation: Simulation, peer: Peer, texts: list[str], twist: Twist) -> None:
        self.simulation = simulation
        self.identity = Identity.generate(name.encode()[:32].ljust(32, b"\0"))
        self.peer_id = self.identity.peer_id
        self.tasks = load_tasks(peer.config.tasks, peer.config.rewards)
        self.texts, self.twist = texts, twist
        self.sent = 0
        network, manifest = simulation.network, simulation.manifest
        member = simulation.peers[0].node.member
        assert member is not None
        self.transport = network.join(self.identity, manifest.swarm_id, bootstrap=member.transport.addresses)
        for i in range(20):
            simulation.at(10 + 0.5 * i, self.send)

    def send(self) -> None:
        swarm, now = self.simulation.manifest.swarm_id, self.simulation.clock.now()
        epoch, slot, me = epoch_at(now), self.sent, self.peer_id
        task = self.tasks.at(slot_place(swarm, me, epoch, slot), slot_key(swarm, me, epoch, slot))
        rollouts = [SharedRollout.of(text, True) for text in self.texts]
        group = self.twist(SharedGroup(task.name, epoch, slot, prompt_digest(task.question), 7, rollouts))
        sampling = SharedSampling(4, 1.0, 1.0)
        batch = RolloutBatch(PROTOCOL_VERSION, swarm, self.sent, now, "0" * 16, "0" * 16, sampling, [group])
        topic = ROLLOUTS.topic(swarm, shard_of(me, self.simulation.manifest.shards))
        assert self.transport.publish(topic, sign_batch(batch, self.identity))
        self.sent += 1


def no_twist(group: SharedGroup) -> SharedGroup:
    return group


def other_item(group: SharedGroup) -> SharedGroup:
    """A task that suits the sender, rather than the one assigned."""
    return msgspec.structs.replace(group, task=msgspec.structs.replace(group.task, index=group.task.index ^ 1))


def no_such_task(group: SharedGroup) -> SharedGroup:
    return msgspec.structs.replace(group, task=msgspec.structs.replace(group.task, environment="no_such_thing"))


def other_question(group: SharedGroup) -> SharedGroup:
    return msgspec.structs.replace(group, prompt=bytes(16))


CASES = {
    "wrong answers only": ([WRONG] * 4, no_twist, "zero"),
    "right answers only": ([RIGHT] * 4, no_twist, "zero"),
    "a task of its choice": ([RIGHT, WRONG], other_item, "assignment"),
    "a task that nobody can make": ([RIGHT, WRONG], no_such_task, "task"),
    "an answer to another question": ([RIGHT, WRONG], other_question, "prompt"),
    "answers longer than anyone samples": (["a b c d e f g h " * 8] * 4, no_twist, "length"),
}


def test_poison_is_refused_and_honest_groups_admitted(peer: MakePeer, manifest: Manifest) -> None:
    members = [peer(), peer()]
    simulation = Simulation(manifest, members)
    poisoners = {case: Poisoner(case, simulation, members[0], *made[:2]) for case, made in CASES.items()}
    honest = Poisoner("honest", simulation, members[0], [RIGHT, WRONG], no_twist)
    simulation.run(seconds=25)
    for member in members:
        assert member.node.member is not None
        accounts, pool = member.node.member.receiver.by_peer(), member.node.member.replay_buffer.used_by_peer()
        for case, poisoner in poisoners.items():
            reason, account = CASES[case][2], accounts[poisoner.peer_id]
            assert poisoner.sent == 20 and account["admitted"] == 0, case
            assert account["rejected"].get(reason, 0) > 0 and set(account["rejected"]) <= {reason, "muted"}, case
            assert poisoner.peer_id not in pool, case
            assert member.metrics[-1][f"swarm/rejected/{reason}"] > 0, case
        assert accounts[honest.peer_id]["admitted"] == honest.sent == 20, "it differs in nothing else"
        assert pool[honest.peer_id] > 0
    assert all(n > 0 for n in exchange(members).values())
