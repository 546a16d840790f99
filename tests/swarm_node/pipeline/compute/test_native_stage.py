"""A stage decodes with the native engine only where that gives what its own layers give, up to rounding."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from swarm_node.config import RolloutsConfig
from swarm_node.pipeline.compute.stage_sampling import is_native_exact
from swarm_node.policy.engines.native import Cache
from tests.support.tiny_models import make

ROLLOUTS = RolloutsConfig(max_prompt_tokens=20, max_new_tokens=8)


def stage_of(kind, dtype, seed=0):
    model = make(kind, seed).to(dtype)
    model.model.norm = torch.nn.Identity()  # as in a stage
    return SimpleNamespace(base=model, device=torch.device("cpu"), dtype=dtype)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_right_layers_are_taken_and_wrong_ones_refused(kind, dtype, seed, monkeypatch):
    stage = stage_of(kind, dtype, seed)
    assert is_native_exact(stage, ROLLOUTS)
    assert not is_native_exact(stage, RolloutsConfig(engine="transformers"))
    attend = Cache.attend
    monkeypatch.setattr(Cache, "attend", lambda self, i, q, *rest: attend(self, i, 1.5 * q, *rest))
    assert not is_native_exact(stage, ROLLOUTS)
