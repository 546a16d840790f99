"""A node's options as they go with its crew's."""

from __future__ import annotations

import math

import pytest

from protocol.crew import Assignment, Plan, decode_record, encode_record
from swarm_node.config import GrpoConfig, NodeConfig, PipelineConfig, RolloutsConfig
from swarm_node.pipeline.settings import limits, settings_of, with_settings

THEIRS = NodeConfig(
    grpo=GrpoConfig(weight_decay=0.1, betas=(0.8, 0.9), microbatch_tokens=1000, beta=0.02),
    rollouts=RolloutsConfig(max_prompt_tokens=100, max_new_tokens=50, group_size=4),
    pipeline=PipelineConfig(stages=2, wire="int8", swap=True, replica="off"),
)


def test_a_node_adopts_its_crew_s_options() -> None:
    config, changed = with_settings(NodeConfig(), settings_of(THEIRS))
    assert config.pipeline.wire == "int8" and config.pipeline.swap and config.pipeline.replica == "off"
    assert config.grpo.weight_decay == 0.1 and config.grpo.betas == (0.8, 0.9)
    assert config.rollouts.max_prompt_tokens == 100 and config.rollouts.max_new_tokens == 50
    assert config.grpo.microbatch_tokens == 1000
    assert config.grpo.beta == 0.0 == NodeConfig().grpo.beta  # how much is the affair of whoever leads
    assert 'pipeline.wire = "int8" (here "bfloat16")' in changed and "grpo.weight_decay = 0.1 (here 0.0)" in changed
    assert len(changed) == 8
    assert settings_of(config).wire == "int8" and config.rollouts.groups == NodeConfig().rollouts.groups


def test_the_first_lead_decides_the_rounds() -> None:
    hundred, endless = NodeConfig(rounds=100, swarm="x"), NodeConfig(swarm="x")
    config, changed = with_settings(hundred, settings_of(endless))
    assert math.isinf(config.total_rounds) and changed == ["rounds = without end (here 100)"]
    config, changed = with_settings(endless, settings_of(hundred))
    assert config.total_rounds == 100 and changed == ["rounds = 100 (here without end)"]


def test_nothing_changes_with_ones_own() -> None:
    for config in (NodeConfig(), THEIRS):
        assert with_settings(config, settings_of(config)) == (config, [])


def test_no_penalty_without_a_reference() -> None:
    config, changed = with_settings(THEIRS, settings_of(NodeConfig()))
    assert config.grpo.beta == 0.0 and "grpo.beta = 0.0 (here 0.02)" in changed
    assert settings_of(THEIRS).reference and not settings_of(NodeConfig()).reference


def test_a_new_lead_keeps_the_others_limits() -> None:
    mine = NodeConfig(rollouts=RolloutsConfig(group_size=500, max_new_tokens=2000))
    config, _ = with_settings(mine, settings_of(THEIRS))
    rollouts, most = config.rollouts, limits(settings_of(THEIRS), 8, 100)
    assert rollouts.max_prompt_tokens + rollouts.group_size * rollouts.max_new_tokens <= most.tokens
    assert (most.prompt, most.length, most.width, most.vocabulary) == (100, 50, 8, 100)


@pytest.mark.parametrize("config", [NodeConfig(), THEIRS, NodeConfig(grpo=GrpoConfig(microbatch_tokens=10**9))])
def test_settings_can_be_sent(config: NodeConfig) -> None:
    plan = Plan(1, 1, (Assignment("a", (0, 1)),), settings_of(config))
    assert decode_record(encode_record(plan)) == plan
