from __future__ import annotations

import pytest

from swarm_node.config import PolicyConfig, RewardsConfig, RolloutsConfig
from swarm_node.policy.loading import load_policy
from swarm_node.policy.policy import Policy
from swarm_node.tasks.taskset import TaskSet, load_tasks
from tests.support.gossip_room import World


@pytest.fixture(scope="session")
def starter() -> Policy:
    return load_policy(PolicyConfig(), RolloutsConfig(max_new_tokens=16), lambda line: None)


@pytest.fixture(scope="session")
def small() -> TaskSet:
    return load_tasks(["small"], RewardsConfig())


@pytest.fixture
def world(starter: Policy, small: TaskSet) -> World:
    return World(starter, small)
