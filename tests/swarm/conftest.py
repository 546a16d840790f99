"""Small swarms of tiny random models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protocol.manifest import Manifest
from swarm_node.config import NodeConfig
from swarm_node.policy.starter import build_tokenizer
from swarm_node.sim import Peer, Simulation, Speed, manifest_for
from tests.support.tiny_models import make
from tests.support.tiny_models import save as save_model

SPEED = Speed(generate_tok_s=64.0, train_tok_s=2000.0)
"""A round takes about a virtual second."""
MakePeer = Callable[..., Peer]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two families with tokenizers of their own."""
    folder = tmp_path_factory.mktemp("models")
    save_model("llama", folder / "llama")
    make("qwen2").save_pretrained(folder / "qwen2")
    build_tokenizer(["of the number in the binary representation"] * 8).save_pretrained(folder / "qwen2")
    return {name: folder / name for name in ("llama", "qwen2")}


@pytest.fixture
def peer(models: dict[str, Path]) -> MakePeer:
    """`peer(family="qwen2", options={"pace_s": 2}, starts_at=3)`: a node with a tiny model."""

    def make_peer(
        family: str = "llama", speed: Speed = SPEED, options: dict[str, Any] | None = None, **keys: Any
    ) -> Peer:
        table: dict[str, Any] = {
            "tasks": ["small/count_bits"],
            "policy": {"model": str(models[family])},
            "rewards": {"checker_weight": 0.0, "functions": [{"path": "tests.swarm.parity:even"}]},
            "rollouts": {"group_size": 4, "max_new_tokens": 4},
            "sharing": {"own": 2, "foreign": 2},
            **(options or {}),
        }
        return Peer(NodeConfig.model_validate(table), speed=speed, **keys)

    return make_peer


@pytest.fixture
def manifest(peer: MakePeer) -> Manifest:
    return manifest_for(peer().config)


def peer_id(peer: Peer) -> str:
    assert peer.node.member is not None
    return peer.node.member.peer_id


def used(peer: Peer, sender: Peer) -> int:
    """Groups of `sender` that `peer` has trained on so far."""
    assert peer.node.member is not None
    return peer.node.member.pool.used_by_peer().get(peer_id(sender), 0)


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
