"""Peers of a simulated swarm: how fast they are, and what they learned from each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from swarm_node.runtime.cost import CostMeter
from swarm_node.runtime.held_out import HeldOutFigures
from swarm_node.runtime.resume import RunState
from swarm_node.runtime.simulation import Peer, Simulation, Speed
from swarm_node.storage.checkpoints import CheckpointStore
from swarm_node.storage.run_settings import RunSettings
from swarm_node.storage.rundir import RunDir

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


def state_of(peer: Peer, store: CheckpointStore, folder: Path) -> RunState:
    """The state of a run whose node is that of `peer`."""
    run, node = RunDir(folder), peer.node
    own = RunSettings(run, peer.config, peer.config, print)
    held_out = HeldOutFigures(peer.config, node.policy, node.tasks, print, lambda round, found: None, whole=True)
    return RunState(peer.config, run, node, store, None, own, CostMeter(None, 0.0), held_out)
