"""Small swarms of tiny random models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks import sharing
from benchmarks.sharing_settings import Setting
from swarm_node.config import NodeConfig
from swarm_node.policy.starter import build_tokenizer
from swarm_node.runtime.simulation import Peer, Speed, manifest_for
from swarm_protocol.manifest import Manifest
from tests.support.simulated_peers import SPEED, MakePeer
from tests.support.tiny_models import make
from tests.support.tiny_models import save as save_model

TASKS = ["small/gcd", "small/lcm"]


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


@pytest.fixture
def small(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Callable[[Setting], Setting]:
    """Gives a setting of the sharing benchmark random models, and a reward that they earn."""
    monkeypatch.setattr(sharing, "SPEED", Speed(150.0, 5000.0))
    return partial(
        replace,
        tasks=lambda peer: TASKS,
        held_out=TASKS,
        start=lambda seed, peer: models["llama"],
        rewards={"checker_weight": 0.0, "functions": [{"path": "tests.swarm.parity:even"}]},
        max_new_tokens=4,
    )
