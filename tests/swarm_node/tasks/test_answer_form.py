"""The form in which an answer counts: what policies are told, and how answers are judged by it."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest

from swarm_node.config import NodeConfig, RewardsConfig
from swarm_node.config.own import dump_own, read_own
from swarm_node.policy.loading import load_policy
from swarm_node.tasks.one_turn import FORM_PROMPTS, has_own_prompt, in_form
from swarm_node.tasks.taskset import load_tasks
from swarm_protocol.answer_form import AnswerForm
from tests.support.tiny_models import save

WRITTEN: dict[AnswerForm, str] = {"any": "{}", "tags": "<answer>{}</answer>", "boxed": r"\boxed{{{}}}"}
OWN = {"policy": {"system_prompt": "You are terse.", "prompt_template": "Q: {question}\nA:"}}


@pytest.mark.parametrize("form", WRITTEN)
def test_only_the_form_asked_for_counts(form: AnswerForm) -> None:
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
def test_policies_are_told_the_form(form: AnswerForm) -> None:
    assert in_form(NodeConfig(), "any") == NodeConfig()
    told = in_form(NodeConfig(), form)
    assert told.rewards.answer == form and told.policy.system_prompt == FORM_PROMPTS[form]
    own = NodeConfig.model_validate({"policy": {"system_prompt": "You are terse."}})
    assert in_form(own, form).policy.system_prompt == f"You are terse.\n\n{FORM_PROMPTS[form]}"
    assert in_form(in_form(own, form), form) == in_form(own, form)


@pytest.mark.parametrize("forms", list(permutations(WRITTEN)), ids="-".join)
@pytest.mark.parametrize("given", [{}, OWN], ids=["usual", "own"])
def test_no_former_form_is_asked_for(given: dict[str, dict[str, str]], forms: tuple[AnswerForm, ...]) -> None:
    config = NodeConfig.model_validate(given)
    for form in (*forms, *forms):
        config = in_form(config, form)
        asks = FORM_PROMPTS.get(form)
        for prompt in (config.policy.system_prompt, config.policy.prompt_template):
            assert [other for other in FORM_PROMPTS.values() if other in prompt] == ([asks] if asks else [])
            assert asks is None or prompt.count(asks) == 1
        if given:
            assert config.policy.system_prompt.startswith(OWN["policy"]["system_prompt"])
    assert in_form(config, "any").policy.prompt_template == NodeConfig.model_validate(given).policy.prompt_template
    assert not given or in_form(config, "any").policy == NodeConfig.model_validate(given).policy


@pytest.mark.parametrize("form", FORM_PROMPTS)
def test_models_without_a_chat_template_are_told_too(form: AnswerForm, tmp_path: Path) -> None:
    model = str(save("llama", tmp_path, chat=False))
    config = in_form(NodeConfig.model_validate({"policy": OWN["policy"] | {"model": model}}), form)
    policy = load_policy(config.policy, config.rollouts, lambda line: None)
    assert policy.decode(policy.encode("2 + 2?")) == f"Q: 2 + 2?\n{FORM_PROMPTS[form]}\nA:"


@pytest.mark.parametrize("form", FORM_PROMPTS)
def test_only_a_users_prompt_is_an_own_one(form: AnswerForm, tmp_path: Path) -> None:
    """Also in a configuration that is read back from a run, where every field is set."""
    for given in ({}, OWN):
        asked = NodeConfig.model_validate(given)
        (tmp_path / "config.toml").write_text(dump_own(in_form(asked, form), asked))
        again = read_own(tmp_path / "config.toml")
        assert "system_prompt" in again.policy.model_fields_set
        assert has_own_prompt(asked, form) == has_own_prompt(again, form) == bool(given)
        assert in_form(again, form).policy == in_form(asked, form).policy
