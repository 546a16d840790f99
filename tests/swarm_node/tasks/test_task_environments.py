"""Every allowed environment: regenerates anywhere, is fair, and no answer text can hurt its scorer."""

from __future__ import annotations

import decimal
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from swarm_node.config import RewardsConfig
from swarm_node.errors import UserError
from swarm_node.tasks.catalogue import ALLOWED, REFUSED, SETS
from swarm_node.tasks.judging.places import MAX_ANSWER_CHARS
from swarm_node.tasks.reasoning_gym import ENDLESS, ReasoningGym, common_divisors, list_environments
from swarm_node.tasks.taskset import load_tasks
from tests.support.repository import PYTHONPATH, ROOT

PINNED = ROOT / "tests" / "data" / "task_digests.json"


def test_another_process_makes_the_pinned_items() -> None:
    """With a seed of hashes that is not the one they were pinned with."""
    script = Path(__file__).with_name("digests.py")
    env = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": PYTHONPATH}
    done = subprocess.run([sys.executable, str(script)], env=env, stdout=subprocess.PIPE, check=True)
    made = json.loads(done.stdout)
    assert made == json.loads(PINNED.read_text())
    assert set(ALLOWED) <= set(made["digests"])


@pytest.mark.parametrize("name", [name for name in ALLOWED if name != "gsm_symbolic"])
def test_an_item_depends_on_seed_plus_index_alone(name: str) -> None:
    from reasoning_gym import create_dataset

    environment = ReasoningGym(name, {})
    shifted = create_dataset(name, seed=1000, size=10)
    for index in range(10):
        task = environment.task(1000 + index)
        with decimal.localcontext():  # decimal_arithmetic sets the precision of the thread
            item = shifted[index]
        assert task is None or task.question == item["question"].strip()
        assert task is None or task.answer == (item["answer"] or item["metadata"]["example_answer"])


def test_templates_of_gsm_symbolic_take_turns() -> None:
    """The library's own choice of a template depends on the size of its data set."""
    from reasoning_gym.arithmetic.gsm_symbolic.gsm_symbolic import (
        GSMSymbolicDataset,
        GSMSymbolicDatasetConfig,
        tasks_ok,
    )

    generators = GSMSymbolicDataset(GSMSymbolicDatasetConfig(seed=0)).generators
    environment = ReasoningGym("gsm_symbolic", {})
    for index in (0, 1, len(tasks_ok), 10**9 + 7):
        item = generators[tasks_ok[index % len(tasks_ok)]](random.Random(index), 1.0)
        task = environment.task(index)
        assert task is not None and task.question.startswith(item["question"]) and task.answer == item["answer"]


@pytest.mark.parametrize("answer", ["-{}", "{} or 7", "1{}", "{}e0"])
def test_gsm_symbolic_takes_no_number_that_is_another(answer: str) -> None:
    """The library's scorer takes the first digits that it finds, without their sign."""
    from reasoning_gym import create_dataset

    environment, library = ReasoningGym("gsm_symbolic", {}), create_dataset("gsm_symbolic", seed=0, size=500)
    task = next(task for index in range(500) if (task := environment.task(index)) and task.answer != "0")
    wrong = answer.format(task.answer)
    assert environment.check(task, wrong) == 0
    assert environment.check(task, f"{int(task.answer or ''):,}") == 1
    assert library.score_answer(f"-{task.answer}", {"answer": task.answer}) == 1, "shows why the checker is our own"


@pytest.mark.parametrize("name", ALLOWED)
def test_only_the_reference_is_right(name: str) -> None:
    taskset = load_tasks([name], RewardsConfig())
    tasks = taskset.sample(random.Random(0), 50)
    prompts = [task.question for task in tasks]
    right = taskset.score(tasks, prompts, [f"<answer>{task.answer}</answer>" for task in tasks])
    assert all(score.correct for score in right)
    wrong = taskset.score(tasks, prompts, ["no idea", "17 ∧ 4", "<answer></answer>", "-3", "99999"] * 10)
    assert sum(score.correct for score in wrong) <= 1
    assert taskset.score(tasks[:1], prompts[:1], ["<think>hm"])[0].extracted is None


