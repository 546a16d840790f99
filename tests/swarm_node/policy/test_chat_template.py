"""Chat templates: what they put around a question is theirs, time and memory are not."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from swarm_node.config import PolicyConfig, RolloutsConfig
from swarm_node.errors import UserError
from swarm_node.policy import chat_template
from swarm_node.policy.chat_template import child, frame_around, named_template
from swarm_node.policy.loading import load_policy, load_tokenizer
from tests.support.tiny_models import save

HONEST = {
    "chatml": "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "trimmed": "{% for message in messages %}{% set content = '<|' + message['role'] + '|>\n\n' + "
    "message['content'] | trim + '<|end|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
    "{% endif %}{{ content }}{% endfor %}",
    "no system role": "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}{% for message in messages %}[INST] {{ message.content | trim }} [/INST]{% endfor %}",
    "loops, namespaces and marks": """
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and not message.content.startswith('<tool_response>') %}
        {%- set ns.last = index %}{%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}{% generation %}{{ message.content }}{% endgeneration %}
    {%- else %}{{- message | tojson and message.role + ': ' + message.content + '\\n' }}{%- endif %}
{%- endfor %}""",
    "twice": "{{ messages[-1].content }} Again: {{ messages[-1].content }}",
}
QUESTIONS = ["one plus two", "  one\n two \n\n", "{{ 7 * 7 }} {% endfor %} <|im_end|> </think>"]
REFUSED = {
    "a text of 3 GB": ("{{ 'x' * 3000000000 }}", "memory"),
    "a filter's 3 GB": ("{{ messages[0].content | center(3000000000) }}", "memory"),
    "doubling": (
        "{% set ns = namespace(x='x') %}{% for a in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "memory|1 s",  # a busy machine takes the second before it takes the memory
    ),
    "nested loops": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "1 s"),
    "a long text": ("{{ messages[0].content }}{{ 'x' * 300000 }}", "characters"),
    "recursion": ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "recursion"),
    "no template": ("{% for %}", "fails"),
    "no question": ("hello", "leaves the question out"),
    "loops for some questions only": (
        "{{ messages[0].content }}{% if 'two' in messages[0].content %}{% for a in range(99999) %}"
        "{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}",
        "1 s",
    ),
    "half a character": ("{{ messages[0].content }}{{ '\\ud800' }}", "half a character"),
    "a question changed": ("{{ messages[0].content | replace('two', '2') }}", "does more to a question"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("model"))


def rendered(tokenizer: PreTrainedTokenizerBase, system: str, question: str) -> str:
    """As transformers does."""
    user = {"role": "user", "content": question}
    try:
        messages = [{"role": "system", "content": system}, user] if system else [user]
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except TemplateError:  # it takes no system message
        user = {"role": "user", "content": f"{system}\n\n{question}"}
        return str(tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True))


@pytest.mark.parametrize("name", HONEST)
def test_questions_look_as_transformers_renders_them(name: str, model: Path) -> None:
    tokenizer = load_tokenizer(PolicyConfig(model=str(model)))
    tokenizer.chat_template = HONEST[name]
    special = json.dumps(tokenizer.special_tokens_map, default=str)
    for system in ("", "Be brief. "):
        frame = frame_around(HONEST[name], system, special, name)
        for question in QUESTIONS:
            assert frame.around(question) == rendered(tokenizer, system, question)


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_that_takes_too_much_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "CPU_S", 1)
    template, said = REFUSED[name]
    with pytest.raises(UserError, match=said) as refused:
        frame_around(template, "", "{}", "their/model")
    assert "chat template of their/model" in str(refused.value) and "\n" not in str(refused.value)


def test_a_model_with_a_bad_template_is_refused(model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    template = tmp_path / "chat_template.jinja"
    template.unlink(missing_ok=True)
    template.write_text("{{ 'x' * 3000000000 }}")
    with pytest.raises(UserError, match="chat template"):
        load_policy(PolicyConfig(model=str(tmp_path)), RolloutsConfig(max_new_tokens=8), lambda sentence: None)


@pytest.mark.parametrize("templates", [5, {"a": 1}, {"default": ["x"]}, {5: "x", "a": "y"}], ids=str)
def test_a_template_that_is_no_text_is_refused(templates: Any) -> None:
    with pytest.raises(UserError, match="chat template"):
        named_template(templates, PolicyConfig(model="their/model"))


def test_jinja_may_be_installed_anywhere() -> None:
    """As in a user's own site, or on PYTHONPATH, which an isolated Python leaves out."""
    asked = json.dumps({"template": "<{{ messages[0].content }}>", "system": "", "special": {}})
    done = subprocess.run(child("-S"), input=asked.encode(), capture_output=True, check=True)
    assert json.loads(done.stdout)["frame"][0] == ["<", ">"]
