"""The prompt format of a trained model, in files beside its weights.

    chat_template.jinja      puts the system prompt of the training first where a conversation has none
    generation_config.json   the sampling of the training, which transformers and vLLM use
    swarm-node.json          prompt, sampling and tasks, for `swarm-node eval DIR`
    README.md                the same in words

Weights that were trained under a system prompt answer worse without it, and Hugging Face layout has no other place for
that prompt.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from transformers import GenerationConfig, PreTrainedTokenizerBase

from swarm_node.config import NodeConfig, PolicyConfig, RewardsConfig, RolloutsConfig, TaskConfig
from swarm_node.config.training import EvalConfig, is_question_file
from swarm_node.errors import UserError
from swarm_node.policy.chat_template import frame_around, named_template, tokenizer_frame
from swarm_node.policy.chat_template_child import Frame
from swarm_node.policy.model_card import About, front_matter, repeated, sections
from swarm_node.policy.tokenizing import guarded
from swarm_node.say import in_short
from swarm_protocol.answer_form import AnswerKind

PROMPT_FORMAT = "swarm-node.json"
FORMAT = 1
MAX_BYTES = 1 << 20  # largest such file: prompts and names take kilobytes
PROMPTS = ("system_prompt", "prompt_template")
ARGUMENTS = "chat_template_kwargs"  # missing in exports of earlier versions
SAMPLING = ("max_new_tokens", "max_prompt_tokens", "temperature", "top_p")
EVALUATION = ("questions", "samples")
WITH_SYSTEM_ROLE = (
    "{% if not messages or messages[0]['role'] != 'system' %}"
    "{% set messages = [{'role': 'system', 'content': SYSTEM}] + messages %}{% endif %}"
)
"""Prefix of a chat template that takes a system message."""
WITHOUT_SYSTEM_ROLE = (
    "{% set system = SYSTEM %}{% if messages and messages[0]['role'] == 'system' %}"
    "{% set system = messages[0]['content'] %}{% set messages = messages[1:] %}{% endif %}"
    "{% if messages %}{% set messages = "
    "[{'role': 'user', 'content': system + LINE + messages[0]['content']}] + messages[1:] %}{% endif %}"
)
"""Prefix of a chat template that refuses system messages: the system prompt goes before the question."""


@guarded("its own files")
def write_prompt_format(
    out: Path,
    tokenizer: PreTrainedTokenizerBase,
    config: NodeConfig,
    tasks: Sequence[str | TaskConfig],
    adapter: bool = False,
    about: About | None = None,
    kind: AnswerKind | None = None,
) -> None:
    """Write the prompt format of a run with `config` and `tasks` into `out`, a model or adapter in Hugging Face layout.
    `about`: what the card tells of the training. `kind`: that of the answers in all question files; None = not known.

    Question files and reward functions are paths on one machine, so they are left out.
    """
    changes = config.policy.system_prompt or config.policy.chat_template_kwargs or config.policy.chat_template
    if tokenizer.chat_template and changes:
        shown = copy.copy(tokenizer)
        shown.chat_template = template_of_training(tokenizer, config.policy)
        shown.save_pretrained(out)
    _sampling(out, tokenizer, config.rollouts).save_pretrained(out)
    public = [task for task in tasks if not _is_file(task)]
    document = {
        "format": FORMAT,
        "policy": config.policy.model_dump(include={*PROMPTS, ARGUMENTS, "dtype"}),
        "rollouts": config.rollouts.model_dump(include=set(SAMPLING)),
        "answer": config.rewards.answer,
        "kind": kind or config.rewards.kind,
        "tasks": [task if isinstance(task, str) else task.model_dump(mode="json") for task in public],
        "question_files": len(tasks) - len(public),
        "eval": config.eval.model_dump(include=set(EVALUATION)),
    }
    (out / PROMPT_FORMAT).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    about = about or About()
    parts = [
        front_matter(about, adapter),
        f"# {out.name}",
        sections(about, adapter),
        _words(config, tokenizer, adapter),
    ]
    (out / "README.md").write_text("\n\n".join(parts) + repeated(about), encoding="utf-8")


def read_prompt_format(folder: Path) -> tuple[NodeConfig, int] | None:
    """Prompt format of the export in `folder`, and the number of question files of its run; None if it has none.

    Only texts, numbers and names of tasks are taken, nothing that runs. UserError if this version cannot read the file.
    """
    file = folder / PROMPT_FORMAT
    if not file.is_file():
        return None
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ValueError("it is too large")
        document: dict[str, Any] = json.loads(file.read_bytes())
        if document["format"] != FORMAT:
            raise ValueError(f"it has format {document['format']}, this version reads format {FORMAT}")
        config = NodeConfig(
            policy=PolicyConfig(**{key: document["policy"][key] for key in PROMPTS}, **_more(document["policy"])),
            rollouts=RolloutsConfig(**{key: document["rollouts"][key] for key in SAMPLING}),
            eval=EvalConfig(**{key: document["eval"][key] for key in EVALUATION}),
            rewards=RewardsConfig(answer=document.get("answer", "any"), kind=document.get("kind")),
            tasks=document["tasks"],
        )
        if any(map(_is_file, config.tasks)):
            raise ValueError("it names question files")
        return config, int(document["question_files"])
    except (OSError, ArithmeticError, ValueError, KeyError, TypeError, RecursionError, ValidationError) as error:
        raise UserError(f"cannot use {file}: {in_short(error)}") from error


def _more(policy: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the chat template in an export, if it has any, and the dtype in which the run computed, if the
    version that wrote it says so."""
    return {key: policy[key] for key in (ARGUMENTS, "dtype") if policy.get(key)}


