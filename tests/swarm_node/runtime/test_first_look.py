"""What is said of a policy's answers before training."""

from __future__ import annotations

from typing import Any

import pytest

from swarm_node.observability.evaluations import Evaluation, Held, Shown
from swarm_node.runtime.first_look import first_look
from swarm_node.say import Warned


def look(**more: Any) -> list[str]:
    share = more.pop("share", 0.25)
    shown = [Shown("sums", f"What is {i} + 1?", str(i + 1), f"It is\n{i}.", i == 1, 0.0, cut=i == 2) for i in range(5)]
    found = Evaluation({"all": Held(20, share, share, share)}, shown=shown, tokens=12.0, **more)
    return list(first_look(found, 8, "pass_1", 64))


def test_three_questions_are_shown_with_their_answers() -> None:
    first, *rest = look(cut=0.1, mixed=7)
    assert first == (
        "before training: pass@1 0.250 on 20 held-out questions with 8 answers each, 10% of the answers cut off at 64 "
        "tokens"
    )
    assert rest == [
        "  What is 0 + 1? (right: 1) -> It is 0. [wrong]",
        "  What is 1 + 1? (right: 2) -> It is 1. [right]",
        "  What is 2 + 1? (right: 3) -> It is 2. [wrong, cut off]",
        "7 of 20 questions have both better and worse answers: the policy learns from these",
    ]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"cut": 0.8, "mixed": 3}, "most answers are cut off: `--set rollouts.max_new_tokens=128` lets"),
        ({"cut": 0.8, "share": 0.0}, "most are cut off at the length limit: `--set rollouts.max_new_tokens=128`"),
        ({"cut": 0.0, "share": 0.0}, "no answer earns a reward: if right ones are among those above, name how"),
        ({"cut": 0.0, "share": 1.0}, "the answers to each question are rewarded alike. Take harder questions"),
    ],
)
def test_the_setting_that_helps_is_named(more: dict[str, Any], words: str) -> None:
    last = look(**more)[-1]
    assert words in last and isinstance(last, Warned) == ("mixed" not in more)
    assert last.startswith("none of the 20 questions asked so far teaches: ") == ("mixed" not in more)


def test_a_member_s_owner_names_how_answers_are_read() -> None:
    found = Evaluation({"all": Held(3, 0.0, 0.0, 0.0)}, asked=3)
    assert "swarm-node new --kind" in [*first_look(found, 8, "pass_1", 64, member=True)][-1]
    assert "(--kind, --answer)" in [*first_look(found, 8, "pass_1", 64)][-1]


def test_nothing_is_said_where_nothing_was_asked() -> None:
    assert list(first_look(Evaluation(), 8, "pass_1", 64)) == []


def test_no_control_character_of_a_model_is_printed() -> None:
    shown = [Shown("t", "q\x1b[2J", "1", "a\x1b]0;title\x07", False)]
    lines = list(first_look(Evaluation({"all": Held(1, 0.0, 0.0, 0.0)}, shown=shown), 8, "pass_1", 64))
    assert not any("\x1b" in line or "\x07" in line for line in lines)
