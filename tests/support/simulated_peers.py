"""Peers of a simulated swarm: how fast they are, and what they learned from each other."""

from __future__ import annotations

from collections.abc import Callable

from swarm_node.runtime.simulation import Peer, Simulation, Speed

SPEED = Speed(generate_tok_s=64.0, train_tok_s=2000.0)
"""A round takes about a virtual second."""
MakePeer = Callable[..., Peer]


def peer_id(peer: Peer) -> str:
    assert peer.node.member is not None
    return peer.node.member.peer_id


def used(peer: Peer, sender: Peer) -> int:
    """Groups of `sender` that `peer` has trained on so far."""
    assert peer.node.member is not None
    return peer.node.member.replay_buffer.used_by_peer().get(peer_id(sender), 0)


def exchange(peers: list[Peer]) -> dict[tuple[int, int], int]:
    """(i, j) -> groups of j that i has trained on."""
    return {
        (i, j): used(a, b)
        for i, a in enumerate(peers)
        for j, b in enumerate(peers)
        if i != j and not a.silo and not b.silo
    }


def total(simulation: Simulation, name: str) -> float:
    """A metric of the last round, summed over the peers."""
    return sum(peer.metrics[-1].get(name, 0.0) for peer in simulation.peers)
