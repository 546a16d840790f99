"""What kind of answers a file has: guessed from its references, wrong guesses among them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swarm_node.config import RewardsConfig, TaskConfig
from swarm_node.errors import UserError
from swarm_node.tasks.judging.guessing import guess_kind
from swarm_node.tasks.taskset import load_tasks
from swarm_protocol.answer_form import AnswerKind

CAPITAL = "What is the capital of France?\n{} Rome\n{} Paris\n{} Oslo\n{} Bonn"


@pytest.mark.parametrize(
    ("kind", "references"),
    [
        ("number", ["7", "-3", "1200"]),
        ("number", ["7", "1,200", "$3.50", "50%", "1/2", "1.2e-07"]),
        ("number", ["We add.\n#### 72", "So:\n#### $26"]),
        ("number", ["12345678901234567890123456789012345678901234567890"]),
        ("yes-no", ["yes", "no", "Yes"]),
        ("yes-no", ["true", "false"]),
        ("choice", ["A", "C", "B"]),
        ("choice", ["(A)", "B.", r"\text{C}"]),
        ("choice", ["A) Rome", "B) Paris"]),
        ("maths", [r"\frac{1}{2}", "3"]),
        ("maths", [r"We get $\boxed{\frac{1}{2}}$."]),
        ("maths", ["x^2 + 1", "2"]),
        ("text", ["Paris", "Rome"]),
        ("text", ["A", "B", "neither"]),
        ("text", ["7", "none"]),
        ("text", ["yes", "no", "maybe"]),
        ("text", ["007", "013"]),
        ("text", ["84 apples"]),
        ("text", ["2024-05-01", "12:30"]),
        ("text", [r"C:\new\table", r"D:\old"]),
        ("text", []),
    ],
)
def test_kinds_by_references(kind: AnswerKind, references: list[str]) -> None:
    assert guess_kind([("What?", each) for each in references]) == kind


@pytest.mark.parametrize(
    ("labels", "answers", "kind"),
    [
        (("1)", "2)", "3)", "4)"), "2413", "choice"),
        (("(1)", "(2)", "(3)", "(4)"), "2413", "choice"),
        (("0.", "1.", "2.", "3."), "0312", "choice"),
        (("A)", "B)", "C)", "D)"), "BDAC", "choice"),
        (("1)", "2)", "3)", "4)"), "2719", "number"),  # not all are choices
        (("A)", "B)", "C)", "D)"), "2413", "number"),  # how many, rather than which
    ],
)
def test_numbered_choices_are_no_numbers(labels: tuple[str, ...], answers: str, kind: AnswerKind) -> None:
    question = CAPITAL.format(*labels)
    assert guess_kind([(question, each) for each in answers]) == kind


def test_a_question_with_numbers_has_no_choices() -> None:
    assert guess_kind([(f"What is {n} + 1?", str(n + 1)) for n in (1, 2, 3)]) == "number"
    assert guess_kind([("1. Take 3. 2. Add 1. How many?", "4"), ("1. Take 9. 2. Add 5.", "14")]) == "number"


def sums(tmp_path: Path, answers: list[object]) -> str:
    path = tmp_path / "sums.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"q {i}?", "answer": a}) for i, a in enumerate(answers)))
    return str(path)


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([7, -3, 1200, 5], "answers of sums are read as numbers (guessed: kind = number): 7, -3, 1200"),
        (["It is.\n#### $26"] * 5, "read as numbers (guessed: kind = number): 26, 26, 26"),
        ([True, False] * 3, "read as yes or no (guessed: kind = yes-no): yes, no, yes"),
        (["(B)", "A."] * 3, "read as choices (guessed: kind = choice): B, A, B"),
        ([["9", "9.0"]] * 3, "(guessed: kind = number): 9  |  9.0, 9  |  9.0, 9  |  9.0"),
        (["Paris", "Rome"] * 3, "read as whole texts (guessed: kind = text): Paris, Rome, Paris"),
        ([1.2e-07, 1e22] * 3, "(guessed: kind = number): 0.00000012, 10000000000000000000000"),
    ],
)
def test_the_start_says_how_answers_are_read(tmp_path: Path, answers: list[object], said: str) -> None:
    tasks = load_tasks([sums(tmp_path, answers)], RewardsConfig(), whole=True)
    assert any(said in line for line in tasks.read_as), tasks.read_as


NUMBERS: list[object] = list(range(499))


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (
            [*NUMBERS[:316], "12 apples", *NUMBERS[316:]],
            "read as whole texts (guessed: kind = text): 0, 1, 2; but 499 of 500 are numbers, and line 317 is "
            "'12 apples': --kind number reads it as 12",
        ),
        ([*NUMBERS, "N/A"], "499 of 500 are numbers, and line 500 is 'N/A': correct it for --kind number"),
        (
            ["yes", "no"] * 20 + ["maybe"],
            "40 of 41 are yes or no, and line 41 is 'maybe': correct it for --kind yes-no",
        ),
        (
            ["A", "B"] * 20 + ["C or D"],
            "40 of 41 are choices, and line 41 is 'C or D': --kind choice reads it as C or D",
        ),
        (
            [r"\frac{1}{2}", "x^2", "7", "even"] * 10 + ["5 # 6"],
            "40 of 41 are expressions of mathematics, and line 41 is '5 # 6': correct it for --kind maths",
        ),
        ([["9", "9.0"]] * 20 + [["9", "N/A"]], "41 of 42 are numbers, and line 21 is 'N/A'"),
    ],
)
def test_the_start_names_the_answer_that_is_not_as_nearly_all_are(
    tmp_path: Path, answers: list[object], said: str
) -> None:
    tasks = load_tasks([sums(tmp_path, answers)], RewardsConfig(), whole=True)
    assert said in tasks.read_as[-1], tasks.read_as


@pytest.mark.parametrize(
    "answers",
    [
        [7] * 18 + ["N/A"],  # one in nineteen are many
        [7] * 38 + ["N/A", "none", "12 apples"],
        [7] * 40 + [r"\sqrt{2}"],  # maths takes numbers, too
        ["Paris", "Rome"] * 20 + ["x_1", "3#"],
        ["2024-05-01", "12:30"] * 20 + ["noon, or later"],
    ],
)
def test_texts_and_what_fits_the_guess_are_nearly_of_no_other_kind(tmp_path: Path, answers: list[object]) -> None:
    tasks = load_tasks([sums(tmp_path, answers)], RewardsConfig(), whole=True)
    assert "; but" not in tasks.read_as[-1]


@pytest.mark.parametrize("named", ["file", "rewards"])
def test_what_is_named_wins_over_the_guess(tmp_path: Path, named: str) -> None:
    path = sums(tmp_path, ["1", "2", "3", "4"])
    table = TaskConfig(file=path, kind="choice" if named == "file" else None)
    tasks = load_tasks([table], RewardsConfig(kind="number" if named == "file" else "choice"), whole=True)
    assert tasks.kinds == {"sums": "choice"}
    assert "(kind = choice): 1, 2, 3" in tasks.read_as[-1]
    task = tasks.every()[1]
    assert [score.correct for score in tasks.score([task] * 2, [""] * 2, ["(2)", "the 2 of them are 3"])] == [
        True,
        False,
    ]


def test_the_text_of_a_choice_counts_as_its_letter(tmp_path: Path) -> None:
    path = tmp_path / "capitals.jsonl"
    question = CAPITAL.format("A)", "B)", "C)", "D)")
    path.write_text("\n".join(json.dumps({"question": question, "answer": "B"}) for _ in range(3)))
    tasks = load_tasks([str(path)], RewardsConfig(), whole=True)
    task = tasks.every()[0]
    texts = ["Paris", "The answer is Paris.", "B) Paris", "Rome", "A) Rome", "Paris or Rome"]
    scores = tasks.score([task] * 6, [""] * 6, texts)
    assert [score.correct for score in scores] == [True, True, True, False, False, False]


SPECIES = ["C. elegans", "E. coli", "Vitamin C", "37 C", "C++", "Paris"]


@pytest.mark.parametrize("right", "ABCDEF")
def test_a_letter_in_the_text_of_a_choice_names_no_other_choice(tmp_path: Path, right: str) -> None:
    path = tmp_path / "choices.jsonl"
    listed = dict(zip("ABCDEF", SPECIES, strict=True))
    question = "\n".join(["Which?", *(f"{label}) {text}" for label, text in listed.items())])
    path.write_text("\n".join(json.dumps({"question": question, "answer": right}) for _ in range(3)))
    tasks = load_tasks([TaskConfig(file=str(path), kind="choice")], RewardsConfig(), whole=True)
    forms = ("{0}", "The answer is {0}", "{1}", "The answer is {1}.", "**{1}**", "{0}) {1}", "The answer is {0}. {1}")
    answers = [(form.format(label, text), label == right) for label, text in listed.items() for form in forms]
    answers += [(f"{right}) {text}", False) for label, text in listed.items() if label != right]
    task = tasks.every()[0]
    scores = tasks.score([task] * len(answers), [""] * len(answers), [text for text, _ in answers])
    wrong = [answer for answer, score in zip(answers, scores, strict=True) if score.correct is not answer[1]]
    assert wrong == []


def test_texts_that_are_numbers_are_no_labels(tmp_path: Path) -> None:
    path = tmp_path / "counts.jsonl"
    path.write_text("\n".join(json.dumps({"question": "How many?\n1) 2\n2) 1\n3) 5", "answer": "1"}) for _ in range(3)))
    tasks = load_tasks([TaskConfig(file=str(path), kind="choice")], RewardsConfig(), whole=True)
    scores = tasks.score([tasks.every()[0]] * 3, [""] * 3, ["1", "2", "5"])
    assert [score.correct for score in scores] == [True, False, False]


def test_a_question_with_hundreds_of_accepted_answers_is_refused(tmp_path: Path) -> None:
    path = sums(tmp_path, [[str(i) for i in range(17)]])
    with pytest.raises(UserError, match=r"line 1: `answer` has 17 accepted answers: leave at most 16"):
        load_tasks([path], RewardsConfig(), whole=True)


def test_a_reference_that_no_parser_reads_ends_nothing(tmp_path: Path) -> None:
    for reference, kind in ((r"\sqrt.5", "maths"), (r"\frac1.5 2", "text"), (r"\log_.5 8", "maths")):
        tasks = load_tasks([sums(tmp_path, [reference] * 5)], RewardsConfig(), whole=True)
        assert tasks.kinds.get("sums", "text") == kind
        scores = tasks.score([tasks.every()[0]] * 2, [""] * 2, [reference, r"\frac1e5 2"])
        assert [score.correct for score in scores] == [True, False]


def test_a_reference_of_another_kind_is_refused_by_line(tmp_path: Path) -> None:
    path = sums(tmp_path, ["7", "about eight or nine"])
    with pytest.raises(UserError, match=r"sums\.jsonl, line 2: .*which is not a number.*another kind than number"):
        load_tasks([TaskConfig(file=path, kind="number")], RewardsConfig(), whole=True)
    with pytest.raises(UserError, match="is not yes or no"):
        load_tasks([path], RewardsConfig(kind="yes-no"), whole=True)


def test_an_environment_has_no_kind(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="`kind` is for question files"):
        load_tasks([TaskConfig(env="gcd", kind="number")], RewardsConfig())
    assert load_tasks(["small/gcd"], RewardsConfig(kind="number")).kinds == {}


def test_reasoning_that_the_prompt_began(tmp_path: Path) -> None:
    """Some chat templates end with `<think>`: what never ends it is no answer."""
    tasks = load_tasks([sums(tmp_path, [7] * 5)], RewardsConfig(), whole=True)
    task = tasks.every()[0]
    texts = [r"so \boxed{7}, but wait", "it is 7 </think> The answer is 7."]
    for prompt, right in (("<user>q<assistant><think>\n", [False, True]), ("<think>\n\n</think>\n", [True, True])):
        assert [score.correct for score in tasks.score([task] * 2, [prompt] * 2, texts)] == right
