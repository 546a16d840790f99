"""The forms in which a manifest may ask for answers, and the kinds of answers that it may name."""

from __future__ import annotations

from typing import Literal

AnswerForm = Literal["any", "tags", "boxed"]
"""`any`: an answer counts as it is found. `tags`: only at the end of the text, as `<answer>…</answer>`. `boxed`: only
there, as `\\boxed{…}`."""
WRITTEN: dict[AnswerForm, str] = {"any": "{}", "tags": "<answer>{}</answer>", "boxed": r"\boxed{{{}}}"}
"""An answer in each form; `str.format` takes the answer."""
AnswerKind = Literal["text", "number", "maths", "choice", "yes-no"]
"""What an answer is, and so how it is compared: `text` = the same text or the same plain number; `number` = the number
that it ends with; `maths` = an expression of the same value; `choice` = a letter, or the text beside it; `yes-no`."""
