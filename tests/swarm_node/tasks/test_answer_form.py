"""The form in which an answer counts: what policies are told, and how answers are judged by it."""

from __future__ import annotations

import pytest

from swarm_node.config import NodeConfig, RewardsConfig
from swarm_node.tasks import load_tasks
from swarm_node.tasks.one_turn import FORM_PROMPTS, in_form

WRITTEN = {"any": "{}", "tags": "<answer>{}</answer>", "boxed": r"\boxed{{{}}}"}


@pytest.mark.parametrize("form", WRITTEN)
def test_only_the_form_asked_for_counts(form: str) -> None:
    tasks = load_tasks(["small/gcd"], RewardsConfig(answer=form))
    (task,) = tasks.held_out(1)
    texts = [way.format(task.answer) for way in WRITTEN.values()]
    scores = tasks.score([task] * 3, [""] * 3, texts)
    right = [form in ("any", way) for way in WRITTEN]
    assert [score.correct for score in scores] == right
    assert [score.extracted for score in scores] == [task.answer if one else None for one in right]


def test_reasoning_earns_nothing_by_itself() -> None:
    tasks = load_tasks(["small/gcd"], RewardsConfig(answer="tags"))
    (task,) = tasks.held_out(1)
    answer = f"<answer>{task.answer}</answer>"
    texts = [f"I try 3 and 6, {answer}", f"It is {task.answer}", f"{answer} or so", f"{answer}\n"]
    assert [score.reward for score in tasks.score([task] * 4, [""] * 4, texts)] == [1, 0, 0, 1]


@pytest.mark.parametrize("form", FORM_PROMPTS)
def test_policies_are_told_the_form(form: str) -> None:
    assert in_form(NodeConfig(), "any") == NodeConfig()
    told = in_form(NodeConfig(), form)
    assert told.rewards.answer == form and told.policy.system_prompt.endswith(FORM_PROMPTS[form])
    own = NodeConfig.model_validate({"policy": {"system_prompt": "You are terse."}})
    assert in_form(own, form).policy.system_prompt == f"You are terse.\n\n{FORM_PROMPTS[form]}"
    assert in_form(in_form(own, form), form) == in_form(own, form)
    empty = NodeConfig.model_validate({"policy": {"system_prompt": ""}})
    assert in_form(empty, form).policy.system_prompt == FORM_PROMPTS[form]
