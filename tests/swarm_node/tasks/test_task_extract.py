"""Finding the answer in a completion."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_node.tasks.judging.places import extract


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("42", "42"),
        ("  42 \n", "42"),
        ("", None),
        (" \n ", None),
        ("so <answer> 42 </answer>.", "42"),
        ("<answer>1</answer> no, <answer>2</answer>", "2"),
        ("<answer>1</answer> and <answer>2", "1"),
        ("<answer>a <answer>b</answer> c</answer>", "b"),
        ("</answer><answer>", "</answer><answer>"),
        ("<answer></answer>", None),
        ("<answer>0 1\n1 0</answer>", "0 1\n1 0"),
        (r"thus \boxed{42}", "42"),
        (r"\boxed{1} then \boxed{\frac{1}{2}} done", r"\frac{1}{2}"),
        (r"\boxed{7} and \boxed{8", "7"),
        (r"\boxed{ \{1, 2\} }", r"\{1, 2\}"),
        (r"\boxed{a \boxed{b} c}", "b"),
        (r"\boxed{1} <answer>2</answer> \boxed{3}", "2"),
        (r"<answer>\boxed{5}</answer>", "5"),
        (r"<answer>\boxed{5</answer>", None),
        ("5 * 2 = 10\n#### 10", "10"),
        ("#### 1\n#### -1,234.5.", "-1,234.5"),
        ("#### Step 3\nthe result is 4", "#### Step 3\nthe result is 4"),
        (r"#### 10 and \boxed{11}", "11"),
        ("<think>maybe 5</think>6", "6"),
        ("\n<think>a</think> <answer>7</answer>", "7"),
        ("<think><answer>1</answer></think>", None),
        ("<think>never closed <answer>1</answer>", None),
        ("the template opened the block</think> 8", "8"),
        ("a < b <think> c", "a < b <think> c"),
    ],
)
def test_rules_and_their_precedence(completion: str, answer: str | None) -> None:
    assert extract(completion) == answer


@pytest.mark.parametrize(
    ("form", "completion", "answer"),
    [
        ("tags", "so <answer> 42 </answer> \n", "42"),
        ("tags", "<answer>1</answer><answer>2</answer>", "2"),
        ("tags", r"<answer>\boxed{5}</answer>", "5"),
        ("tags", "<think>3</think><answer>4</answer>", "4"),
        ("tags", "<answer>42</answer>.", None),
        ("tags", "<answer>5</answer> 5</answer>", None),
        ("tags", "<answer></answer>", None),
        ("tags", r"\boxed{42}", None),
        ("tags", "42", None),
        ("boxed", r"thus \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("boxed", r"\boxed{1} \boxed{2}" + "\n", "2"),
        ("boxed", r"\boxed{1}.", None),
        ("boxed", r"\boxed{a} a}", None),
        ("boxed", r"\boxed{}", None),
        ("boxed", "<answer>42</answer>", None),
        ("boxed", "42}", None),
    ],
)
def test_a_form_stands_last(form: str, completion: str, answer: str | None) -> None:
    assert extract(completion, form) == answer


TAGS = ["<answer>", "</answer>", "<think>", "</think>"]
PIECES = [*TAGS, r"\boxed{", "{", "}", "\\", "#### ", "7", " ", "\n", "x"]
HOSTILE = [
    *PIECES,
    "<answer></answer>",
    r"\boxed{}",
    "#### ,",
    "####" + " " * 10_000,
    "{}",
    "<think>x</think>",
]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=3)).map("".join), st.sampled_from(["any", "tags", "boxed"]))
def test_any_text_gives_a_part_or_nothing(text: str, form: str) -> None:
    answer = extract(text, form)
    assert answer is None or (answer and answer == answer.strip() and answer in text)


@given(st.text(alphabet="0123456789ab ", min_size=1).filter(str.strip))
def test_a_tagged_answer_comes_out(answer: str) -> None:
    assert extract(f"<think>hm</think> <answer>{answer}</answer> ok") == answer.strip()
    assert extract(rf"hm \boxed{{{answer}}} ok") == answer.strip()


@pytest.mark.parametrize("piece", HOSTILE)
def test_no_long_text_stalls_it(piece: str) -> None:
    """What takes more than linear time does not end before the test's limit."""
    text = piece * (4_000_000 // len(piece))
    answer = extract(text)
    assert answer is None or answer in text
