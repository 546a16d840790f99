"""Groups of a round: sampled, scored, refilled, reproducible."""

from __future__ import annotations

import copy
import random
import re

import pytest

from swarm_node.config import PolicyConfig, RewardsConfig, RolloutsConfig
from swarm_node.policy.loading import load_policy
from swarm_node.rollouts import collect, fit_length, too_long
from swarm_node.tasks.taskset import load_tasks
from tests.support.panicking import KILLER, panicking_policy


@pytest.fixture(scope="module")
def tasks():
    return load_tasks(["small"], RewardsConfig())


@pytest.fixture(scope="module")
def policy():
    return load_policy(PolicyConfig(), RolloutsConfig(max_new_tokens=12), lambda text: None)


def draw_from(tasks, seed=0):
    rng = random.Random(seed)
    return lambda n: tasks.sample(rng, n)


def test_a_round_is_a_function_of_its_seed(policy, tasks):
    config = RolloutsConfig(groups=6, group_size=4, max_new_tokens=12)
    first = collect(policy, draw_from(tasks), tasks, config, "0/1")
    again = collect(policy, draw_from(tasks), tasks, config, "0/1")
    other = collect(policy, draw_from(tasks), tasks, config, "0/2")
    texts = [[[r.text for r in g.rollouts] for g in c.groups] for c in (first, again, other)]
    assert texts[0] == texts[1] != texts[2]
    assert len(first.groups) == 6 and all(len(g.rollouts) == 4 for g in first.groups)


def test_rewards_are_those_of_the_checker(policy, tasks):
    config = RolloutsConfig(groups=14, group_size=8, max_new_tokens=12)
    groups = collect(policy, draw_from(tasks), tasks, config, "0/1").groups
    rollouts = [(g.task, r) for g in groups for r in g.rollouts]
    right = [r for task, r in rollouts if r.text.strip() == task.answer]
    assert right and all(r.reward == 1.0 and r.correct for r in right)
    wrong = [r for task, r in rollouts if r.text.strip() != task.answer]
    assert wrong and sum(r.reward for r in wrong) <= 0.05 * len(wrong)  # equal values written otherwise, at most
    assert policy.tokenizer.decode(groups[0].prompt_ids).endswith("<sep>")


def test_prompts_that_do_not_fit_are_counted(policy, tasks):
    config = RolloutsConfig(groups=7, group_size=2, max_new_tokens=12, max_prompt_tokens=16)
    collected = collect(policy, draw_from(tasks), tasks, config, "0/1")
    assert collected.too_long > 0
    assert len(collected.groups) == 7
    assert all(len(g.prompt_ids) <= 16 for g in collected.groups)


@pytest.mark.parametrize(
    ("lengths", "settings", "told"),
    [
        (
            [40, 50],
            (30, 100),
            "have 40 to 50 tokens, and rollouts.max_prompt_tokens = 30: --set rollouts.max_prompt_tokens=50",
        ),
        ([40, 900], (30, 100), "= 30: --set rollouts.max_prompt_tokens=156 lets"),
        (
            [200],
            (300, 100),
            "each has 200, and the model's 256 positions less .* leave 156: --set rollouts.max_new_tokens=56",
        ),
        ([200], (30, 100), "--set rollouts.max_new_tokens=56 --set rollouts.max_prompt_tokens=200 makes room"),
        ([300, 900], (2048, 128), "leave 128: shorten the questions"),
        ([], (30, 100), "none was drawn"),
    ],
)
def test_what_is_too_long_is_told_the_settings_that_fit(policy, lengths, settings, told):
    config = RolloutsConfig(max_prompt_tokens=settings[0], max_new_tokens=settings[1])
    assert policy.max_positions == 256 and re.search(told, too_long(lengths, config, policy))


def test_the_lengths_of_what_is_skipped_are_kept(policy, tasks):
    config = RolloutsConfig(groups=7, group_size=2, max_new_tokens=12, max_prompt_tokens=1)
    collected = collect(policy, draw_from(tasks), tasks, config, "0/1")
    assert not collected.groups and 1 < collected.skipped[0] < collected.skipped[1] < 256


def test_tasks_at_whose_prompts_the_tokenizer_fails_are_left_out(tasks):
    """Their environment's question is the text that was planted; the other tasks of the round are drawn anew."""
    said = []
    planted = panicking_policy(said, decodes=False)
    rng, killers = random.Random(0), []

    def draw(n):
        drawn = tasks.sample(rng, n)
        if not killers:
            killers.extend(drawn[1:3])
        return drawn

    def prompt(task):
        return KILLER if any(task is killer for killer in killers) else task.question

    asking = copy.copy(tasks)
    asking.prompt = prompt
    config = RolloutsConfig(groups=4, group_size=2, max_new_tokens=4)
    collected = collect(planted, draw, asking, config, "0/1")
    assert (len(collected.groups), collected.not_encoded, collected.too_long) == (4, 2, 0)
    assert all(group.task not in killers for group in collected.groups)
    assert len(said) == 1 and "left out" in said[0]


def test_completions_leave_room_for_prompts(policy):
    said = []
    assert fit_length(RolloutsConfig(max_new_tokens=500), policy, said.append).max_new_tokens == 128
    assert "500 -> 128" in said[0]
    config = RolloutsConfig(max_new_tokens=100)
    assert fit_length(config, policy, said.append) is config and len(said) == 1