def hostile(marker: Path) -> list[str]:
    """Answers that execute, recurse or stall when something evaluates them."""
    n = MAX_ANSWER_CHARS
    touch = f"open({str(marker)!r}, 'w').close()"
    return [
        touch,
        f"[[{touch}]]",
        f"__import__('os').system('touch {marker}')",
        f"[[x for x in ().__class__.__base__.__subclasses__() if {touch}]]",
        f"\\frac{{{touch}}}{{1}}",
        "9" * n,
        "-" + "9" * n + "." + "9" * n,
        "1e999999999",
        "1e-999999999",
        "1e999999999999999999999",
        "1/" + "9" * n,
        "9" * 4000 + "/" + "7" * 4000,
        "9**9**9**9",
        "10**10**10",
        "nan",
        "sNaN",
        "-inf",
        "٣٤",
        "１２",
        "1_000",
        "\ud800",
        "\x00" * n,
        "(" * n,
        "(" * (n // 2) + "P" + ")" * (n // 2),
        "¬" * (n - 1) + "P",
        "P∧" * (n // 2 - 1) + "P",
        "P→(" * (n // 4) + "P" + ")" * (n // 4),
        "∨".join("abcdefghijklmnopqrstuvwxyz"),
        "[" * n,
        "[[" + "0,1],[" * (n // 7) + "]]",
        "0 1 0\n" * (n // 6),
        "2 × " * (n // 4),
        "{" * n,
        "$" * n,
        " " * n,
        "x" * 10_000_000,
    ]


@pytest.mark.parametrize("name", ALLOWED)
def test_hostile_answers_execute_and_stall_nothing(name: str, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    taskset = load_tasks([name], RewardsConfig(partial=True))
    tasks = taskset.sample(random.Random(0), 3)
    for task in tasks:
        for answer in hostile(marker):
            for completion in (answer, f"<answer>{answer}</answer>", rf"\boxed{{{answer}}}"):
                (score,) = taskset.score([task], [task.question], [completion])
                assert 0 <= score.reward <= 1
                long_conclusion = name == "propositional_logic" and set(answer) <= set("P∧¬→()")
                assert not score.correct or long_conclusion  # it does follow
    assert not marker.exists()


def test_hostile_answers_execute_where_a_scorer_evaluates(tmp_path: Path) -> None:
    """Shows that the test above can fail: the library's own binary_matrix scorer falls for the same texts."""
    from reasoning_gym import create_dataset

    marker = tmp_path / "executed"
    dataset = create_dataset("binary_matrix", seed=0, size=1)
    dataset.score_answer(hostile(marker)[0], dataset[0])
    assert marker.exists()


def test_a_raising_scorer_is_a_wrong_answer() -> None:
    taskset = load_tasks(["prime_factorization"], RewardsConfig())
    (task,) = taskset.sample(random.Random(0), 1)
    (score,) = taskset.score([task], [task.question], ["<answer>two × three</answer>"])
    assert score.reward == 0.0 and not score.correct
    assert taskset.scorer_errors == {"prime_factorization": 1}


def test_bf_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert ReasoningGym("bf", {}).task(5)
    assert ReasoningGym("bf", {"difficulty": 2}).task(5)
    assert capfd.readouterr().out == ""


def test_long_answers_never_reach_the_scorer() -> None:
    taskset = load_tasks(["prime_factorization"], RewardsConfig())
    (task,) = taskset.sample(random.Random(0), 1)
    for length, errors in ((MAX_ANSWER_CHARS, 1), (MAX_ANSWER_CHARS + 1, 1)):
        (score,) = taskset.score([task], [task.question], ["x" * length])
        assert score.reward == 0.0 and taskset.scorer_errors.total() == errors


def test_common_divisors_equals_the_librarys() -> None:
    rng = random.Random(0)
    for digits in range(9):
        for _ in range(20):
            a, b = rng.randint(-(10**digits), 10**digits), rng.choice([0, rng.randint(-999, 999)])
            assert common_divisors(a, b) == by_trial_division(abs(a), abs(b))


def by_trial_division(a: int, b: int) -> list[int]:
    """The loop of reasoning-gym 0.1.25."""
    common, found, i = math.gcd(a, b), [], 1
    while i * i <= common:
        if common % i == 0:
            found += [i] if i * i == common else [i, common // i]
        i += 1
    return found


def test_items_that_stall_the_library_are_made() -> None:
    """The library's own loop tries 10^8 divisors for this default item."""
    from reasoning_gym.arithmetic import basic_arithmetic

    environment = ReasoningGym("basic_arithmetic", {})
    assert basic_arithmetic.find_common_divisors is common_divisors
    task = environment.task(865289177)
    assert task and task.question == "Calculate -( -7689 * 7321 * -( -7478 * -6232 ) ) / 68436708 + -2487."


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("arc_1d", {"min_size": 60, "max_size": 60}),
        ("base_conversion", {"min_base": 7, "max_base": 7}),
        ("basic_arithmetic", {"max_digits": 9}),
        ("basic_arithmetic", {"max_digits": 8, "max_terms": 2, "allow_parentheses": False}),
        ("bf", {"difficulty": 3}),
        ("calendar_arithmetic", {"offset_upper_bound": 0}),
    ],
)
def test_options_that_may_never_end_are_refused(name: str, options: dict[str, int]) -> None:
    with pytest.raises(UserError, match=f"'{name}': wrong options: {ENDLESS[name][1][:12]}"):
        ReasoningGym(name, options)


def test_decimal_precision_of_the_thread_survives() -> None:
    task = ReasoningGym("decimal_arithmetic", {}).task(5)
    with decimal.localcontext(prec=3):
        assert ReasoningGym("decimal_arithmetic", {}).task(5) == task
        assert decimal.getcontext().prec == 3


def test_items_without_a_right_reference_are_left_out() -> None:
    """base_conversion of 0 has an empty answer; propositional_logic gives up and says `P`, true or not."""
    zero = ReasoningGym("base_conversion", {"min_value": 0, "max_value": 1})
    tasks = [zero.task(index) for index in range(200)]
    assert None in tasks and all(task.answer for task in tasks if task)
    logic = ReasoningGym("propositional_logic", {})
    assert any(logic.task(index) is None for index in range(1000))


@pytest.mark.parametrize("name", REFUSED)
def test_refused_environments_say_why(name: str) -> None:
    with pytest.raises(UserError, match="is refused: it") as caught:
        load_tasks([name], RewardsConfig())
    assert name in str(caught.value) and REFUSED[name] in str(caught.value)


def test_every_other_environment_is_refused_as_not_audited() -> None:
    from reasoning_gym.factory import DATASETS

    assert set(ALLOWED) | set(REFUSED) <= set(DATASETS) and not set(ALLOWED) & set(REFUSED)
    for name in set(DATASETS) - set(ALLOWED) - set(REFUSED):
        with pytest.raises(UserError, match=f"{name}.*not been audited"):
            load_tasks([name], RewardsConfig())


def test_catalogue_lists_every_allowed_environment() -> None:
    entries = {entry.name: entry for entry in list_environments()}
    assert list(entries) == list(ALLOWED)
    assert entries["fraction_simplification"].sets == ["small", "sapo"]
    assert entries["binary_matrix"].checker == "own" and entries["gcd"].checker == "library"
    assert all(entry.question and entry.answer for entry in entries.values())
    assert {name for members in SETS.values() for name in members} <= set(ALLOWED)
