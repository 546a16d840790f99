"""A chat template's frame around questions; a stranger's template runs in a child process with limits.

    template --stdin--> python -I, chat_template_child.py (CPU time, memory, wall time) --stdout--> Frame

The starter's template is this package's own, so it is rendered in this process, which saves the child's 0.2 s.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from swarm_node.config import PolicyConfig
from swarm_node.errors import UserError
from swarm_node.install import isolated
from swarm_node.policy import chat_template_child
from swarm_node.policy.chat_template_child import Frame, FrameError, frame_of
from swarm_node.policy.starter import CHAT_TEMPLATE
from swarm_node.policy.tokenizing import guarded
from swarm_node.storage.model_names import model_name

CPU_S = 5  # a frame takes 0.1 s, Python's start included
WALL_S = 60.0  # longest time on a machine that is busy with other things


@lru_cache(maxsize=16)
def frame_around(template: str, system: str, special: str, model: str, arguments: str = "{}") -> Frame:
    """The frame of a chat template. UserError if the template fails, takes too long, or has no frame.

    special    the tokenizer's special tokens by name, as JSON
    model      whose template it is, for the message
    arguments  the user's arguments of the template (`policy.chat_template_kwargs`), as JSON
    """
    if template == CHAT_TEMPLATE:
        try:
            return frame_of(template, system, json.loads(special))
        except FrameError as error:
            raise UserError(f"the chat template of {model} fails: {error}") from error
    given = {"special": json.loads(special), "arguments": json.loads(arguments)}
    asked = json.dumps({"template": template, "system": system, **given})
    try:
        done = subprocess.run(child(), input=asked.encode(), capture_output=True, timeout=WALL_S)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"the chat template of {model} takes longer than {WALL_S:.0f} s: it is refused") from error
    if done.returncode > 0:  # not the template's fault: its errors come on standard output
        said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise UserError(f"the chat template of {model} cannot be rendered: {said[:200]}")
    if done.returncode < 0:
        raise UserError(f"the chat template of {model} takes more than {CPU_S} s or 1 GiB: it is refused")
    told = json.loads(done.stdout)
    if "error" in told:
        raise UserError(f"the chat template of {model} fails: {told['error']}")
    return Frame(*told["frame"])


@guarded("its chat template")
def tokenizer_frame(tokenizer: PreTrainedTokenizerBase, config: PolicyConfig) -> Frame:
    """The frame of a tokenizer's chat template, with the system prompt and the arguments of `config`. UserError if it
    is refused, or if there is none of the name in `config`."""
    template = named_template(tokenizer.chat_template, config)
    special = json.dumps(tokenizer.special_tokens_map, default=str)
    return frame_around(template, config.system_prompt, special, config.model, json.dumps(config.chat_template_kwargs))


def named_template(templates: str | Mapping[str, str] | None, config: PolicyConfig) -> str:
    """The template that `policy.chat_template` names: of several, that of this name, by default `default`. UserError if
    there is none."""
    name, set_it = config.chat_template or "default", "--set policy.chat_template=NAME"
    model = model_name(config.model)
    if not templates:
        raise UserError(
            f"{model} has no chat template: leave out policy.chat_template and policy.chat_template_kwargs; "
            "policy.prompt_template is the text around its questions"
        )
    if not isinstance(templates, Mapping):
        if name != "default":
            raise UserError(f"{model} has one chat template, without a name: leave out policy.chat_template")
        templates = {name: templates}
    if name not in templates:
        which = f"none is called {name!r}" if config.chat_template else "none is the default"
        names = ", ".join(sorted(map(repr, templates)))
        raise UserError(f"the chat templates of {model} are {names}, and {which}: name one with {set_it}")
    found = templates[name]
    if not isinstance(found, str):  # a stranger's tokenizer_config.json may have any value
        raise UserError(f"the chat template of {model} is no text; take another model")
    return found


def unused_arguments(templates: str | Mapping[str, str], config: PolicyConfig) -> list[str]:
    """Those of the user's arguments that the template does not name."""
    template = named_template(templates, config)
    return [name for name in config.chat_template_kwargs if re.search(rf"\b{name}\b", template) is None]


def child(*options: str) -> list[str]:
    """The command that renders a template; `options` are Python's."""
    return isolated(chat_template_child.__file__, str(CPU_S), options=options)
