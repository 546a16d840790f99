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
from swarm_node.policy.chat_template import frame_around
from swarm_node.policy.tokenizing import guarded

PROMPT_FORMAT = "swarm-node.json"
FORMAT = 1
MAX_BYTES = 1 << 20  # largest such file: prompts and names take kilobytes
PROMPTS = ("system_prompt", "prompt_template")
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
    "[{'role': 'user', 'content': system + '\\n\\n' + messages[0]['content']}] + messages[1:] %}{% endif %}"
)
"""Prefix of a chat template that refuses system messages: the system prompt goes before the question."""


@guarded("its own files")
def write_prompt_format(
    out: Path,
    tokenizer: PreTrainedTokenizerBase,
    config: NodeConfig,
    tasks: Sequence[str | TaskConfig],
    adapter: bool = False,
) -> None:
    """Write the prompt format of a run with `config` and `tasks` into `out`, a model or adapter in Hugging Face layout.

    Question files and reward functions are paths on one machine, so they are left out.
    """
    prompt = config.policy.system_prompt
    if prompt and tokenizer.chat_template:
        shown = copy.copy(tokenizer)
        shown.chat_template = with_system(tokenizer, prompt)
        shown.save_pretrained(out)
    _sampling(out, tokenizer, config.rollouts).save_pretrained(out)
    public = [task for task in tasks if not _is_file(task)]
    document = {
        "format": FORMAT,
        "policy": config.policy.model_dump(include=set(PROMPTS)),
        "rollouts": config.rollouts.model_dump(include=set(SAMPLING)),
        "answer": config.rewards.answer,
        "tasks": [task if isinstance(task, str) else task.model_dump(mode="json") for task in public],
        "question_files": len(tasks) - len(public),
        "eval": config.eval.model_dump(include=set(EVALUATION)),
    }
    (out / PROMPT_FORMAT).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    card = out / "README.md"  # of an adapter, PEFT has begun one
    library = "peft" if adapter else "transformers"
    front = f"---\nlibrary_name: {library}\ntags:\n- swarm-node\n- grpo\n---\n\n# {out.name}\n"
    begun = card.read_text(encoding="utf-8") if card.is_file() else front
    card.write_text(f"{begun.rstrip()}\n\n{_words(config, tokenizer)}", encoding="utf-8")


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
            policy=PolicyConfig(**{key: document["policy"][key] for key in PROMPTS}),
            rollouts=RolloutsConfig(**{key: document["rollouts"][key] for key in SAMPLING}),
            eval=EvalConfig(**{key: document["eval"][key] for key in EVALUATION}),
            rewards=RewardsConfig(answer=document.get("answer", "any")),
            tasks=document["tasks"],
        )
        if any(map(_is_file, config.tasks)):
            raise ValueError("it names question files")
        return config, int(document["question_files"])
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        raise UserError(f"cannot use {file}: {' '.join(str(error).split())[:200]}") from error


def with_system(tokenizer: PreTrainedTokenizerBase, prompt: str) -> Any:
    """The chat template of `tokenizer` (one, or several by name), with `prompt` for conversations without a system
    message."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        return {name: _before(each, tokenizer, prompt) for name, each in template.items()}
    return _before(template, tokenizer, prompt)


def _before(template: str, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    special = json.dumps(tokenizer.special_tokens_map, default=str)
    text = _jinja(prompt)
    try:  # in a process with limits, as a template may be a stranger's
        frame_around(WITH_SYSTEM_ROLE.replace("SYSTEM", text) + template, "", special, "the export")
    except UserError:  # it refuses system messages
        return WITHOUT_SYSTEM_ROLE.replace("SYSTEM", text) + template
    return WITH_SYSTEM_ROLE.replace("SYSTEM", text) + template


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


def _is_left_out(tokenizer: PreTrainedTokenizerBase, prompt: str) -> bool:
    """Whether the chat template silently drops system prompts, so that two of them give one text."""
    special = json.dumps(tokenizer.special_tokens_map, default=str)
    template = tokenizer.chat_template
    for each in template.values() if isinstance(template, dict) else [template]:
        try:
            one, other = (frame_around(each, text, special, "the export").pieces for text in (prompt, f"{prompt} x"))
        except UserError:  # it refuses system messages, so the prompt is put before the question
            return False
        if one != other:
            return False
    return True


def _words(config: NodeConfig, tokenizer: PreTrainedTokenizerBase) -> str:
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
    elif _is_left_out(tokenizer, text):
        how = "Its chat template leaves system prompts out: it was trained on the questions alone."
    else:
        how = (
            f"It was trained under this system prompt, which the chat template adds to a conversation without one:\n\n"
            f"{fence}\n{text}\n{fence}"
        )
    return (
        f"## How to ask it\n\n{how}\n\n"
        f"Answers were sampled at temperature {rollouts.temperature:g} and top_p {rollouts.top_p:g}, with up to "
        f"{rollouts.max_new_tokens} tokens. `generation_config.json` says so, too; `{PROMPT_FORMAT}` is for "
        "`swarm-node eval DIR`, which asks in the same way.\n"
    )
