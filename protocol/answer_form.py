"""The forms in which a manifest may ask for answers."""

from __future__ import annotations

from typing import Literal

AnswerForm = Literal["any", "tags", "boxed"]
"""`any`: an answer counts as it is found. `tags`: only at the end of the text, as `<answer>…</answer>`. `boxed`: only
there, as `\\boxed{…}`."""
WRITTEN: dict[AnswerForm, str] = {"any": "{}", "tags": "<answer>{}</answer>", "boxed": r"\boxed{{{}}}"}
"""An answer in each form; `str.format` takes the answer."""
