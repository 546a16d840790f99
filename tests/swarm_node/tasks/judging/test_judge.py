"""The judge, by answers that others and people gave verdicts on (tests/data/answers.md), and by hostile ones."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_node.tasks.judging import Verdict, judge, maths, values
from swarm_protocol.answer_form import WRITTEN, AnswerKind

DATA = Path(__file__).parents[3] / "data"
KINDS: list[AnswerKind] = ["text", "number", "maths", "choice", "yes-no"]
MOST_MISSED = 0.02


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


PAIRS, HOSTILE = lines("answers.jsonl"), lines("answers_hostile.jsonl")


def accepted(line: dict[str, Any]) -> str | tuple[str, ...]:
    reference = line["reference"]
    return tuple(reference) if isinstance(reference, list) else str(reference)


def whole(line: dict[str, Any]) -> str:
    """The text of a hostile line."""
    return "".join(part if isinstance(part, str) else part["repeat"][0] * part["repeat"][1] for part in line["text"])


def verdict(line: dict[str, Any], text: str = "") -> Verdict:
    return judge(line["kind"], accepted(line), text or line["text"], line["form"])


def test_no_wrong_answer_is_found_right() -> None:
    assert [pair for pair in PAIRS if not pair["right"] and verdict(pair).right] == []


def test_few_right_answers_are_missed() -> None:
    right = [pair for pair in PAIRS if pair["right"]]
    missed = [(pair["reference"], pair["text"]) for pair in right if not verdict(pair).right]
    assert len(missed) <= MOST_MISSED * len(right), missed


def test_what_was_read_is_right_by_itself() -> None:
    """The gate against payloads compares answers with the plainest text that earns as much."""
    for pair in PAIRS:
        found = verdict(pair)
        if found.right:
            assert found.extracted, pair
            assert verdict(pair, WRITTEN[pair["form"]].format(found.extracted)).right, (pair, found)


@pytest.mark.parametrize("line", HOSTILE, ids=[line["what"] for line in HOSTILE])
def test_hostile_texts_are_wrong_and_stall_nothing(line: dict[str, Any]) -> None:
    text = whole(line)
    assert not verdict(line, text).right
    for kind in KINDS:
        for part in (text, text[:3_900], text[:390], f"The answer is {text[:380]}", rf"\boxed{{{text[:390]}}}"):
            assert judge(kind, accepted(line), part).extracted != ""


def test_an_answer_that_cannot_be_read_is_cleaned_once() -> None:
    references = tuple(f"asin x + {n}" for n in range(16))
    maths.cleaned.cache_clear()
    assert not judge("maths", references, "\N{ARABIC LIGATURE SALLALLAHOU ALAYHE WASALLAM}" * 390, "any").right
    cleaned = maths.cleaned.cache_info().misses
    assert cleaned <= len(references) + 4, "once for each reference, and a few ways to look at the answer"


def test_no_verdict_takes_more_operations_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    done: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            done[name] += 1
            return function(*args)

        return wrapped

    for kind, compute in values._COMPUTED.items():
        monkeypatch.setitem(values._COMPUTED, kind, counted("operations", compute))
    monkeypatch.setattr(maths, "_equal", counted("comparisons", maths._equal))
    most: Counter[str] = Counter()
    for line in HOSTILE:
        done.clear()
        judge.cache_clear()
        verdict(line, whole(line))
        most |= done
    assert all(most[name] <= values.MAX_WORK + 1 for name in most), most
    assert most["operations"] > 200 and most["comparisons"] > 1000  # the lines test the limit


def test_the_longest_lists_that_people_write_are_within_the_limit() -> None:
    roots = [rf"{n}\pi + \sqrt{{{n}}}/x" for n in range(1, 17)]
    assert judge("maths", ", ".join(roots), f"${', '.join(reversed(roots))}$").right
    assert not judge("maths", ", ".join(roots), ", ".join([*roots[1:], roots[-1]])).right


PIECES = (
    r"1 2 , . - + / * ^ ( ) [ ] { } $ % ! = < > | _ x e i \frac \sqrt \boxed{ \pm \cup \in \text{ or and not A (B) yes"
    r" .5 1e5 \binom \log_ √ ² ₂ ½ five minus A) \sin^"
).split()


@given(
    st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=40),
    st.sampled_from(["", " "]),
    st.sampled_from(KINDS),
)
def test_any_text_gives_a_verdict(pieces: list[str], between: str, kind: AnswerKind) -> None:
    text = between.join(pieces)
    found = judge(kind, "314159", text)
    assert not found.right and found.extracted != ""
    assert judge(kind, text or "x", "no").extracted != ""


@pytest.mark.parametrize(
    ("text", "reference", "right"),
    [
        ("Paris", "Paris", True),
        ("  Paris ", "Paris", True),
        ("<answer>Paris</answer>", "Paris", True),
        ("paris", "Paris", True),
        ('**"The Paris".**', "Paris", True),
        ("Not Rome. The answer is Paris. Rome is in Italy.", "Paris", True),
        ("The answer is Paris. Rome is in Italy.", "Rome", False),
        ("Paris, Texas", "Paris", False),
        ("a", "A", True),
        ("The answer is 8.", "8", True),
        ("1,234.50", "1234.5", True),
        ("5 * 2 = 10\n#### 10", "We get it.\n#### 10", True),
        ("$26", "#### 26", True),
        ("1e3", "1000", False),
        ("<think>8", "8", False),
    ],
)
def test_texts_are_compared_without_case_and_markup(text: str, reference: str, right: bool) -> None:
    assert judge("text", reference, text).right is right


WORDS = [
    (r"\text{Evelyn}", r"\boxed{\text{Evelyn}}", True),
    (r"\text{Evelyn}", r"\boxed{\text{Angela}}", False),
    (r"\text{Evelyn}", "**Evelyn**", True),
    ("Monday", "Monday", True),
    ("Monday", "The answer is Monday.", True),
    ("Monday", "Answer:\nMonday", True),
    ("Monday", "<answer>Monday</answer>", True),
    ("Monday", "The answer is Monday. Wait, no, Tuesday.", False),
    ("Monday", "I doubt that the answer is Monday.", False),
    ("Monday", "Monday or Tuesday", False),
    ("Monday", "Sunday\nMonday", False),
    ("Monday", "The answer is Sunday or the answer is Monday", False),
    (r"\text{even}", "f(-x) = f(x) for all 2 signs of x. So f is **even**.", True),
    (r"\text{even}", "f is not even.", False),
    (r"\text{even}", "It is not clear that f is even.", False),
    (r"\text{even}", "Either f is odd, or it is even.", False),
    (r"\text{even}", "f is even. Wait, no, f is odd.", False),
    (r"\text{no solution}", "There is no solution.", True),
    (r"\text{no solution}", "No solution", True),
    (r"\text{rectangle}", "The figure is a rectangle.", True),
]


@pytest.mark.parametrize(("reference", "text", "right"), WORDS)
def test_words_are_answers_of_mathematics(reference: str, text: str, right: bool) -> None:
    assert judge("maths", reference, text).right is right


@pytest.mark.parametrize("mark", ["$26", "€26", "**26**", "x = 26", "26 apples", "26"])
def test_money_and_markup_behind_hashes(mark: str) -> None:
    reference = f"Two times 13 is 26.\n#### {mark}"
    for text in ("26", f"13 + 13\n#### {mark}", "It costs $26."):
        assert judge("number", reference, text).right, text
        assert not judge("number", reference, text.replace("26", "27")).right


@pytest.mark.parametrize("reference", ["1.2e-07", "0.00000012", "1.2 x 10^-7"])
def test_numbers_of_any_spelling(reference: str) -> None:
    for text in ("0.00000012", "1.2e-07", "It is 1.2 × 10^{-7}."):
        assert judge("number", reference, text).right, text


@pytest.mark.parametrize(
    "unit",
    ["cm^2", "kg/m^3", "kg/m³", "people/km^2", "m/s^2", r"\text{ m/s}^2", r"\mathrm{kg}/\mathrm{m}^3", "m^2/s^2"],
)
def test_exponents_of_units_are_no_numbers(unit: str) -> None:
    for text in (f"25 {unit}", f"It has $25$ {unit}.", f"The answer is 25 {unit}."):
        assert judge("number", "25", text).right, text
        assert not judge("number", ("2", "3"), text).right, text


@pytest.mark.parametrize("text", ["25/m^2", "25 x/m^2", "25 = x/m^2", "25^2/m^2"])
def test_exponents_of_names_are_no_units(text: str) -> None:
    assert judge("number", "25", text) == Verdict(None, False)


def test_several_answers_are_accepted() -> None:
    assert judge("number", ("9", "9.5"), "It is 9.5").right
    assert judge("choice", ("B", "Paris"), "the answer is Paris").right
    assert not judge("choice", ("B", "Paris"), "A) Rome").right


def test_a_reference_of_arithmetic_is_no_invitation_to_copy_questions() -> None:
    for kind, question, reference in (
        ("maths", "3 + 4", "7"),
        ("maths", r"\frac12 + \frac13", r"\frac56"),
        ("number", "8 / 2", "4"),
        ("number", "3 + 4", "4"),
    ):
        assert not judge(kind, reference, question).right  # type: ignore[arg-type]
