"""Tasks of one question and one answer: the answer in a completion, and whether a question is held out of training."""

from __future__ import annotations

import hashlib

from swarm_node.config import NodeConfig
from swarm_node.tasks.base import Messages, TaskSource
from swarm_node.tasks.judging.places import MAX_ANSWER_CHARS, extract
from swarm_node.tasks.judging.texts import normalise
from swarm_node.types import Task
from swarm_protocol.answer_form import AnswerForm

EVALUATION_SHARE = 5  # one question in five is for evaluation


FORM_PROMPTS = {
    "tags": "End with only the final answer between <answer> and </answer>, and write nothing after it.",
    "boxed": r"End with only the final answer in \boxed{}, and write nothing after it.",
}
"""What policies are told about the form of an answer."""


class OneTurn(TaskSource):
    """A source whose dialogues are one question and one answer."""

    def check(self, task: Task, answer: str) -> float:
        """Score of the answer that was found in a completion."""
        raise NotImplementedError

    def found(self, task: Task, completion: str) -> str | None:
        """The answer in a completion; None if there is none."""
        return extract(completion, self.form)

    def read(self, task: Task, completion: str) -> tuple[str | None, float]:
        """The answer in a completion, None if there is none, and its score. For a task with a reference answer."""
        found = self.found(task, completion)
        return found, 0.0 if found is None or len(found) > MAX_ANSWER_CHARS else self.check(task, found)

    def reset(self, task: Task) -> Messages:
        return [{"role": "user", "content": task.question}]

    def step(self, task: Task, messages: Messages, answer: str) -> tuple[Messages, float | None, bool]:
        reward = None if task.answer is None else self.read(task, answer)[1]
        return [*messages, {"role": "assistant", "content": answer}], reward, True


def in_form(config: NodeConfig, form: AnswerForm) -> NodeConfig:
    """`config` for answers in that form: the system prompt asks for it, after the user's own prompt if there is one,
    and so does the prompt of models without a chat template; both ask for no other form."""
    rewards, policy = config.rewards.model_copy(update={"answer": form}), config.policy
    system, template = policy.system_prompt, policy.prompt_template
    for asks in FORM_PROMPTS.values():
        system = system.removesuffix(asks).rstrip() if system.endswith(asks) else system
        template = template.replace(f"\n{asks}", "")
    if form != "any":
        system = f"{system.rstrip()}\n\n{FORM_PROMPTS[form]}".strip()
        template = template.replace("{question}", f"{{question}}\n{FORM_PROMPTS[form]}")
    prompts = {"system_prompt": system, "prompt_template": template}
    changed = {name: prompt for name, prompt in prompts.items() if prompt != getattr(policy, name)}
    if changed:
        policy = policy.model_copy(update=changed)
    return config.model_copy(update={"policy": policy, "rewards": rewards})


def has_own_prompt(config: NodeConfig, form: AnswerForm) -> bool:
    """Whether a system prompt of the user's own precedes the sentence that asks for `form`, which is not `any`."""
    return in_form(config, form).policy.system_prompt != FORM_PROMPTS[form]


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
