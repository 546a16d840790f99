"""What is said of held-out figures that fell, and what is not."""

from __future__ import annotations

from swarm_node.observability import noise
from swarm_node.observability.falling import LEAST_OF_TASK, lower_tasks, remarks, withdrawn

SAMPLES = 8


def evaluations(*tasks: tuple[str, int, float, float]) -> tuple[list[str], list[float], list[float]]:
    """Labels, and shares before and now, of tasks given as (label, questions, share before, share now)."""
    labels = [label for label, n, _, _ in tasks for _ in range(n)]
    before = [share for _, n, share, _ in tasks for _ in range(n)]
    now = [share for _, n, _, share in tasks for _ in range(n)]
    return labels, before, now


def test_answers_that_become_alike_are_told() -> None:
    before = [1 / SAMPLES] * 128  # every question is solved by one of eight tries
    now = [1.0] * 40 + [0.0] * 88  # a third is always solved, the others never
    found = remarks(["gcd"] * 128, before, now, SAMPLES)
    assert list(found) == ["pass_k"]
    assert (
        "pass@8 fell by more than noise, from 1.000 to 0.312, while pass@1 went from 0.125 to 0.312" in found["pass_k"]
    )
    assert "`swarm-node resume RUN --set grpo.advantage=pass_k`" in found["pass_k"]
    followed = remarks(["gcd"] * 128, before, now, SAMPLES, for_one_right=True)["pass_k"]
    assert "grpo.advantage" not in followed and "a lower grpo.learning_rate slows that down" in followed


def test_a_withdrawn_remark_is_named() -> None:
    assert withdrawn("pass_k", SAMPLES).endswith("no longer show that pass@8 fell while pass@1 did not")
    assert withdrawn("task gcd", SAMPLES).endswith("no longer show that pass@1 of gcd fell")


def test_pass_k_may_fall_with_pass_1() -> None:
    found = remarks(["gcd"] * 128, [1 / SAMPLES] * 128, [0.0] * 128, SAMPLES)
    assert list(found) == ["task gcd"], "then the answers are not alike but wrong"
    assert found["task gcd"].endswith("from 0.125 to 0.000: lower grpo.learning_rate"), "no other task to weigh against"


def test_a_task_that_fell_is_named() -> None:
    found = remarks(*evaluations(("gcd", 30, 0.25, 0.5), ("count_bits", 20, 0.375, 0.125)), 1)
    assert list(found) == ["task count_bits"]
    assert "of count_bits fell by more than noise, from 0.375 to 0.125: give it more weight" in found["task count_bits"]


def test_a_fall_under_rising_rewards_blames_the_functions() -> None:
    found = remarks(["gcd"] * 128, [0.5] * 128, [0.0] * 128, SAMPLES, paid=True)["task gcd"]
    assert "the reward functions pay for something else; look at `swarm-node samples`" in found
    assert "learning_rate" not in found


def test_few_questions_of_a_task_say_nothing() -> None:
    assert remarks(*evaluations(("gcd", LEAST_OF_TASK - 1, 0.5, 0.0), ("lcm", 50, 0.5, 0.5)), 1) == {}


def test_too_few_questions_in_all_say_nothing() -> None:
    enough = noise.ENOUGH_QUESTIONS
    assert remarks(["gcd"] * (enough - 1), [0.5] * (enough - 1), [0.0] * (enough - 1), 1) == {}
    assert remarks(["gcd"] * enough, [0.5] * enough, [0.0] * enough, 1).keys() == {"task gcd"}


def test_noise_is_no_fall() -> None:
    before, now = [0.5, 0.25] * 64, [0.25, 0.5] * 64
    assert remarks(["gcd"] * 128, before, now, SAMPLES) == {}


def test_different_questions_are_not_compared() -> None:
    assert remarks(["gcd"] * 60, [1.0] * 60, [0.0] * 59, SAMPLES) == {}


def test_each_lower_task_has_a_verdict() -> None:
    tasks = ("gcd", 30, 0.25, 0.25), ("lcm", 13, 0.5, 0.0), ("count_bits", 5, 0.5, 0.25), ("sum", 9, 0.5, 0.48)
    found = lower_tasks(*evaluations(*tasks), SAMPLES, told=remarks(*evaluations(*tasks), SAMPLES))
    unsure = "lower, which may be noise: count_bits (5 questions) pass@1 0.500 -> 0.250"
    assert found == [unsure], "a remark tells of lcm"
    few = lower_tasks(*evaluations(*(task for task in tasks if task[0] != "sum"), ("sum", 1, 0.5, 0.25)), SAMPLES)
    assert few == [
        "lower by more than noise: lcm (13 questions) pass@1 0.500 -> 0.000, pass@8 1.000 -> 0.000",
        f"{unsure}; sum (1 question) pass@1 0.500 -> 0.250",
    ], "there are too few questions for a remark"
    assert lower_tasks(["gcd"] * 49, [0.5] * 49, [0.25] * 49, 1) == [], "the summary says the same of a single task"


def test_falling_rewards_are_named_as_such() -> None:
    fell = evaluations(("poems", 60, 12.0, 11.5), ("odes", 20, 1.0, 1.0))
    found = remarks(*fell, SAMPLES, figure="reward")
    assert list(found) == ["task poems"], "pass@k says nothing of rewards"
    assert found["task poems"].startswith("held-out mean reward of poems fell by more than noise, from 12.000 to 11.5")
    assert withdrawn("task poems", SAMPLES, "reward").endswith("mean reward of poems fell")
    assert lower_tasks(*fell, SAMPLES, "reward", found) == [], "the remark tells it"
    few = evaluations(("poems", 30, 12.0, 11.5), ("odes", 5, 1.0, 1.0))
    assert lower_tasks(*few, SAMPLES, "reward") == [
        "lower by more than noise: poems (30 questions) mean reward 12.000 -> 11.500"
    ]
    assert lower_tasks(["poems"] * 60, [9.0, 0.0] * 30, [0.0, 8.9] * 30, SAMPLES, "reward") == []


def test_rows_of_other_questions_have_no_verdict() -> None:
    assert lower_tasks(["gcd"] * 60, [1.0] * 60, [0.0] * 59, SAMPLES) == []
