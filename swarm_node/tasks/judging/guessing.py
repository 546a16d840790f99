"""What kind of answers a file has, where nobody named it: guessed from its references, and from its questions where
they list choices."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, starmap

from swarm_node.tasks.judging import choices, maths, numbers
from swarm_node.tasks.judging.places import reference_text
from swarm_protocol.answer_form import AnswerKind

MAX_LETTER = "J"  # the last letter that a choice has: sets with ten choices are usual
MAX_NUMBERED = 10  # choices that are numbered
FEW = 20  # one reference in so many may be of another kind in a file that is nearly of one

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
_Fits = Callable[[str, str], bool]  # whether a question's reference is of a kind


def guess_kind(asked: Iterable[tuple[str, str]]) -> AnswerKind:
    """The kind of all references in `asked`: (question, reference). What fits no kind is text."""
    listed = [(question, reference_text(reference) or "") for question, reference in asked]
    found = (kind for kind, fits in _kinds(listed) if all(starmap(fits, listed)))
    return next(found, "text") if listed else "text"


def nearly(asked: Sequence[tuple[str, str]], guessed: AnswerKind) -> tuple[AnswerKind, list[int]] | None:
    """(a kind that the guess passed over for a few references only, the indices of these in `asked`), if there is
    one."""
    most = len(asked) // FEW
    listed = [(question, reference_text(reference) or "") for question, reference in asked]
    for kind, fits in _kinds(listed, most):
        if kind == guessed or guessed == "maths":  # which takes numbers, too
            return None
        odd = list(islice((i for i, each in enumerate(listed) if not fits(*each)), most + 1))
        if 0 < len(odd) <= most:
            return kind, odd
    return None


def _kinds(listed: Sequence[tuple[str, str]], least: int = 1) -> Iterator[tuple[AnswerKind, _Fits]]:
    """Each kind but text, with its test; maths if at least so many references have its signs."""
    yield "yes-no", lambda _, said: choices.yes_or_no(said) is not None
    yield "choice", lambda _, said: _is_labelled(choices.plain_words(said))
    yield "choice", _is_numbered
    yield "number", lambda _, said: _is_number(said)
    if sum(_MATHS.search(said) is not None for _, said in listed) >= least:
        yield "maths", lambda _, said: maths.is_readable(said)


def _is_labelled(said: str) -> bool:
    return bool(_LETTER.fullmatch(said) or _LETTER_AND_TEXT.fullmatch(said))


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
