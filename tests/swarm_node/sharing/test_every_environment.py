"""What one node samples of any environment, another admits with the same rewards, whether tokens travel or not."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from swarm_node.config import PolicyConfig, RewardsConfig, RolloutsConfig
from swarm_node.policy.loading import load_policy
from swarm_node.policy.policy import Policy
from swarm_node.policy.starter import build_tokenizer
from swarm_node.tasks.sources import ENVIRONMENTS
from swarm_node.tasks.taskset import load_tasks
from swarm_node.types import Sampling
from swarm_protocol.manifest import Manifest, ManifestTask
from tests.support.gossip_room import World, rejected
from tests.support.tiny_models import GROUPED

LONG = Sampling(max_new_tokens=500)


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """A policy that has room for the longest questions: some have a thousand characters, each a token."""
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(LlamaConfig(**{**GROUPED, "max_position_embeddings": 8192})).save_pretrained(folder)
    build_tokenizer(["what is one plus two", "how many bits are there"] * 8).save_pretrained(folder)
    return load_policy(PolicyConfig(model=str(folder)), RolloutsConfig(max_new_tokens=500), lambda line: None)


@pytest.mark.parametrize("with_tokens", [True, False])
@pytest.mark.parametrize("environment", sorted(set(ENVIRONMENTS) - {"second_try"}))  # `test_turns.py` has that one
def test_groups_are_admitted_as_they_were_scored(environment: str, with_tokens: bool, roomy: Policy) -> None:
    manifest = Manifest(name="test", tasks=[ManifestTask(env=environment)])
    world = World(roomy, load_tasks([environment], RewardsConfig()), manifest)
    world.config = world.config.model_copy(update={"token_ids": with_tokens})
    sent = world.group(("$", "no", "$ or $", ""))
    publisher = world.publisher(sampling=LONG)
    publisher.publish([sent])
    publisher.flush()
    receiver = world.receiver(sampling=LONG, tasks=load_tasks([environment], RewardsConfig()))
    [data] = world.sent
    receiver.take(data)
    assert receiver.admit() == 1, rejected(receiver)
    [found] = world.admitted
    assert [r.reward for r in found.rollouts] == [r.reward for r in sent.rollouts]
    assert found.task.question == sent.task.question and found.task.answer == sent.task.answer
