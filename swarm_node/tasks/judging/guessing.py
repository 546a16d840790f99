"""What kind of answers a file has, where nobody named it: guessed from its references, and from its questions where
they list choices."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from protocol.answer_form import AnswerKind
from swarm_node.tasks.judging import choices, maths, numbers
from swarm_node.tasks.judging.places import reference_text

MAX_LETTER = "J"  # the last letter that a choice has: sets with ten choices are usual
MAX_NUMBERED = 10  # choices that are numbered

_LETTER = re.compile(rf"[(\[]?[A-{MAX_LETTER}a-{MAX_LETTER.lower()}][)\].:]?")
_LETTER_AND_TEXT = re.compile(rf"[(\[]?[A-{MAX_LETTER}][)\].:]\s+\S.*", re.DOTALL)
_DIGIT = re.compile(r"[(\[]?(\d{1,2})[)\].:]?")
_NUMBERED = re.compile(r"(?:^|[\s(\[])(\d{1,2})[)\].:]\s*(?=\S)")
_NUMBER = re.compile(
    r"\s*[-+]?\s*[$€£]?\s*[-+]?(?:\d{1,3}(?:,\d{3})+|\d+|(?=\.\d))(?:\.\d+)?(?:[eE][-+]?\d{1,3})?(?:\s*/\s*\d+)?\s*%?\.?\s*"
)
_CODE = re.compile(r"\s*[-+]?0\d")  # 007, 0151: its zeros count
_LATEX = re.compile(r"\\[a-zA-Z]|\^")
_MATHS = re.compile(r"\\[a-zA-Z]+|[\^_{}=]|√|π")


def guess_kind(rows: Iterable[tuple[str, Sequence[str]]]) -> AnswerKind:
    """The kind of all answers in `rows`: (question, accepted answers) of each. What fits no kind is text."""
    listed = [(question, reference) for question, accepted in rows for reference in accepted]
    said = [reference_text(reference) or "" for _, reference in listed]
    if not said:
        return "text"
    if all(choices.yes_or_no(each) is not None for each in said):
        return "yes-no"
    if all(_LETTER.fullmatch(each) or _LETTER_AND_TEXT.fullmatch(each) for each in map(choices.plain_words, said)):
        return "choice"
    if all(_is_numbered(question, each) for (question, _), each in zip(listed, said, strict=True)):
        return "choice"
    if all(_is_number(each) for each in said):
        return "number"
    if any(_MATHS.search(each) for each in said) and all(map(maths.is_readable, said)):
        return "maths"
    return "text"


def _is_number(said: str) -> bool:
    text = numbers.plain_digits(said)
    if _LATEX.search(said):
        return False
    return bool(_NUMBER.fullmatch(text)) and not _CODE.match(text) and numbers.number_of(said) is not None


def _is_numbered(question: str, said: str) -> bool:
    """Whether the reference is the number of one of at least two choices that the question lists."""
    digit = _DIGIT.fullmatch(said.strip())
    if digit is None or not 0 <= int(digit[1]) <= MAX_NUMBERED:
        return False
    listed = [int(number) for number in _NUMBERED.findall(question)]
    first = next((i for i, number in enumerate(listed) if number in (0, 1)), None)
    if first is None:
        return False
    run = [listed[first]]
    for number in listed[first + 1 :]:
        if number == run[-1] + 1:
            run.append(number)
    return len(run) >= 2 and int(digit[1]) in run
