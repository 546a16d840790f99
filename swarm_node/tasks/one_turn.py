"""Tasks of one question and one answer: the answer in a completion, and whether a question is held out of training."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import deque
from functools import lru_cache

from protocol.answer_form import AnswerForm
from swarm_node.config import NodeConfig
from swarm_node.tasks.base import Messages, TaskSource
from swarm_node.types import Task

MAX_ANSWER_CHARS = 32_768
"""Longer answers score 0 unseen: the longest reference of the shipped sets has 200 characters, and this bounds what a
checker must read."""

MAX_TEXT_CHARS = 100_000
"""Rules 1 to 4 look at the end of the text only: more than 25 000 tokens, and hostile text stays cheap."""

_BRACES = re.compile(r"\\boxed\{|\\.|[{}]", re.DOTALL)
_HASHED = re.compile(r"####[ \t]*([-+]?[0-9.][0-9.,/]*)")
EVALUATION_SHARE = 5  # one question in five is for evaluation


FORM_PROMPTS = {
    "tags": "End with only the final answer between <answer> and </answer>, and write nothing after it.",
    "boxed": r"End with only the final answer in \boxed{}, and write nothing after it.",
}
"""What policies are told about the form of an answer."""


class OneTurn(TaskSource):
    """A source whose dialogues are one question and one answer."""

    form: AnswerForm = "any"  # `rewards.answer`: the form in which an answer counts

    def check(self, task: Task, answer: str) -> float:
        """Score of the answer that was found in a completion."""
        raise NotImplementedError

    def reset(self, task: Task) -> Messages:
        return [{"role": "user", "content": task.question}]

    def step(self, task: Task, messages: Messages, answer: str) -> tuple[Messages, float | None, bool]:
        reward = None
        if task.answer is not None:
            found = extract(answer, self.form)
            reward = 0.0 if found is None or len(found) > MAX_ANSWER_CHARS else self.check(task, found)
        return [*messages, {"role": "assistant", "content": answer}], reward, True


@lru_cache(maxsize=32)  # a completion is read by the task set and by its environment, and its like come again
def extract(completion: str, form: AnswerForm = "any") -> str | None:
    r"""The answer to be judged; None if there is none. With `any`, the first rule that applies wins:

        0. drop the reasoning: everything up to the last `</think>`; `<think>` never closed = no answer
        1. the last complete `<answer>…</answer>`
        2. the last complete `\boxed{…}`, braces balanced
        3. the last `#### n`, n a plain number
        4. all that is left

    With `tags`, rule 1 alone applies, and with `boxed` rule 2, and nothing but white space may follow.

    A `\boxed{…}` inside the tags is unwrapped. White space around the answer is dropped; an empty one is no answer.
    Time is linear in the length of the text.
    """
    _, closed, text = completion.rpartition("</think>")
    if not closed and text.lstrip().startswith("<think>"):
        return None
    text = text[-MAX_TEXT_CHARS:].rstrip()
    if form != "any":
        place, end = (_tagged(text), "</answer>") if form == "tags" else (_boxed(text), "}")
        if place is None or text[place.stop :] != end:
            return None
        text = text[place]
    else:
        places = (rule(text) for rule in (_tagged, _boxed, _hashed))
        text = text[next((place for place in places if place is not None), slice(None))]
    text = text.strip()
    if text.startswith(r"\boxed{"):
        place = _boxed(text)
        text = "" if place is None else text[place].strip()
    return text or None


def _tagged(text: str) -> slice | None:
    start = text.rfind("<answer>", 0, max(text.rfind("</answer>"), 0))
    if start < 0:
        return None
    start += len("<answer>")
    return slice(start, text.index("</answer>", start))


def _boxed(text: str) -> slice | None:
    if r"\boxed{" not in text:
        return None
    opened: list[int] = []  # start of the content of each open \boxed{; -1 for a plain brace
    last: tuple[int, int] | None = None
    for match in _BRACES.finditer(text):
        if match[0] == r"\boxed{":
            opened.append(match.end())
        elif match[0] == "{":
            opened.append(-1)
        elif match[0] == "}" and opened:
            start = opened.pop()
            if start >= 0 and (last is None or start > last[0]):
                last = start, match.start()
    return slice(*last) if last else None


def _hashed(text: str) -> slice | None:
    last = deque(_HASHED.finditer(text), maxlen=1)
    return slice(last[0].start(1), last[0].start(1) + len(last[0][1].rstrip(".,/"))) if last else None


def in_form(config: NodeConfig, form: AnswerForm) -> NodeConfig:
    """`config` for answers in that form: the system prompt asks for it, after the user's own prompt if there is one,
    and so does the prompt of models without a chat template; both ask for no other form."""
    rewards, policy = config.rewards.model_copy(update={"answer": form}), config.policy
    system, template = policy.system_prompt, policy.prompt_template
    for asks in FORM_PROMPTS.values():
        system = system.removesuffix(asks).rstrip() if system.endswith(asks) else system
        template = template.replace(f"\n{asks}", "")
    if form != "any":
        own = system.rstrip() if "system_prompt" in policy.model_fields_set else "Solve the problem."
        system = f"{own}\n\n{FORM_PROMPTS[form]}".strip()
        template = template.replace("{question}", f"{{question}}\n{FORM_PROMPTS[form]}")
    prompts = {"system_prompt": system, "prompt_template": template}
    changed = {name: prompt for name, prompt in prompts.items() if prompt != getattr(policy, name)}
    if changed:
        policy = policy.model_copy(update=changed)
    return config.model_copy(update={"policy": policy, "rewards": rewards})


def has_own_prompt(config: NodeConfig, form: AnswerForm) -> bool:
    """Whether a system prompt of the user's own precedes the sentence that asks for `form`, which is not `any`."""
    mine, usual = (in_form(each, form).policy.system_prompt for each in (config, NodeConfig()))
    return mine not in (FORM_PROMPTS[form], usual)


def normalise(text: str) -> str:
    """Unicode NFC, outer white space removed, inner white space collapsed to single spaces."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def is_held_out(question: str) -> bool:
    """Whether `question` is kept for evaluation, so that nothing may train on it.

    Its own content decides, so every machine decides alike: sha256(utf-8(normalise(question))) mod 5 = 0. A split by
    index would leak, because small question spaces repeat one question under many indices.
    """
    return int.from_bytes(_digest(question), "big") % EVALUATION_SHARE == 0


def prompt_digest(question: str) -> bytes:
    """16 bytes by which two nodes tell whether they have the same question."""
    return _digest(question)[:16]


def _digest(question: str) -> bytes:
    return hashlib.sha256(normalise(question).encode()).digest()
