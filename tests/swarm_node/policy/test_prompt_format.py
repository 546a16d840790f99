"""How an exported model wants to be asked: as transformers reads it, and as `swarm-node eval` does."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, GenerationConfig

from swarm_node.config import NodeConfig, PolicyConfig, RolloutsConfig
from swarm_node.errors import UserError
from swarm_node.policy import chat_template
from swarm_node.policy.loading import load_policy
from swarm_node.policy.model_card import MAX_CARD_BYTES, licence_of
from swarm_node.policy.prompt_format import PROMPT_FORMAT, read_prompt_format, template_of_training, write_prompt_format
from swarm_node.tasks.one_turn import in_form
from tests.support.tiny_models import save

SHOWS_ALL = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
REFUSES = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + SHOWS_ALL
USERS_ONLY = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ message['content'] }}{% endif %}{% endfor %}"
)
PARTS = (
    "{% for message in messages %}<{{ message['role'] }}>{% for part in message['content'] %}{% if part['type'] == "
    "'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
REFUSE_PARTS = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PARTS
SWITCH = (
    SHOWS_ALL + "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
    "{{ 'in ' + words[0] if words is defined }}{{ style.name if style is defined }}"
)
AWKWARD = 'Say "it",\nit\'s {{ 6 * 7 }} %} {% raw %} \\n é 🦆'


@pytest.mark.parametrize("template", [SHOWS_ALL, REFUSES, USERS_ONLY, PARTS, REFUSE_PARTS])
def test_a_missing_system_prompt_reads_as_in_training(tmp_path: Path, template: str) -> None:
    save("llama", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    config = NodeConfig.model_validate({"policy": {"model": str(tmp_path), "system_prompt": AWKWARD}})
    policy = load_policy(config.policy, config.rollouts, lambda line: None)
    trained = policy.frame.around("2 + 2?")
    assert (AWKWARD in trained) == (template != USERS_ONLY)
    write_prompt_format(tmp_path, policy.tokenizer, config, config.tasks)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    content: Any = [{"type": "text", "text": "2 + 2?"}] if policy.frame.parts else "2 + 2?"
    asked = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    assert asked == trained
    again = load_policy(config.policy, config.rollouts, lambda line: None)
    assert again.frame.around("2 + 2?") == trained, "who gives a system prompt gets that one, once"


def test_an_export_runs_no_template_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def runs(*args: object, **kwargs: object) -> None:
        pytest.fail("a template may be a stranger's program")

    monkeypatch.setattr(chat_template, "CPU_S", 1)
    save("llama", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.chat_template = SHOWS_ALL
    monkeypatch.setattr(type(tokenizer), "apply_chat_template", runs)
    brief = PolicyConfig(system_prompt="Be brief.")
    assert template_of_training(tokenizer, brief).endswith(SHOWS_ALL)
    tokenizer.chat_template = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    assert "Be brief." in template_of_training(tokenizer, brief), "one that does not end is not waited for"


@pytest.mark.parametrize("template", [SHOWS_ALL, REFUSES, USERS_ONLY])
def test_a_template_that_drops_system_prompts_is_named(tmp_path: Path, template: str) -> None:
    save("llama", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.chat_template = template
    config = NodeConfig.model_validate({"policy": {"system_prompt": "Answer."}})
    write_prompt_format(tmp_path, tokenizer, config, ["small"])
    text = (tmp_path / "README.md").read_text()
    assert ("leaves system prompts out" in text) == (template == USERS_ONLY)
    assert ("```\nAnswer.\n```" in text) == (template != USERS_ONLY)


def test_exported_sampling_is_that_of_training(tmp_path: Path) -> None:
    save("llama", tmp_path)
    GenerationConfig(
        eos_token_id=[2, 3], pad_token_id=0, do_sample=True, top_k=20, repetition_penalty=1.1
    ).save_pretrained(tmp_path)
    config = NodeConfig.model_validate({"rollouts": {"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 12}})
    write_prompt_format(tmp_path, AutoTokenizer.from_pretrained(tmp_path), config, config.tasks)
    sampling = GenerationConfig.from_pretrained(tmp_path)
    assert (sampling.temperature, sampling.top_p, sampling.max_new_tokens) == (0.7, 0.9, 12)
    assert sampling.do_sample and sampling.top_k == 0 and sampling.repetition_penalty in (None, 1.0)
    assert sampling.eos_token_id == [2, 3]


def test_an_export_holds_no_local_path(tmp_path: Path) -> None:
    save("llama", tmp_path, chat=False)
    tasks = ["gcd", "/home/me/secret.jsonl", {"file": "/home/me/other.jsonl"}, {"env": "lcm", "weight": 2}]
    config = NodeConfig.model_validate(
        {"tasks": tasks, "policy": {"prompt_template": "Q {question} A", "model": "/home/me/model"}}
    )
    write_prompt_format(tmp_path, AutoTokenizer.from_pretrained(tmp_path), config, config.tasks)
    for name in (PROMPT_FORMAT, "README.md", "generation_config.json"):
        assert "/home/me" not in (tmp_path / name).read_text()
    assert "Q {question} A" in (tmp_path / "README.md").read_text()
    found = read_prompt_format(tmp_path)
    assert found is not None
    again, files = found
    assert again.tasks == [config.tasks[0], config.tasks[3]] and files == 2
    assert again.policy.prompt_template == "Q {question} A"


def test_an_export_asks_for_its_form_of_answers(tmp_path: Path) -> None:
    save("llama", tmp_path)
    config = in_form(
        NodeConfig.model_validate({"rewards": {"kind": "number"}, "policy": {"dtype": "bfloat16"}}), "tags"
    )
    write_prompt_format(tmp_path, AutoTokenizer.from_pretrained(tmp_path), config, config.tasks)
    found = read_prompt_format(tmp_path)
    assert found is not None
    assert found[0].rewards.answer == "tags" and found[0].policy.system_prompt == config.policy.system_prompt
    assert found[0].rewards.kind == "number" and found[0].policy.dtype == "bfloat16"


@pytest.mark.parametrize(
    "change",
    [
        {"tasks": ["/etc/passwd.jsonl"]},
        {"tasks": [{"file": "/etc/passwd"}]},
        {"format": 2},
        {"policy": {}},
        {"answer": "rot13"},
        {"kind": "code"},
        {"rollouts": {"temperature": "hot"}},
        {"eval": {"questions": 1, "run": "x"}},
        {"question_files": math.inf},
    ],
    ids=str,
)
def test_a_stranger_s_file_gives_only_data(tmp_path: Path, change: dict[str, Any]) -> None:
    save("llama", tmp_path)
    write_prompt_format(tmp_path, AutoTokenizer.from_pretrained(tmp_path), NodeConfig(), ["small"])
    file = tmp_path / PROMPT_FORMAT
    rewards = {"rewards": {"functions": [{"path": "evil.py:run"}]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | rewards))
    found = read_prompt_format(tmp_path)
    assert found is not None and found[0].rewards == NodeConfig().rewards
    told = {"questions": 3, "samples": 2, "tasks": ["evil.py:Task"]}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eval": told}))
    found = read_prompt_format(tmp_path)
    assert found is not None and found[0].eval.questions == 3 and found[0].eval.tasks == []
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UserError, match=f"cannot use .*{PROMPT_FORMAT}"):
        read_prompt_format(tmp_path)


def test_brackets_without_end_are_refused(tmp_path: Path) -> None:
    (tmp_path / PROMPT_FORMAT).write_text("[" * 100_000)
    with pytest.raises(UserError, match=f"cannot use .*{PROMPT_FORMAT}"):
        read_prompt_format(tmp_path)


@pytest.mark.parametrize("name", ["pipe", "device", "huge", "windows"])
def test_a_licence_is_read_from_a_plain_file_alone(name: str, tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    if name == "pipe":
        os.mkfifo(card)
    elif name == "device":
        card.symlink_to("/dev/zero")
    else:
        text = "---\r\nlicense: mit\r\n---\r\n"
        card.write_bytes((text + "x" * (MAX_CARD_BYTES if name == "huge" else 0)).encode())
    assert licence_of(card) == ("mit" if name == "windows" else "")


def test_arguments_of_the_template_stay_with_the_export(tmp_path: Path) -> None:
    save("llama", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(SWITCH)
    given = {"enable_thinking": False, "words": ['ten "words"'], "style": {"name": AWKWARD}}
    policy = {"model": str(tmp_path), "system_prompt": "", "chat_template_kwargs": given}
    config = NodeConfig.model_validate({"policy": policy})
    trained = load_policy(config.policy, config.rollouts, lambda line: None).frame.around("2 + 2?")
    assert trained == f'<user>2 + 2?<think></think>in ten "words"{AWKWARD}'
    write_prompt_format(tmp_path, AutoTokenizer.from_pretrained(tmp_path), config, config.tasks)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    question = [{"role": "user", "content": "2 + 2?"}]
    assert tokenizer.apply_chat_template(question, tokenize=False) == trained
    thinking = tokenizer.apply_chat_template(question, tokenize=False, enable_thinking=True)
    assert "<think>" not in thinking and "ten" in thinking, "who gives an argument gets that one"
    assert "given enable_thinking = false" in (tmp_path / "README.md").read_text()
    found = read_prompt_format(tmp_path)
    assert found is not None and found[0].policy.chat_template_kwargs == given


def test_of_several_templates_the_export_has_the_one_of_the_training(tmp_path: Path) -> None:
    save("llama", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    tokenizer.chat_template = {"rag": SHOWS_ALL + "!", "tool_use": SHOWS_ALL}
    tokenizer.save_pretrained(tmp_path)
    config = NodeConfig.model_validate({"policy": {"model": str(tmp_path), "system_prompt": "Short."}})
    with pytest.raises(UserError, match="are 'rag', 'tool_use', and none is the default: name one with --set policy"):
        load_policy(config.policy, config.rollouts, lambda line: None)
    config.policy.chat_template = "rag"
    trained = load_policy(config.policy, config.rollouts, lambda line: None).frame.around("2 + 2?")
    assert trained == "<system>Short.<user>2 + 2?!"
    write_prompt_format(tmp_path, tokenizer, config, config.tasks)
    found = read_prompt_format(tmp_path)
    assert found is not None
    again = found[0].policy.model_copy(update={"model": str(tmp_path)})
    assert load_policy(again, config.rollouts, lambda line: None).frame.around("2 + 2?") == trained


@pytest.mark.parametrize(
    ("template", "settings", "message"),
    [
        ("", {"chat_template_kwargs": {"a": 1}}, "has no chat template: leave out policy.chat_template and"),
        (SHOWS_ALL, {"chat_template": "rag"}, "has one chat template, without a name: leave out policy.chat_template"),
    ],
)
def test_settings_of_a_template_that_is_not_there(
    tmp_path: Path, template: str, settings: dict[str, Any], message: str
) -> None:
    save("llama", tmp_path, chat=bool(template))
    if template:
        (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(UserError, match=message):
        load_policy(PolicyConfig(model=str(tmp_path), **settings), RolloutsConfig(), lambda line: None)


def test_an_argument_that_the_template_does_not_use_is_said(tmp_path: Path) -> None:
    save("llama", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(SWITCH)
    said: list[str] = []
    config = PolicyConfig(model=str(tmp_path), chat_template_kwargs={"enable_thinking": False, "thinking": 1})
    load_policy(config, RolloutsConfig(), said.append)
    assert [line for line in said if line.endswith("does not use thinking")]