def template_of_training(tokenizer: PreTrainedTokenizerBase, policy: PolicyConfig) -> str:
    """The chat template that `policy` names, with its arguments and its system prompt for those who give none."""
    template = named_template(tokenizer.chat_template, policy)
    if policy.system_prompt:
        template = _before(template, tokenizer, policy)
    defaults = (
        f"{{% if {name} is not defined %}}{{% set {name} = {_literal(value)} %}}{{% endif %}}"
        for name, value in policy.chat_template_kwargs.items()
    )
    return "".join([*defaults, template])


def _before(template: str, tokenizer: PreTrainedTokenizerBase, policy: PolicyConfig) -> str:
    """`template` after the part that puts the system prompt first."""
    special = json.dumps(tokenizer.special_tokens_map, default=str)
    arguments = json.dumps(policy.chat_template_kwargs)

    def frame(of: str) -> Frame | None:  # in a process with limits, as a template may be a stranger's
        try:
            return frame_around(of, "", special, "the export", arguments)
        except UserError:
            return None

    def content(text: str) -> str:
        literal = _jinja(text)
        return f"[{{'type': 'text', 'text': {literal}}}]" if parts else literal

    plain = frame(template)
    parts = plain is not None and plain.parts
    with_role = WITH_SYSTEM_ROLE.replace("SYSTEM", content(policy.system_prompt)) + template
    if frame(with_role) is not None:
        return with_role
    apart = WITHOUT_SYSTEM_ROLE.replace("LINE", content("\n\n"))  # before a prompt that may have this word
    return apart.replace("SYSTEM", content(policy.system_prompt)) + template


