"""Tasks of one question and one answer: the answer in a completion, and whether a question is held out of training."""

from __future__ import annotations

import hashlib
import re
import unicodedata

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


class OneTurn(TaskSource):
    """A source whose dialogues are one question and one answer."""

    def check(self, task: Task, answer: str) -> float:
        """Score of the answer that was found in a completion."""
        raise NotImplementedError

    def reset(self, task: Task) -> Messages:
        return [{"role": "user", "content": task.question}]

    def step(self, task: Task, messages: Messages, answer: str) -> tuple[Messages, float | None, bool]:
        reward = None
        if task.answer is not None:
            found = extract(answer)
            reward = 0.0 if found is None or len(found) > MAX_ANSWER_CHARS else self.check(task, found)
        return [*messages, {"role": "assistant", "content": answer}], reward, True


def extract(completion: str) -> str | None:
    r"""The answer to be judged; None if there is none. The first rule that applies wins:

        0. drop the reasoning: everything up to the last `</think>`; `<think>` never closed = no answer
        1. the last complete `<answer>…</answer>`
        2. the last complete `\boxed{…}`, braces balanced
        3. the last `#### n`, n a plain number
        4. all that is left

    A `\boxed{…}` inside the tags is unwrapped. White space around the answer is dropped; an empty one is no answer.
    Time is linear in the length of the text.
    """
    _, closed, text = completion.rpartition("</think>")
    if not closed and text.lstrip().startswith("<think>"):
        return None
    text = text[-MAX_TEXT_CHARS:]
    for rule in (_tagged, _boxed, _hashed):
        found = rule(text)
        if found is not None:
            text = found
            break
    text = text.strip()
    if text.startswith(r"\boxed{"):
        text = (_boxed(text) or "").strip()
    return text or None


def _tagged(text: str) -> str | None:
    start = text.rfind("<answer>", 0, max(text.rfind("</answer>"), 0))
    if start < 0:
        return None
    start += len("<answer>")
    return text[start : text.index("</answer>", start)]


def _boxed(text: str) -> str | None:
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
    return text[slice(*last)] if last else None


def _hashed(text: str) -> str | None:
    numbers = _HASHED.findall(text)
    return numbers[-1].rstrip(".,/") if numbers else None


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
