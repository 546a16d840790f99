"""The judge: whether a text answers a question rightly, given the accepted answers. Values in, a verdict out.

    form: where the answer stands -> its place -> kind: how that place is read -> compared with each reference

`judge` reads no file and keeps nothing, and its time is bounded by the length of the text: for `maths` by the sizes
that `maths` refuses beyond. Nothing of a text is evaluated as code. All members of a swarm must judge alike, so
`JUDGE` rises with every change of what it finds right.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import msgspec

from protocol.answer_form import AnswerForm, AnswerKind
from swarm_node.tasks.judging import choices, maths, numbers
from swarm_node.tasks.judging.places import MAX_ANSWER_CHARS, extract, place, reference_text
from swarm_node.tasks.judging.texts import text_or_number

JUDGE = 1  # version of the judge, which travels with answers

Equal = Callable[[str, str], bool]
"""(answer, reference) -> whether both are one expression of mathematics."""


class Verdict(msgspec.Struct, frozen=True):
    """What the judge found."""

    extracted: str | None  # the answer that was read; None if there was none
    right: bool


def judge(
    kind: AnswerKind,
    reference: str | tuple[str, ...],
    text: str,
    form: AnswerForm = "any",
    equal: Equal = maths.equal,
) -> Verdict:
    """Whether `text` gives one of the accepted answers `reference`.

    `form` says where the answer must stand, `kind` how it is read there. `equal` compares expressions for `maths`: a
    caller may have that done in another process.
    """
    found = (extract if kind == "text" else place)(text, form)
    if found is None or len(found) > MAX_ANSWER_CHARS:
        return Verdict(found, False)
    return _READ[kind](found, (reference,) if isinstance(reference, str) else reference, equal)


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


def _text(found: str, accepted: tuple[str, ...], equal: Equal) -> Verdict:
    return Verdict(found, any(text_or_number(found, reference_text(each) or "") == 1 for each in accepted))


def _number(found: str, accepted: tuple[str, ...], equal: Equal) -> Verdict:
    number = numbers.read_number(found)
    if number is None:
        return Verdict(None, False)
    wanted = (_number_of(each) for each in accepted)
    return Verdict(number.text, any(each is not None and numbers.same(number, each) for each in wanted))


def _yes_no(found: str, accepted: tuple[str, ...], equal: Equal) -> Verdict:
    said = choices.read_yes_no(found)
    if said is None:
        return Verdict(None, False)
    return Verdict(said[0], said[1] in {choices.yes_or_no(reference_text(each) or "") for each in accepted})


def _choice(found: str, accepted: tuple[str, ...], equal: Equal) -> Verdict:
    wanted = [choices.choice_of(reference_text(each) or "") for each in accepted]
    labels = {each.label for each in wanted} - {""}
    texts = {choices.same_text(each.text) for each in wanted} - {""}
    named = choices.read_choice(found)
    whole = choices.same_text(choices.plain(found))
    if whole in texts:
        return Verdict(found, True)
    if named.label:
        return Verdict(named.label, named.label in labels)
    right = choices.same_text(named.text) in texts
    return Verdict(named.text if right else None, right)


def _maths(found: str, accepted: tuple[str, ...], equal: Equal) -> Verdict:
    answer = maths.expression_in(found)
    if answer is None:
        return Verdict(None, False)
    return Verdict(answer, any(equal(answer, reference_text(each) or "") for each in accepted))


@lru_cache(maxsize=1024)
def _number_of(reference: str) -> numbers.Number | None:
    return numbers.number_of(reference_text(reference) or "")


_READ: dict[AnswerKind, Callable[[str, tuple[str, ...], Equal], Verdict]] = {
    "text": _text,
    "number": _number,
    "maths": _maths,
    "choice": _choice,
    "yes-no": _yes_no,
}
