r"""Find the answer in a completion. First rule that applies wins:

    0. drop the reasoning: everything up to the last `</think>`; `<think>` never closed = no answer
    1. the last complete `<answer>…</answer>`
    2. the last complete `\boxed{…}`, braces balanced
    3. the last `#### n`, n a plain number
    4. all that is left

An answer that is a `\boxed{…}` inside the tags is unwrapped; white space around it is dropped; an empty one
is no answer. Time is linear in the length of the text.
"""

from __future__ import annotations

import re

MAX_TEXT_CHARS = 100_000
"""Rules 1 to 4 look at the end of the text only: more than 25 000 tokens, and hostile text stays cheap."""

_BRACES = re.compile(r"\\boxed\{|\\.|[{}]", re.DOTALL)
_HASHED = re.compile(r"####[ \t]*([-+]?[0-9.][0-9.,/]*)")


def extract(completion: str) -> str | None:
    """The answer to be judged; `None` if there is none."""
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
