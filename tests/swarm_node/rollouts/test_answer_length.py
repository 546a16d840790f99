"""The length limit of answers where nobody sets it, for a policy whose answers have known lengths."""

from __future__ import annotations

import pytest

from swarm_node.config import NodeConfig, RewardsConfig
from swarm_node.policy.loading import load_policy
from swarm_node.policy.policy import Policy
from swarm_node.rollouts import answer_length
from swarm_node.rollouts.answer_length import with_answer_length
from swarm_node.tasks.taskset import load_tasks
from swarm_node.types import Rollout, Sampling, Turn

TASKS = load_tasks(["small/gcd"], RewardsConfig())


def starter() -> Policy:
    return load_policy(NodeConfig().policy, NodeConfig().rollouts, lambda sentence: None)


def a_policy(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> Policy:
    """A policy of the sizes that count, whose answers to each question end after so many tokens."""
    policy = starter()

    def generate(prompts: list[list[int]], n: int, sampling: Sampling, seeds: list[int]) -> list[list[Rollout]]:
        most = sampling.max_new_tokens
        one = [
            Rollout([Turn([1] * min(length, most), [0.0] * min(length, most), length <= most)]) for length in lengths
        ]
        assert n == len(lengths)
        return [one for _ in prompts]

    monkeypatch.setattr(answer_length, "SMALL", 1)
    monkeypatch.setattr(policy, "generate", generate)
    return policy


@pytest.mark.parametrize(
    ("lengths", "chosen"),
    [
        ([9, 9, 9, 9], 32),
        ([9, 9, 300, 300], 32),
        ([9, 50, 50, 50], 64),  # a quarter is less than a third
        ([100, 120, 200, 400], 128),
        ([129, 129, 129, 129], 256),
    ],
    ids=str,
)
def test_a_third_of_the_answers_ends(lengths: list[int], chosen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    config = with_answer_length(NodeConfig(), a_policy(lengths, monkeypatch), TASKS, said.append)
    assert config.rollouts.max_new_tokens == chosen
    assert len(said) == 2 and said[1].startswith(f"answers may take {chosen} tokens: ")


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    config = NodeConfig.model_validate({"rollouts": {"max_new_tokens": 256}})
    assert with_answer_length(config, a_policy([9] * 4, monkeypatch), TASKS, print) is config


def test_small_policies_are_not_asked() -> None:
    config = NodeConfig()
    assert with_answer_length(config, starter(), TASKS, print) is config
