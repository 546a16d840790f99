"""The forms in which a manifest may ask for answers."""

from __future__ import annotations

from typing import Literal

AnswerForm = Literal["any", "tags", "boxed"]
"""`any` = as it is found | last in the text, as `<answer>…</answer>` | last, as `\\boxed{…}`."""
WRITTEN: dict[AnswerForm, str] = {"any": "{}", "tags": "<answer>{}</answer>", "boxed": r"\boxed{{{}}}"}
"""An answer in each form; `str.format` takes the answer."""
