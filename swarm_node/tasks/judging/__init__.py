"""The judge: whether a text answers a question rightly, given the accepted answers. Values in, a verdict out.

    form: where the answer stands -> its place -> kind: how that place is read -> compared with each reference

`judge` reads no file and keeps nothing. Its time is bounded: an answer is read in the last 4,000 characters of its
place, an expression has at most 400, with bounded depth, digits and values, and the operations of a comparison are
counted. So no clock decides a verdict. Nothing of a text is evaluated as code. All members of a swarm must judge alike,
so from the first release on `JUDGE` rises with every change of what it finds right.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import msgspec

from swarm_node.tasks.judging import choices, maths, numbers
from swarm_node.tasks.judging.places import MAX_ANSWER_CHARS, extract_place, reference_text
from swarm_node.tasks.judging.sentences import expression_in, words_in
from swarm_node.tasks.judging.texts import stated, states
from swarm_protocol.answer_form import AnswerForm, AnswerKind

JUDGE = 1  # version of the judge, which travels with answers


class Verdict(msgspec.Struct, frozen=True):
    """What the judge found."""

    extracted: str | None  # the answer that was read; None if there was none
    right: bool


@lru_cache(maxsize=32)  # a completion is read by the task set and by its environment, and its like come again
def judge(
    kind: AnswerKind,
    reference: str | tuple[str, ...],
    text: str,
    form: AnswerForm = "any",
    others: tuple[str, ...] = (),
) -> Verdict:
    """Whether `text` gives one of the accepted answers `reference`. `form` says where the answer must stand, `kind` how
    it is read there, `others` are the texts of wrong choices (`choices.with_texts`). Reasoning that the prompt began
    must begin the text: put its `<think>` in front."""
    found = extract_place(text, form)
    if found is None or len(found) > MAX_ANSWER_CHARS:
        return Verdict(found, False)
    accepted = (reference,) if isinstance(reference, str) else reference
    return _choice(found, accepted, others) if kind == "choice" else _READ[kind](found, accepted)


def misfit(kind: AnswerKind, reference: str) -> str | None:
    """What `reference` should be, if it is none of that kind."""
    said = reference_text(reference)
    if said is None:
        return "a text that is not empty"
    if kind == "number" and numbers.number_of(said) is None:
        return "a number"
    if kind == "yes-no" and choices.yes_or_no(said) is None:
        return "yes or no (or true or false)"
    if kind == "maths" and not maths.is_readable(said):
        return "an expression of mathematics"
    return None


def understood(kind: AnswerKind, reference: str) -> str:
    """The reference as the judge reads it, for people."""
    said = reference_text(reference) or ""
    if kind == "number" and (number := numbers.number_of(said)) is not None:
        return number.text
    if kind == "yes-no" and (yes := choices.yes_or_no(said)) is not None:
        return "yes" if yes else "no"
    if kind == "choice":
        label, text = choices.choice_of(said)
        return f"{label}) {text}" if label and text else label or text
    return said


def _text(found: str, accepted: tuple[str, ...]) -> Verdict:
    right = any(states(found, reference_text(each) or "") for each in accepted)
    return Verdict(stated(found) if right else found, right)


def _number(found: str, accepted: tuple[str, ...]) -> Verdict:
    number = numbers.read_number(found)
    if number is None:
        return Verdict(None, False)
    wanted = (_number_of(each) for each in accepted)
    return Verdict(number.text, any(each is not None and numbers.same_number(number, each) for each in wanted))


def _yes_no(found: str, accepted: tuple[str, ...]) -> Verdict:
    said = choices.read_yes_no(found)
    if said is None:
        return Verdict(None, False)
    return Verdict(said[0], said[1] in {choices.yes_or_no(reference_text(each) or "") for each in accepted})


def _choice(found: str, accepted: tuple[str, ...], others: tuple[str, ...]) -> Verdict:
    """A choice's text says more than a letter at its beginning: `E. coli` is not choice E."""
    wanted = [choices.choice_of(reference_text(each) or "") for each in accepted]
    labels = {each.label for each in wanted} - {""}
    texts = {choices.same_text(each.text) for each in wanted} - {""}
    wrong = {choices.same_text(choices.plain_words(each)) for each in others} - {""}
    for each in choices.with_or_without_label(found):
        text = choices.same_text(each.text)
        if text in wrong or (text in texts and each.label in labels | {""}):
            return Verdict(found, text not in wrong)
    named = choices.read_choice(found)
    if named.label:
        return Verdict(named.label, named.label in labels)
    right = choices.same_text(named.text) in texts
    return Verdict(named.text if right else None, right)


def _maths(found: str, accepted: tuple[str, ...]) -> Verdict:
    wanted = [reference_text(each) or "" for each in accepted]
    answer = expression_in(found)
    said = (each for each in (answer, *words_in(found)) if each and maths.equal(each, wanted))
    right = next(said, None)
    return Verdict(right or answer, right is not None)


@lru_cache(maxsize=1024)
def _number_of(reference: str) -> numbers.Number | None:
    return numbers.number_of(reference_text(reference) or "")


_READ: dict[AnswerKind, Callable[[str, tuple[str, ...]], Verdict]] = {
    "text": _text,
    "number": _number,
    "maths": _maths,
    "yes-no": _yes_no,
}
