"""A swarm is upgraded machine by machine: neighbouring versions learn from each other, others ignore each other, and
whoever is too old is told so once."""

from __future__ import annotations

import pytest

from swarm_node.install import upgrade_command
from swarm_node.runtime.simulation import Simulation
from swarm_protocol.codec import verify_batch
from swarm_protocol.gossip_kinds import ROLLOUTS
from swarm_protocol.manifest import Manifest
from tests.support.simulated_peers import MakePeer, exchange, peer_id, used

OLD, NEW, NEWEST = 0, 1, 2


def test_neighbouring_versions_share_and_newer_are_named(peer: MakePeer, manifest: Manifest) -> None:
    paced = {"pace_s": 2.5}  # fewer rounds in the minutes after which a peer counts as gone
    peers = [peer(options=paced, protocol=4 + i, starts_at=20 * (i == NEWEST)) for i in (OLD, NEW, NEWEST)]
    simulation = Simulation(manifest, peers, seed=1)
    heard: list[tuple[str, int]] = []
    watcher = simulation.network.join(
        "watcher", manifest.swarm_id, bootstrap=peers[OLD].node.member.transport.addresses
    )
    for shard in range(manifest.shards):
        watcher.subscribe(ROLLOUTS.topic(manifest.swarm_id, shard), lambda data: heard.append(_version(data, manifest)))

    simulation.run(seconds=20)
    assert used(peers[OLD], peers[NEW]) > 0 and used(peers[NEW], peers[OLD]) > 0
    assert {version for _, version in heard} == {4}  # the new one writes what the old one reads, too

    simulation.run(seconds=60)
    shared = exchange(peers)
    assert shared[NEW, NEWEST] > 0
    assert shared[OLD, NEWEST] == shared[NEWEST, OLD] == 0
    assert peers[OLD].metrics[-1]["swarm/rejected/newer"] > 1
    told = [sentence for sentence in peers[OLD].said if "newer protocol" in sentence]
    assert len(told) == 1
    assert peer_id(peers[NEWEST]) in told[0] and upgrade_command() in told[0]
    assert not [sentence for peer in peers[NEW:] for sentence in peer.said if "newer protocol" in sentence]
    assert peers[NEWEST].metrics[-1]["swarm/rejected/version"] > 1

    simulation.kill(OLD)
    simulation.run(seconds=100)
    heard.clear()
    before = exchange(peers)
    simulation.run(seconds=60)
    assert {version for _, version in heard} == {5}
    after = exchange(peers)
    assert after[NEW, NEWEST] > before[NEW, NEWEST] and after[NEWEST, NEW] > before[NEWEST, NEW]


@pytest.mark.parametrize(("versions", "written"), [((1, 2), 1), ((2, 2), 2)])
def test_protocols_1_and_2_share(peer: MakePeer, manifest: Manifest, versions: tuple[int, int], written: int) -> None:
    """Their batches differ in form: the newer node writes the older form as long as the older node is there."""
    peers = [peer(options={"pace_s": 2.5}, protocol=version) for version in versions]
    simulation = Simulation(manifest, peers, seed=1)
    heard: list[int] = []
    addresses = peers[0].node.member.transport.addresses
    watcher = simulation.network.join("watcher", manifest.swarm_id, bootstrap=addresses)
    for shard in range(manifest.shards):
        watcher.subscribe(
            ROLLOUTS.topic(manifest.swarm_id, shard), lambda data: heard.append(_version(data, manifest)[1])
        )
    simulation.run(seconds=20)
    assert used(peers[0], peers[1]) > 0 and used(peers[1], peers[0]) > 0
    assert heard[-1] == written and set(heard) <= {1, written}


def _version(data: bytes, manifest: Manifest) -> tuple[str, int]:
    sender, batch = verify_batch(data, manifest.swarm_id, range(10))
    return sender, batch.protocol
