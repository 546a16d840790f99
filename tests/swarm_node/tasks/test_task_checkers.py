"""Our own checkers, against the library's where that one is sound."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reasoning_gym import create_dataset

from swarm_node.tasks.checkers import conclusion, matrix
from swarm_node.tasks.judging.texts import parse_number, text_or_number

REFERENCE = "0 1 0\n1 0 1\n12 1 0"


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        (REFERENCE, 1.0),
        ("0  1 0 \r\n1 0 1\n12 1 0\n", 1.0),
        ("[[0, 1, 0], [1, 0, 1], [12, 1, 0]]", 0.1),
        ("[[0,1,0],\n [1,0,1],\n [12,1,0]]", 0.1),
        ("0 1 0\n1 0 1", 0.0),
        ("0 1 0 1 0 1 12 1 0", 0.0),
        ("[[0, 1, 0], [1, 0, 1], [6*2, 1, 0]]", 0.0),
        ("[[0]*3]*3", 0.0),
        ("", 0.0),
    ],
)
def test_matrix(answer: str, score: float) -> None:
    assert matrix(answer, REFERENCE) == score


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("Q", 0.25),  # follows, but a bare variable says too little
        ("(Q)", 0.25),
        ("P ∧ Q", 1.0),
        ("¬¬Q", 1.0),
        ("R → Q", 1.0),
        ("R ∨ ¬R", 0.25),
        ("R", 0.05),
        ("Q ∧ R", 0.05),
        ("¬P ∨ R ↔ R", 1.0),
        ("P Q", 0.0),
        ("P ∧", 0.0),
        ("∧ P", 0.0),
        ("(P", 0.0),
        ("P)", 0.0),
        ("()", 0.0),
        ("P ∧ X", 0.0),
        ("P and Q", 0.0),
        ("", 0.0),
        ("True", 0.0),
    ],
)
def test_conclusion_from_p_and_p_implies_q(answer: str, score: float) -> None:
    assert conclusion(answer, ["(P → Q)", "P"], ["P", "Q", "R"]) == score


def formulas(variables: str) -> st.SearchStrategy[str]:
    def combine(part: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        binary = st.tuples(part, st.sampled_from("∧∨→↔"), part)
        return part.map("¬{}".format) | part.map("({})".format) | binary.map(" ".join)

    return st.recursive(st.sampled_from(variables), combine, max_leaves=8)


@pytest.fixture(scope="module")
def logic() -> Any:
    """The library's own."""
    return create_dataset("propositional_logic", seed=0, size=301)


@given(answer=formulas("PQR"), index=st.integers(0, 300))
def test_conclusion_scores_like_the_library(logic: Any, answer: str, index: int) -> None:
    item = logic[index]
    premises, variables = item["metadata"]["premises"], item["metadata"]["variables"]
    assert conclusion(answer, premises, variables) == logic.score_answer(answer, item)


@given(st.text(alphabet="PQRX()¬∧∨→↔ \n"))
def test_conclusion_takes_any_text(answer: str) -> None:
    assert 0 <= conclusion(answer, ["(P → Q)", "P"], ["P", "Q", "R"]) <= 1


@pytest.mark.parametrize(
    ("answer", "reference", "score"),
    [
        ("42", "42", 1.0),
        ("42.0", "42", 1.0),
        ("1,234", "1234", 1.0),
        ("+.5", "0.50", 1.0),
        ("-0", "0", 1.0),
        ("Paris", " Paris ", 1.0),
        ("two  words", "two words", 1.0),
        ("e\u0301", "\u00e9", 1.0),
        ("paris", "Paris", 0.0),
        ("43", "42", 0.0),
        ("4.2e1", "42", 0.0),
        ("٤٢", "42", 0.0),
        ("12,34", "1234", 0.0),
        ("nan", "42", 0.0),
        ("42 or 43", "42", 0.0),
    ],
)
def test_text_or_number(answer: str, reference: str, score: float) -> None:
    assert text_or_number(answer, reference) == score


def test_numbers_are_plain() -> None:
    rng = random.Random(0)
    for _ in range(200):
        value = rng.randint(-(10**9), 10**9)
        assert parse_number(f"{value:,}") == parse_number(str(value)) == value
    for text in ["", ".", "-", "1e5", "0x1", "1_000", "inf", "1.2.3", "٣", "1 2"]:
        assert parse_number(text) is None, text
