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
TURNS = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "an end without a name": "{% for m in messages %}{% if m.role == 'user' %}Q: {{ m.content | trim }}\nA: "
    "{% elif m.role == 'assistant' %}{{ m.content }}\n{% endif %}{% endfor %}",
    "reasoning that is begun": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n<think>\n",
}
ONE_TURN = {
    "answers left out": "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}!{% endif %}{% endfor %}",
    "answers as questions": "{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}",
    "answers refused": "{% if messages | length > 2 %}{{ raise_exception('1') }}{% endif %}{{ messages[-1].content }}",
    "answers counted": "{% for m in messages %}{{ m.content }}{% if m.role == 'user' %}<a>{% else %}"
    "{{ m.content | length }}</s>{% endif %}{% endfor %}",
    "one blank more": "{% for m in messages %}{% if loop.first or m.role == 'assistant' %}{{ m.content }}{% else %}"
    "{{ m.content | trim }}{% endif %}{{ '</s>' if m.role == 'assistant' else '<a>' }}{% endfor %}",
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


@pytest.mark.parametrize("name", TURNS)
def test_what_follows_an_answer_is_as_transformers_renders_it(name: str, model: Path) -> None:
    tokenizer = load_tokenizer(PolicyConfig(model=str(model)))
    tokenizer.chat_template = TURNS[name]
    special = json.dumps(tokenizer.special_tokens_map)
    frame = frame_around(TURNS[name], "", special, "m")
    for question, answer, text in (("What?", "7", "More."), ("a\nb", "no idea", "  less \n")):
        dialogue = [
            {"role": role, "content": each}
            for role, each in zip(("user", "assistant", "user"), (question, answer, text), strict=True)
        ]
        rendered = tokenizer.apply_chat_template(dialogue, tokenize=False, add_generation_prompt=True)
        assert rendered.endswith(answer + frame.after_answer(text))
        opening = frame.around(question)
        assert rendered.startswith(opening) == (name != "reasoning that is begun")


@pytest.mark.parametrize("name", ONE_TURN)
def test_templates_that_cannot_be_continued_take_one_turn(name: str, model: Path) -> None:
    assert frame_around(ONE_TURN[name], "", "{}", "m").between == []
    policy = load_policy(PolicyConfig(model=str(model)), RolloutsConfig())
    policy.tokenizer.chat_template = ONE_TURN[name]
    with pytest.raises(UserError, match="one turn only"):
        policy.after_answer("More.", True)


def test_the_end_of_an_answer_is_said_once() -> None:
    """An answer that ended by itself has its end-of-sequence token already; one that was cut off gets it."""
    policy = load_policy(PolicyConfig(), RolloutsConfig())
    ended, cut = policy.after_answer("No, more.", True), policy.after_answer("No, more.", False)
    assert cut == [policy.eos_id, *ended] and policy.text_of_prompt(ended) == "No, more.<sep>"
