"""A node's options as they go with its crew's."""

from __future__ import annotations

import math

import pytest

from swarm_node.config import GrpoConfig, NodeConfig, PipelineConfig, RolloutsConfig
from swarm_node.pipeline.messages import LEADER
from swarm_node.pipeline.settings import crew_settings, limits, with_crew_settings
from swarm_protocol.crew import Assignment, Plan, decode_record, encode_record

THEIRS = NodeConfig(
    grpo=GrpoConfig(weight_decay=0.1, betas=(0.8, 0.9), microbatch_tokens=1000, beta=0.02),
    rollouts=RolloutsConfig(max_prompt_tokens=100, max_new_tokens=50, group_size=4),
    pipeline=PipelineConfig(stages=2, wire="int8", swap=True, replica="off"),
)


def test_a_node_adopts_its_crew_s_options() -> None:
    config, changed = with_crew_settings(NodeConfig(), crew_settings(THEIRS))
    assert config.pipeline.wire == "int8" and config.pipeline.swap and config.pipeline.replica == "off"
    assert config.grpo.weight_decay == 0.1 and config.grpo.betas == (0.8, 0.9)
    assert config.rollouts.max_prompt_tokens == 100 and config.rollouts.max_new_tokens == 50
    assert config.grpo.microbatch_tokens == 1000
    assert config.grpo.beta == 0.0 == NodeConfig().grpo.beta  # how much is the affair of whoever leads
    assert 'pipeline.wire = "int8" (here "bfloat16")' in changed and "grpo.weight_decay = 0.1 (here 0.0)" in changed
    assert len(changed) == 8
    assert crew_settings(config).wire == "int8" and config.rollouts.groups == NodeConfig().rollouts.groups


def test_the_first_lead_decides_the_rounds() -> None:
    hundred, endless = NodeConfig(rounds=100, swarm="x"), NodeConfig(swarm="x")
    config, changed = with_crew_settings(hundred, crew_settings(endless))
    assert math.isinf(config.total_rounds) and changed == ["rounds = without end (here 100)"]
    config, changed = with_crew_settings(endless, crew_settings(hundred))
    assert config.total_rounds == 100 and changed == ["rounds = 100 (here without end)"]


def test_nothing_changes_with_ones_own() -> None:
    for config in (NodeConfig(), THEIRS):
        assert with_crew_settings(config, crew_settings(config)) == (config, [])


def test_no_penalty_without_a_reference() -> None:
    config, changed = with_crew_settings(THEIRS, crew_settings(NodeConfig()))
    assert config.grpo.beta == 0.0 and "grpo.beta = 0.0 (here 0.02)" in changed
    assert crew_settings(THEIRS).reference and not crew_settings(NodeConfig()).reference


def test_a_new_lead_keeps_the_others_limits() -> None:
    mine = NodeConfig(rollouts=RolloutsConfig(group_size=500, max_new_tokens=2000))
    config, _ = with_crew_settings(mine, crew_settings(THEIRS))
    plan = Plan(1, 1, (Assignment("a", (0, 1)), Assignment("b", (1, 2))), crew_settings(THEIRS))
    rollouts, most = config.rollouts, limits(plan, "a", "b", 8, 100)
    assert rollouts.max_prompt_tokens + rollouts.group_size * rollouts.max_new_tokens <= most.tokens
    assert (most.prompt, most.length, most.width, most.vocabulary) == (100, 50, 8, 100)
    assert (most.plan, most.stages, most.here, most.sender) == (plan.mark, 2, {0, LEADER}, {1})


@pytest.mark.parametrize("config", [NodeConfig(), THEIRS, NodeConfig(grpo=GrpoConfig(microbatch_tokens=10**9))])
def test_settings_can_be_sent(config: NodeConfig) -> None:
    plan = Plan(1, 1, (Assignment("a", (0, 1)),), crew_settings(config))
    assert decode_record(encode_record(plan)) == plan
