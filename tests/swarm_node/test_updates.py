"""How many updates a round makes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swarm_node.config import NodeConfig
from swarm_node.grpo.trainer import Trainer
from swarm_node.node import Node
from swarm_node.types import Sampling
from tests.support.tiny_policy import TinyPolicy, group, make


def node(batch_groups: int) -> Node:
    config = NodeConfig.model_validate({"grpo": {"batch_groups": batch_groups}, "rollouts": {"max_new_tokens": 6}})
    parts: Any = TinyPolicy(make()), SimpleNamespace(reward_weights={})
    return Node(config, *parts, print)


@pytest.mark.parametrize(("batch_groups", "updates"), [(0, 1), (1, 5), (2, 2), (3, 2), (4, 1), (8, 1)])
def test_a_round_makes_an_update_for_each_batch_of_its_groups(batch_groups: int, updates: int):
    learner, alone = node(batch_groups), TinyPolicy(make())
    trainer = Trainer(alone, learner.config.grpo, Sampling(6))
    found = [group([1, 0, 0, 1], seed=seed) for seed in range(5)]
    figures = learner.learn(found)
    losses = [trainer.step(found[i::updates])["loss"] for i in range(updates)]
    assert learner.policy.version == learner.trainer.optimizer.updates == updates and learner.round == 1
    assert figures["loss"] == pytest.approx(sum(losses) / updates)
    assert figures["num_tokens"] == trainer.num_tokens
    for mine, other in zip(learner.policy.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_a_round_without_groups_ends():
    learner = node(8)
    assert learner.learn([])["loss"] == 0.0
    assert learner.round == 1 and learner.policy.version == 0