def _literal(value: object) -> str:
    """A value of a configuration as a literal of Jinja."""
    if isinstance(value, str):
        return _jinja(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_jinja(key)}: {_literal(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return {"None": "none", "True": "true", "False": "false"}.get(repr(value), repr(value))


def _jinja(text: str) -> str:
    """`text` as a string literal of Jinja, which undoes Python's escapes."""
    return '"' + text.encode("unicode_escape").decode("ascii").replace('"', '\\"') + '"'


def _sampling(out: Path, tokenizer: PreTrainedTokenizerBase, rollouts: RolloutsConfig) -> GenerationConfig:
    """The training's sampling; only the special tokens of the base model's own settings stay."""
    there = (out / "generation_config.json").is_file()
    before = GenerationConfig.from_pretrained(out) if there else GenerationConfig()
    eos = before.eos_token_id if before.eos_token_id is not None else tokenizer.eos_token_id
    pad = before.pad_token_id if before.pad_token_id is not None else tokenizer.pad_token_id
    return GenerationConfig(
        bos_token_id=before.bos_token_id,
        eos_token_id=eos,
        pad_token_id=pad,
        do_sample=True,
        temperature=rollouts.temperature,
        top_p=rollouts.top_p,
        top_k=0,
        max_new_tokens=rollouts.max_new_tokens,
    )


def _is_file(task: str | TaskConfig) -> bool:
    return is_question_file(task) if isinstance(task, str) else task.file is not None


def _is_left_out(tokenizer: PreTrainedTokenizerBase, policy: PolicyConfig) -> bool:
    """Whether the chat template silently drops system prompts, so that two of them give one text."""
    other = policy.model_copy(update={"system_prompt": f"{policy.system_prompt} x"})
    try:
        one, another = (tokenizer_frame(tokenizer, each).pieces for each in (policy, other))
    except UserError:  # it refuses system messages, so the prompt is put before the question
        return False
    return one == another


def _words(config: NodeConfig, tokenizer: PreTrainedTokenizerBase, adapter: bool) -> str:
    policy, rollouts = config.policy, config.rollouts
    has_template = bool(tokenizer.chat_template)
    text = policy.system_prompt if has_template else policy.prompt_template
    fence = "````" if "```" in text else "```"
    if not has_template:
        how = (
            f"The tokenizer has no chat template. The prompt was, with the question in it:\n\n{fence}\n{text}\n{fence}"
        )
    elif not text:
        how = "It was trained without a system prompt of its own."
    elif _is_left_out(tokenizer, policy):
        how = "Its chat template leaves system prompts out: it was trained on the questions alone."
    else:
        how = (
            f"It was trained under this system prompt, which the chat template adds to a conversation without one:\n\n"
            f"{fence}\n{text}\n{fence}"
        )
    if has_template and policy.chat_template_kwargs:
        given = ", ".join(f"{name} = {json.dumps(value)}" for name, value in policy.chat_template_kwargs.items())
        how += f"\n\nThe chat template was given {given}, which it takes here where it is not told otherwise."
    read = "give it to `generate`, which reads that of the base only" if adapter else "`generate` reads it"
    return (
        f"## How to ask it\n\n{how}\n\n"
        f"Answers were sampled at temperature {rollouts.temperature:g} and top_p {rollouts.top_p:g}, with up to "
        f"{rollouts.max_new_tokens} tokens. `generation_config.json` says so, too ({read}); `{PROMPT_FORMAT}` is for "
        f"`swarm-node eval DIR`, which asks in the same way.\n\n```python\n{_code(has_template, adapter)}\n```\n"
    )


def _code(has_template: bool, adapter: bool) -> str:
    """The lines of Python that ask the model in the directory DIR."""
    more, given = (", GenerationConfig", ", generation_config=settings") if adapter else ("", "")
    asked = (
        'messages = [{"role": "user", "content": QUESTION}]\n'
        "inputs = tokenizer.apply_chat_template(\n"
        '    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"\n)'
        if has_template
        else 'inputs = tokenizer(PROMPT, return_tensors="pt")'
    )
    lines = [
        f"from transformers import AutoModelForCausalLM, AutoTokenizer{more}\n",
        *(["# with the package peft; the base is the one that adapter_config.json names"] if adapter else []),
        'model = AutoModelForCausalLM.from_pretrained("DIR")',
        'tokenizer = AutoTokenizer.from_pretrained("DIR")',
        *(['settings = GenerationConfig.from_pretrained("DIR")'] if adapter else []),
        asked,
        f"answer = model.generate(**inputs{given})",
        'print(tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
    ]
    return "\n".join(lines)
